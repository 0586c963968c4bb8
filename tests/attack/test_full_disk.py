"""The disk fills up, or fails once, at a chosen file operation: one sentence, nothing lost, and it can go on."""

import shutil

import pytest

from tests.support.attack import assert_same_tables, assert_sentence, count_operations, run, said, train_or_resume
from tests.support.strikes import Strike
from tests.support.training import assert_same

pytestmark = [pytest.mark.kills, pytest.mark.slow]


def strike_of(dice, folder, total):
    return Strike(str(folder), dice.randint(1, total), dice.choice(["full", "broken"]))


def assert_explained(code, log):
    """A command that was struck ends well (what failed was not needed) or with a sentence that names the disk."""
    assert code in (0, 1, 2), (code, said(log))
    assert "Traceback" not in said(log), said(log)
    if code:
        assert_sentence(said(log))
        assert any(words in said(log) for words in ("No space left on device", "Input/output error")), said(log)


def test_full_disk_under_a_run(tally, whole, tmp_path):
    counted = tmp_path / "counted"
    total = count_operations([*train_or_resume(counted)], counted, tmp_path / "log")
    for dice in tally.dice():
        folder, log = tmp_path / "run", tmp_path / "run.log"
        strike = strike_of(dice, folder, total)
        with tally.attempt(str((strike.at, strike.how))):
            assert_explained(run(train_or_resume(folder), log, strike), log)
            log.unlink()
            assert run(train_or_resume(folder), log) == 0, said(log)
            assert "Traceback" not in said(log), said(log)
            assert_same(whole, folder)
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
    tally.check()


def test_full_disk_under_the_table_of_a_sweep(tally, swept, tmp_path):
    """The table that was there is whole, and the same command afterwards writes the new one."""
    file, undisturbed = swept

    def command(folder):
        return ["sweep", file, "--out", folder, "--threads", "1", "--device", "cpu"]

    shutil.copytree(undisturbed, tmp_path / "counted")
    total = count_operations(command(tmp_path / "counted"), tmp_path / "counted", tmp_path / "log")
    for dice in tally.dice():
        folder, log = tmp_path / "out", tmp_path / "out.log"
        shutil.copytree(undisturbed, folder)
        strike = strike_of(dice, folder, total)
        with tally.attempt(str((strike.at, strike.how))):
            assert_explained(run(command(folder), log, strike), log)
            assert_same_tables(undisturbed, folder)
            for name in dice.sample(["results.csv", "results.parquet", "sweep.json"], dice.randint(1, 3)):
                (folder / name).unlink(missing_ok=True)
            log.unlink()
            assert_explained(run(command(folder), log, strike), log)
            assert run(command(folder), log) == 0, said(log)
            assert_same_tables(undisturbed, folder)
        shutil.rmtree(folder)
        log.unlink(missing_ok=True)
    tally.check()


PAGES = {
    "page.html": lambda whole, out: ["report", whole, "--out", out],
    "puzzle.png": lambda whole, out: ["puzzle", "--out", out],
    "puzzle.svg": lambda whole, out: ["puzzle", "--out", out],
    "split.jsonl": lambda whole, out: ["export", "logic", "--split", "iid", "--count", "20", "--out", out],
}


def test_full_disk_under_what_is_drawn(tally, whole, tmp_path):
    """A page, a picture or a table that was there stays as it was, or is the new one; it is never half of one."""
    known = {}
    for dice in tally.dice():
        name = dice.choice(list(PAGES))
        if name not in known:
            counted = tmp_path / f"counted-{name}"
            counted.mkdir()
            command = PAGES[name](whole, counted / name)
            total = count_operations(command, counted, tmp_path / "log", TMPDIR=str(counted))
            known[name] = total, (counted / name).read_bytes()
        total, good = known[name]
        folder, log = tmp_path / "out", tmp_path / "out.log"
        folder.mkdir()
        (folder / name).write_bytes(b"what was there before")
        strike = strike_of(dice, folder, total)
        with tally.attempt(f"{name}, {strike.at} {strike.how}"):
            code = run(PAGES[name](whole, folder / name), log, strike, TMPDIR=str(folder))
            assert_explained(code, log)
            assert (folder / name).read_bytes() in ([good] if code == 0 else [good, b"what was there before"])
        shutil.rmtree(folder)
        log.unlink(missing_ok=True)
    tally.check()
