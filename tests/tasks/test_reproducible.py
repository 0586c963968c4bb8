"""The same bytes on every machine: pinned hashes, with and without Numba, in other processes, and slim imports."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headcode.tasks import TASKS, FuzzyLogic, SRaven
from headcode.tasks.streams import Stream
from tests.support import GOLDENS

PINS = json.loads((GOLDENS / "tasks_fingerprints.json").read_text())


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: f"{pin['task']}-{pin['split']}-{pin['start']}")
def test_the_bytes_are_pinned(pin):
    """A failure means that published instances changed: raise the task's `version` and pin anew, or undo the change."""
    task = TASKS[pin["task"]].from_dict(pin["config"])
    assert task.version == pin["generator_version"]
    assert task.fingerprint(pin["split"], pin["count"], pin["start"]) == pin["sha256"]


def test_pins_cover_every_split_of_every_task_that_draws_its_instances():
    pinned = {(pin["task"], pin["split"]) for pin in PINS}
    drawn = [kind() for kind in TASKS.values() if not kind.reads_text]
    assert {FuzzyLogic(), SRaven()} <= set(drawn)
    assert pinned == {(task.name, split) for task in drawn for split in task.splits}


def test_tasks_have_random_addresses_of_their_own():
    ids = [kind.task_id for kind in TASKS.values()]
    assert len(set(ids)) == len(ids)
    for task, version in ((256, 1), (1, 256), (-1, 1)):
        with pytest.raises(ValueError, match=f"task_id and version must lie in 0..255, got {task} and {version}"):
            Stream(seed=0, task=task, version=version, name="train")


def test_the_version_is_part_of_the_hash_and_of_the_streams(monkeypatch):
    before = SRaven().fingerprint("iid", 3), SRaven().sample("iid", 0, 3).x
    monkeypatch.setattr(SRaven, "version", 2)
    assert SRaven().fingerprint("iid", 3) != before[0]
    assert not SRaven().sample("iid", 0, 3).x.equal(before[1])


def test_the_hash_does_not_depend_on_how_the_instances_were_cut():
    task = FuzzyLogic(num_points=5)
    assert task.fingerprint("iid", 23, 4, chunk=7) == task.fingerprint("iid", 23, 4)
    assert task.fingerprint("iid", 23, 4) != task.fingerprint("iid", 23, 5)
    with pytest.raises(ValueError, match="1 or more"):
        task.fingerprint("iid", 0)


def run(code, **environment):
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


COMPARE = """
import hashlib, numpy as np
from headcode.jit import numba_enabled
from headcode.tasks import FuzzyLogic, SRaven, oracle
print(numba_enabled())
for task in (SRaven(aligned=((0, 1.0), (60, 0.0)), seed=3), SRaven(num_features=3, num_values=7, grid=4),
             SRaven(permute=False), FuzzyLogic(t_norm="product", num_points=7), FuzzyLogic(num_points=16)):
    for split in task.splits:
        print(task.fingerprint(split, 61, 2**40))
puzzles = SRaven(num_features=3).raw("iid", np.arange(40))["puzzles"]
found = oracle.solve(puzzles)
for array in (found.flat_answers, found.flat_probabilities, found.explanations, found.rules):
    print(hashlib.sha256(array.tobytes()).hexdigest())
"""


def test_numba_off_gives_the_same_bytes():
    compiled = run(COMPARE, HEADCODE_DISABLE_NUMBA="0").splitlines()
    plain = run(COMPARE, HEADCODE_DISABLE_NUMBA="1").splitlines()
    assert (compiled[0], plain[0]) == ("True", "False")
    assert compiled[1:] == plain[1:]


def test_tasks_need_only_torch_and_numpy():
    code = """
import sys
for name in ("numba", "matplotlib", "pyarrow", "scipy", "rich", "tyro", "safetensors"):
    sys.modules[name] = None
import headcode.tasks
from headcode.tasks import export, render, text
print(headcode.tasks.SRaven().sample("iid", 0, 2).x.shape, headcode.tasks.FuzzyLogic().sample("iid", 0, 2).y.shape)
"""
    assert run(code, HEADCODE_DISABLE_NUMBA="1") == "torch.Size([2, 36, 8]) torch.Size([2, 1])"


def test_importing_the_tasks_does_not_import_numba_or_matplotlib():
    code = "import sys, headcode.tasks; print(sorted({'numba', 'matplotlib', 'pyarrow', 'scipy'} & set(sys.modules)))"
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "task",
    [FuzzyLogic(num_points=3, seed=2), SRaven(num_features=3, aligned=((0, 0.9), (300, 0.1)), seed=2)],
    ids=["logic", "sraven"],
)
@given(index=st.integers(0, 50), size=st.integers(1, 9), data=st.data())
@settings(max_examples=25, deadline=None)
def test_an_instance_does_not_depend_on_its_batch(task, index, size, data):
    split = data.draw(st.sampled_from(task.splits))
    batch = task.sample(split, index, size)
    alone = task.instances(split, [index * size + size - 1])
    assert torch.equal(batch.x[-1:], alone.x)
    assert torch.equal(batch.y[-1:], alone.y)
    for name, value in alone.info.items():
        assert torch.equal(batch.info[name][-1:], value)
