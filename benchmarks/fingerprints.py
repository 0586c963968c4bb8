"""Fingerprints of what a change of the code's form must leave alone, to be compared before and after it:

    python benchmarks/fingerprints.py weights [--steps 200]    bytes of trained weights, each method on both tasks
    python benchmarks/fingerprints.py help                     the text of --help of every command

One thread, so that a line is the same on any machine of one kind. All methods take about five minutes.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

METHODS = (
    "softmax",
    "linear",
    "linear_rms",
    "hyla",
    "hyla_unnormed",
    "hyla_deep_linear",
    "hyla_deep_linear_unnormed",
    "softmax_hyla",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weights", "help"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tasks", nargs="+", default=["logic", "sraven"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    if arguments.what == "help":
        print_help(())
        return
    for task in arguments.tasks:
        for method in arguments.methods:
            print(f"{task:8}{method:28}{weights(task, method, arguments.steps)}", flush=True)


def weights(task: str, method: str, steps: int) -> str:
    import headcode

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        options = ["--steps", str(steps), "--seed", "0", "--eval-every", "0", "--threads", "1", "--out", str(out)]
        headcode_command("train", task, "--method", method, *options)
        digest = hashlib.sha256()
        for name, tensor in sorted(headcode.load(out).state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def print_help(command: tuple[str, ...]) -> None:
    text = headcode_command(*command, "--help")
    print(f"{' '.join(('headcode', *command)):40}{hashlib.sha256(text.encode()).hexdigest()[:16]}", flush=True)
    for name in re.findall(r"^  ([a-z]+) ", text.partition("commands:\n")[2], re.M):
        print_help((name,))
    if command in (("train",), ("bench",)):
        for name in re.search(r"\{([a-z,]+)\}", text).group(1).split(","):
            print_help((*command, name))


def headcode_command(*words: str) -> str:
    command = [sys.executable, "-m", "headcode", *words]
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode:
        sys.exit(finished.stderr)
    return finished.stdout


main()
