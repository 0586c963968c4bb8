"""Files of a finished run are damaged at random: every command gives the exact result, or says what is damaged."""

import json
import shutil

import pytest

from tests.support.attack import assert_sentence, run, said
from tests.support.training import outcome

pytestmark = pytest.mark.slow


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(dice, path, folder):
    """One bit to a few of them."""
    content = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 1, 1, 2, 9])):
        if content:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def truncate(dice, path, folder):
    content = path.read_bytes()
    path.write_bytes(content[: dice.randrange(len(content) + 1)])


def zero(dice, path, folder):
    """A block that never reached the disk."""
    content = bytearray(path.read_bytes())
    first = dice.randrange(len(content) + 1)
    length = min(dice.choice([1, 7, 512, 4096]), len(content) - first)
    content[first : first + length] = bytes(length)
    path.write_bytes(content)


def swap(dice, path, folder):
    """Two files change places."""
    other = dice.choice(files_of(folder))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def grow(dice, path, folder):
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.choice([1, 9, 5000])))


def remove(dice, path, folder):
    path.unlink()


DAMAGES = [flip, flip, flip, truncate, zero, swap, grow, remove]


@pytest.fixture(scope="module")
def right(whole, tmp_path_factory):
    """What `eval` prints for every checkpoint of the undisturbed run."""
    folder = tmp_path_factory.mktemp("right")
    found = {}
    for checkpoint in (whole / "checkpoints").iterdir():
        log = folder / checkpoint.name
        assert run(["eval", whole, "--json", "--checkpoint", checkpoint.name], log) == 0, said(log)
        found[checkpoint.name] = json.loads(said(log))["splits"]
    return found


def is_enough(folder, whole):
    """Whether what a command needs is left: all but accounts of the run and checkpoints, of which one is whole."""
    names = [path.relative_to(whole) for path in files_of(whole)]
    changed = {name for name in names if not is_equal(whole / name, folder / name)}
    numbers = {path.parts[1] for path in changed if path.parts[0] == "checkpoints"}
    rest = {path.as_posix() for path in changed if path.parts[0] != "checkpoints"}
    return rest <= {"timing.jsonl", "environment.json"} and len(numbers) < len(list((whole / "checkpoints").iterdir()))


def is_equal(one, two):
    return two.is_file() and one.read_bytes() == two.read_bytes()


def check_evaluation(folder, log, right, must_work):
    """The exact numbers of the newest checkpoint; of another one only if it says so; or a sentence."""
    code = run(["eval", folder, "--json"], log)
    words = said(log)
    assert "Traceback" not in words, words
    if code != 0:
        assert code == 2 and not must_work, (code, words)
        assert_sentence(words)
        return
    warned, _, answer = words.partition("{\n")
    answer = json.loads("{\n" + answer)
    newest = max(answer["step"], *(int(name.removeprefix("step-")) for name in right))
    assert answer["splits"] == right[f"step-{answer['step']}"], f"a wrong number: {words}"
    assert answer["step"] == newest or "A damaged checkpoint was passed over" in warned, f"an older result: {words}"


def check_resumption(folder, log, whole, must_work):
    """The same bytes in the end, or a sentence; a recorded runtime that cannot be is asked about, not replaced."""
    code = run(["resume", folder], log)
    words = said(log)
    assert "Traceback" not in words, words
    if code == 0:
        assert outcome(folder) == outcome(whole), f"a wrong result: {words}"
    else:
        asked = "environment.json has no valid runtime" in words
        assert code == 2 and (asked or not must_work), (code, words)
        assert_sentence(words)


def check_report(folder, log, page):
    code = run(["report", folder, "--out", page], log)
    words = said(log)
    assert "Traceback" not in words, words
    assert code in (0, 2), (code, words)
    assert page.exists() == (code == 0)


def test_corruption_of_a_run(tally, whole, right, tmp_path):
    for dice in tally.dice():
        folder, logs = tmp_path / "run", tmp_path / "logs"
        shutil.copytree(whole, folder)
        logs.mkdir()
        path, damage = dice.choice(files_of(folder)), dice.choice(DAMAGES)
        damage(dice, path, folder)
        with tally.attempt(f"{damage.__name__} {path.relative_to(folder)}"):
            must_work = is_enough(folder, whole)
            check_evaluation(folder, logs / "eval", right, must_work)
            check_resumption(folder, logs / "resume", whole, must_work)
            if path.parent == folder and damage is not remove:
                check_report(folder, logs / "report", tmp_path / "page.html")
        for made in (folder, logs):
            shutil.rmtree(made)
        (tmp_path / "page.html").unlink(missing_ok=True)
    tally.check()
