"""Small runs to attack, and a line about every kind of attack."""

import os

import pytest

from tests.support.attack import SWEEP, TRAIN, Tally, run, said


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
