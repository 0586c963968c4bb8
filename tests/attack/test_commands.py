"""Commands of random words: each ends with exit code 0, 1 or 2 and without a traceback, and none hangs."""

import json
import shutil

import pytest

from headcode.cli import COMMANDS
from tests.support.attack import PATIENCE, SIZES, start
from tests.support.fuzz import run_many

pytestmark = pytest.mark.slow

BATCH = 25
"""Commands of one process."""
WORDS = [
    *("", " ", "-", "--", "---", "=", "None", "True", "null", "nan", "inf", "-inf", "0", "-0", "1", "-1", "2", "7"),
    *("0.5", "1e308", "-1e-320", "1e400", "0x10", "1_000", "٣", "½", "99999999999999999999", str(2**31), str(2**63)),
    *(str(-(2**63)), "1" * 400, "é", "日本語", "🙂", "\u202e", "\udcff", "a" * 300, "../..", "/", "/dev/null", "~"),
    *("/proc/self/mem", "zoo/none", "[1,2]", "[[0, 1]]", "{}", "{'a': 1}", "a=b", "seed=0,1", "%s%n"),
    *("<b>", "; true", "$(true)", "`true`", "\n", "\t", "last", "best", "step-9", "hyla", "softmax", "train", "iid"),
]
# Left out are words that ask for minutes of legitimate work: huge values of these, and real models without a --size.
COSTLY = ("steps", "eval-size", "size", "count", "batch-size", "eval-batch-size", "max-tokens", "map-size", "pairs")
SAFE = ["", "-1", "0", "1", "2", "3", "nan", "x", "é", "1.5", "None", "[]"]
FLAGS = {
    "train": "method seed num-points dim num-layers num-heads qk-dim v-dim mlp-dim steps batch-size backend held-out "
    "novel learning-rate weight-decay warmup-steps ema-decay attention-dropout position precision eval-size eval-every "
    "device log-every checkpoint-every threads preset accumulate clip-norm optimizer task-seed num-variables num-terms",
    "resume": "device threads compile fsdp",
    "sweep": "preset set jobs engine option device threads",
    "results": "where columns group-by sort",
    "eval": "split checkpoint size batch-size device",
    "codes": "split size start layers queries keys checkpoint inputs batch-size map map-size seed out",
    "decode": "layers keys split inputs checkpoint size seed controls out",
    "lens": "text images layers max-texts max-tokens built patched data pairs networks seed out",
    "generate": "prompt max-tokens temperature top-p seed checkpoint tokenizer recurrent device threads",
    "puzzle": "seed held-out num-features num-values grid permute rules aligned blank num-variables num-terms "
    "num-points novel t-norm inputs split instance out variables",
    "export": "seed held-out num-features num-values grid rules aligned blank num-variables num-terms num-points split "
    "count start out format",
    "report": "out",
    "info": "method length",
}
STARTS = {
    "train": f"train logic {SIZES} --steps 1 --eval-size 2 --device cpu --dry-run",
    "resume": "resume RUN",
    "sweep": "sweep logic --dry-run --set seed=0",
    "results": "results RUN",
    "eval": "eval RUN --size 3",
    "codes": "codes RUN --size 3",
    "decode": "decode RUN --size 8",
    "lens": "lens RUN --text RUN/config.json",
    "generate": "generate RUN",
    "puzzle": "puzzle",
    "export": "export logic --count 3",
    "report": "report RUN",
    "info": "info RUN",
}


def command_of(dice, run):
    """A command that works, with some flags added; or a heap of words."""
    if dice.random() < 0.15:
        first = dice.choice(dice.choice([list(STARTS), WORDS]))
        return [first, *dice.choices([*WORDS, *COMMANDS, "--help"], k=dice.randint(0, 4))]
    name = dice.choice(list(STARTS))
    words = [word.replace("RUN", str(run)) for word in STARTS[name].split()]
    if dice.random() < 0.1:
        words[dice.randrange(1, len(words)) if len(words) > 1 else 0] = dice.choice(WORDS)
    for flag in dice.sample(FLAGS[name].split(), min(dice.randint(1, 3), len(FLAGS[name].split()))):
        value = dice.choice(SAFE if flag in COSTLY else WORDS)
        words += [f"--{flag}={value}"] if dice.random() < 0.4 else [f"--{flag}", value]
    return words


def ended(commands, folder, record):
    """How each command of a process ended; the last one may have ended the process, or hang."""
    process = start(run_many, commands, str(folder), str(record))
    process.join(PATIENCE)
    hangs = process.exitcode is None
    process.kill()
    process.join()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    record.unlink()
    found = {line["number"]: line for line in lines if "code" in line}
    begun = lines[-1]["number"]
    if begun not in found:
        found[begun] = {"code": "hangs" if hangs else f"died ({process.exitcode})", "words": "", "seconds": 0.0}
    return found


def test_fuzzed_commands(tally, whole, tmp_path):
    run = tmp_path / "run"
    for dice in tally.dice():
        # A copy for each try: `resume --threads` is noted in the run, and decides the bits of later resumes.
        shutil.copytree(whole, run)
        commands = [command_of(dice, run) for _ in range(BATCH)]
        for number, end in ended(commands, tmp_path, tmp_path / "record").items():
            with tally.attempt(f"headcode {commands[number]}"):
                assert end["code"] in (0, 1, 2), (end["code"], end["words"])
                assert "Traceback" not in end["words"], end["words"]
                assert end["code"] == 0 or end["words"].strip().splitlines()[-1].startswith("headcode: "), end["words"]
        shutil.rmtree(run)
    tally.check()
