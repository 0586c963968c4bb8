"""SIGKILL at a chosen file operation, in the middle of a write as well: resumed, it is the same run, byte for byte."""

import shutil
import signal

import pytest

from tests.support.attack import TRAIN, assert_same_tables, count_operations, run, said, train_or_resume
from tests.support.strikes import Strike
from tests.support.training import assert_same

pytestmark = [pytest.mark.kills, pytest.mark.slow]


def test_kills_of_a_run(tally, whole, tmp_path):
    """One to three kills, each at any file operation of a whole run or of what is left of it."""
    total = count_operations([*TRAIN, "--out", tmp_path / "counted"], tmp_path / "counted", tmp_path / "log")
    assert_same(whole, tmp_path / "counted")
    for dice in tally.dice():
        folder, log = tmp_path / "run", tmp_path / "run.log"
        strikes = [Strike(str(folder), dice.randint(1, total), dice.choice(["kill", "torn"]))]
        while dice.random() < 0.4 and len(strikes) < 3:
            strikes.append(Strike(str(folder), dice.randint(1, total // 2), dice.choice(["kill", "torn"])))
        with tally.attempt(str([(strike.at, strike.how) for strike in strikes])):
            for strike in strikes:
                code = run(train_or_resume(folder), log, strike)
                assert code in (-signal.SIGKILL, 0), said(log)  # 0: fewer operations were left than the number says
            assert run(train_or_resume(folder), log) == 0, said(log)
            assert "Traceback" not in said(log), said(log)
            assert_same(whole, folder)
            left = [path.name for path in folder.rglob(".*") if path.name != ".lock"]
            assert not left, f"left behind: {left}"
            kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
            assert kept == sorted(path.name for path in (whole / "checkpoints").iterdir()), kept
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
    tally.check()


def test_kills_of_the_table_of_a_sweep(tally, swept, tmp_path):
    """The runs are finished; the process that writes their tables is killed."""
    file, undisturbed = swept
    shutil.copytree(undisturbed, tmp_path / "counted")

    def command(folder):
        return ["sweep", file, "--out", folder, "--threads", "1", "--device", "cpu"]

    total = count_operations(command(tmp_path / "counted"), tmp_path / "counted", tmp_path / "log")
    for dice in tally.dice():
        folder, log = tmp_path / "out", tmp_path / "out.log"
        shutil.copytree(undisturbed, folder)
        for name in dice.sample(["results.csv", "results.parquet", "sweep.json"], dice.randint(0, 3)):
            (folder / name).unlink(missing_ok=True)
        strike = Strike(str(folder), dice.randint(1, total), dice.choice(["kill", "torn"]))
        with tally.attempt(str((strike.at, strike.how))):
            assert run(command(folder), log, strike) in (-signal.SIGKILL, 0), said(log)
            assert run(command(folder), log) == 0, said(log)
            assert "Traceback" not in said(log), said(log)
            assert_same_tables(undisturbed, folder)
        shutil.rmtree(folder)
        log.unlink(missing_ok=True)
    tally.check()
