"""Hostile files: whatever a file holds, a command ends in time, with exit code 0 or 2 and no traceback."""

import pytest

from tests.support.hostile_files import SCENES, attempt, copy_world, make_world, seal, spoil

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory, texts):
    return make_world(tmp_path_factory.mktemp("world"))


def test_hostile_files(tally, world, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADCODE_TEXTS", "")  # put back afterwards
    for dice in tally.dice():
        scene = dice.choice(SCENES)
        command = dice.choice(scene.commands)
        own = copy_world(world, tmp_path / "own")
        how = spoil(own / scene.file, dice)
        if scene.sealed:
            seal(own, own / scene.file)
        with tally.attempt(f"{command} on {scene.file}, {how}"):
            ended = attempt(command.replace("{}", str(own)).split())
            assert ended.error is None and ended.code in (0, 2), ended
            if ended.code == 2:
                assert ended.said.count("\n") <= 3 and len(ended.said) < 3000, ended.said
    tally.check()
