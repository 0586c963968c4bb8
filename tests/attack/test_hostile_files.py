"""Hostile files: whatever a file holds, a command ends in time, with exit code 0 or 2 and no traceback.

HEADCODE_ATTACK_SECONDS (30) and HEADCODE_ATTACK_SEED (0) set how long the seeded part goes on, and where it starts.
"""

import os
import random
import time
from collections import Counter

import pytest
from hostile import SCENES, attempt, copy_world, make_world, seal, spoil

SECONDS = float(os.environ.get("HEADCODE_ATTACK_SECONDS", "30"))
SEED = int(os.environ.get("HEADCODE_ATTACK_SEED", "0"))


@pytest.fixture(scope="session")
def world(tmp_path_factory, texts):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def own(world, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADCODE_TEXTS", "")  # put back afterwards
    return copy_world(world, tmp_path / "own")


@pytest.mark.slow
def test_the_seeded_attack(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADCODE_TEXTS", "")
    rng = random.Random(SEED)
    counts, failures = Counter(), []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        scene = rng.choice(SCENES)
        command = rng.choice(scene.commands)
        own = copy_world(world, tmp_path / "own")
        how = spoil(own / scene.file, rng)
        if scene.sealed:
            seal(own, own / scene.file)
        ended = attempt(command.replace("{}", str(own)).split())
        counts[scene.file] += 1
        one_sentence = ended.said.count("\n") <= 3 and len(ended.said) < 3000
        if ended.error is not None or ended.code not in (0, 2) or (ended.code == 2 and not one_sentence):
            failures.append(f"{command} on {scene.file}, {how}: {ended.code} {ended.error!r:.300} {ended.said[-300:]}")
    with capsys.disabled():
        print(f"\nhostile files, seed {SEED}: {counts.total()} cases of {len(counts)} files, {len(failures)} failures")
    assert not failures, "\n".join(failures)
