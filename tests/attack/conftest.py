"""Small runs to attack, and a line about every kind of attack."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "train"))  # kill_target, training_helpers

from attack import Tally, run, said

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


@pytest.fixture
def tally(request, capsys):
    """The count of this test's tries, printed at its end."""
    made = Tally(request.node.name.removeprefix("test_"))
    yield made
    with capsys.disabled():
        print(f"\n{made.line()}", end=" ")
    if summary := os.environ.get("HEADCODE_ATTACK_SUMMARY"):
        with open(summary, "a") as file:
            print(made.line(), file=file)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert run([*TRAIN, "--out", folder / "run"], folder / "log") == 0, said(folder / "log")
    return folder / "run"


@pytest.fixture(scope="session")
def swept(tmp_path_factory):
    """A sweep file, and the folder of a sweep of it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "three.py").write_text(SWEEP)
    arguments = ["sweep", folder / "three.py", "--out", folder / "out", "--threads", "1", "--device", "cpu"]
    assert run(arguments, folder / "log") == 0, said(folder / "log")
    return folder / "three.py", folder / "out"
