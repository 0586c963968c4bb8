"""What all attacks share: a seed, a time budget, a count of tries and failures, and processes that start fast.

HEADCODE_ATTACK_SEED     another seed gives other attacks; 0 unless given
HEADCODE_ATTACK_SECONDS  how long each kind of attack goes on; 10 unless given
HEADCODE_ATTACK_TRY      carries out the try of this number alone, to repeat a failure
HEADCODE_ATTACK_SUMMARY  a file to which each kind adds its line
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import start
from tests.support.strikes import Strike, run_struck

SEED = os.environ.get("HEADCODE_ATTACK_SEED", "0")
SECONDS = float(os.environ.get("HEADCODE_ATTACK_SECONDS", "10"))
ONLY = os.environ.get("HEADCODE_ATTACK_TRY")
FEWEST = 3
"""Tries that are made however short the time is."""
PATIENCE = 60.0
"""Seconds after which a process counts as hanging: each has a few seconds of work, on a machine that may be busy."""

SIZES = (
    "--num-points 7 --num-layers 1 --dim 10 --num-heads 2 --qk-dim 6 --v-dim 6 --mlp-dim 11 --batch-size 6 "
    "--eval-size 23 --eval-batch-size 5 --warmup-steps 3 --backend reference"
)
TRAIN = (
    f"train logic {SIZES} --steps 12 --log-every 2 --eval-every 4 --checkpoint-every 3 --ema-decay 0.9 "
    "--threads 1 --device cpu"
).split()
SWEEP = """
from headcode.presets import override, preset
from headcode.sweep import grid

def sweep():
    sizes = dict(num_points=7, num_layers=1, dim=10, num_heads=2, qk_dim=6, v_dim=6, mlp_dim=11, batch_size=6)
    rest = dict(eval_size=23, eval_batch_size=5, warmup_steps=3, backend="reference", steps=4, eval_every=4)
    yield from grid(override(preset("logic"), **sizes, **rest), seed=[0, 1, 2])
"""


class Tally:
    """Counts the tries of one kind of attack; a try that breaks a promise is noted, and the attack goes on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.tries, self.failures = kind, 0, []
        self.number = 0

    def dice(self) -> Iterator[random.Random]:
        """Dice for one try after the other, until the time is up; each try depends on the seed and its number alone."""
        end = time.monotonic() + SECONDS
        while self.number < FEWEST or time.monotonic() < end:
            if ONLY is None or int(ONLY) == self.number:
                yield random.Random(f"{SEED} {self.kind} {self.number}")
            elif self.number > int(ONLY):
                return
            self.number += 1

    @contextlib.contextmanager
    def attempt(self, words: str) -> Iterator[None]:
        """One try; an assertion that fails in it is counted."""
        self.tries += 1
        try:
            yield
        except AssertionError as broken:
            self.failures.append(f"try {self.number}, {words}: {broken}")

    def line(self) -> str:
        return f"attack {self.kind}: {self.tries} tries, {len(self.failures)} failures (seed {SEED})"

    def check(self) -> None:
        """No promise was broken, and something was tried."""
        assert self.tries, "nothing was tried"
        shown = "\n".join(_shortened(failure) for failure in self.failures[:5])
        assert not self.failures, f"{self.line()}; repeat one with HEADCODE_ATTACK_TRY=number\n{shown}"


def _shortened(text: str, most: int = 4000) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def finish(process, log: Path) -> int:
    """The exit code of a process; one that hangs is killed and breaks the promise."""
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"it hangs: {said(log)}")
    return process.exitcode


def said(log: Path) -> str:
    """What a process printed."""
    return log.read_text(errors="replace") if log.exists() else ""


def run(arguments, log: Path, strike=None, **environment: str) -> int:
    """One `headcode` command in a process of its own, struck at a file operation if told so; its exit code."""
    return finish(start(run_struck, [str(word) for word in arguments], str(log), strike, environment), log)


def assert_sentence(words: str) -> None:
    """What a user reads after a mistake or a mishap: it ends in a sentence of ours, and nothing is a traceback."""
    assert "Traceback" not in words, words
    lines = words.strip().splitlines()
    assert lines and lines[-1].startswith("headcode: "), words


def count_operations(arguments, folder, log, **environment):
    """How many file operations a command does below a folder when nothing strikes it."""
    assert run(arguments, log, Strike(str(folder), 0, "count"), **environment) == 0, said(log)
    number = int(folder.with_name(folder.name + ".count").read_text())
    assert number > 3
    return number


def train_or_resume(folder):
    return ["resume", folder] if (folder / "config.json").is_file() else [*TRAIN, "--out", folder]


def assert_same_tables(one, other):
    for name in ("sweep.json", "results.csv", "results.parquet"):
        assert (one / name).exists() == (other / name).exists(), name
        if (one / name).exists():
            assert (one / name).read_bytes() == (other / name).read_bytes(), f"{name} differs"
