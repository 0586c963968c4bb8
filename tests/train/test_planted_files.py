"""Links and pipes that others put into run folders, sweep folders and stores: not written through, not waited for."""

import hashlib
import json
import os
import shutil

import pytest

from headcode.analysis.decode import write_csv
from headcode.files import replace_file
from headcode.report import style
from headcode.sweep import run_sweep
from headcode.sweep.process import open_log
from headcode.sweep.table import ResultsTable
from headcode.tasks.language import shards
from headcode.train import TrainingFailed
from headcode.train.checkpoint import DamagedCheckpoint, read_checkpoint
from headcode.train.folder import RunFolder, is_in_use
from tests.support.training import small_config, train, write_sealed

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="links and pipes as on Unix")
SECRET = "a file of somebody else\n"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text(SECRET)
    return path


def plant(path, victim, kind):
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_of_a_run(run, victim, kind):
    plant(run / ".lock", victim, kind)
    assert not is_in_use(run)
    words = r"run cannot be written \(.*\.lock is not a regular file but a link, a pipe or the like; remove it\)"
    with pytest.raises(ValueError, match=words):
        RunFolder.open(run)
    with pytest.raises(ValueError, match=words):
        train(small_config(), run)
    assert victim.read_text() == SECRET


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_timing_of_a_run(run, victim, kind):
    shutil.rmtree(run / "checkpoints")
    plant(run / "timing.jsonl", victim, kind)
    with pytest.raises(TrainingFailed, match=r"could not be written at step 7 \(.*timing\.jsonl is not a regular file"):
        train(small_config(), run)
    assert victim.read_text() == SECRET


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_records_of_a_run(run, victim, kind):
    """Replaced as a whole, by a file of our own."""
    plant(run / "metrics.jsonl", victim, kind)
    train(small_config(), run)
    assert (run / "metrics.jsonl").is_file() and not (run / "metrics.jsonl").is_symlink()
    assert victim.read_text() == SECRET


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_draft_of_a_file(tmp_path, victim, kind):
    """The name of a draft has the process in it, which can be guessed."""
    plant(tmp_path / f".table.csv.{os.getpid()}", victim, kind)
    with pytest.raises(OSError, match="is not a regular file"):
        replace_file(tmp_path / "table.csv", b"new")
    assert victim.read_text() == SECRET and not (tmp_path / "table.csv").exists()


def test_tables_and_figures_replace_a_link(tmp_path, victim):
    for name in ("rows.csv", "figure.png"):
        (tmp_path / name).symlink_to(victim)
    write_csv([{"a": 1, "b": 0.12345678}], tmp_path / "rows.csv")
    with style.canvas(1, 1) as (figure, _):
        style.save(figure, tmp_path / "figure", formats=("png",))
    assert (tmp_path / "rows.csv").read_bytes() == b"a,b\n1,0.123457\n"
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert victim.read_text() == SECRET and not (tmp_path / "figure.png").is_symlink()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_and_the_logs_of_a_sweep(tmp_path, victim, kind):
    out = tmp_path / "sweep"
    out.mkdir()
    plant(out / ".lock", victim, kind)
    with pytest.raises(ValueError, match=r"sweep cannot be written \(.*\.lock is not a regular file"):
        run_sweep({"one": small_config()}, out, threads=1)
    (out / "logs").mkdir()
    plant(out / "logs" / "abc.log", victim, kind)
    with pytest.raises(OSError, match="is not a regular file"):
        open_log(out / "logs" / "abc.log")
    assert victim.read_text() == SECRET


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_of_the_text_store(tmp_path, victim, kind, monkeypatch):
    monkeypatch.setenv("HEADCODE_TEXTS", str(tmp_path))
    plant(tmp_path / ".lock", victim, kind)
    with pytest.raises(OSError, match="is not a regular file"), shards.locked_store():
        pass
    assert victim.read_text() == SECRET


@pytest.mark.parametrize("name", ["../step-24/model.safetensors", "{folder}/model.safetensors", ".."])
def test_a_state_that_names_files_elsewhere_is_damaged(run, name):
    folder = run / "checkpoints" / "step-30"
    name = name.format(folder=run / "checkpoints" / "step-24")
    state = json.loads((folder / "state.json").read_text())
    content = (folder / name).read_bytes() if name != ".." else b""
    state["files"][name] = hashlib.sha256(content).hexdigest()
    write_sealed(folder / "state.json", state)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json names a file of another folder"):
        read_checkpoint(folder)


def test_a_sweep_that_names_runs_elsewhere(run, tmp_path):
    """A finished run outside of the sweep's folder makes no row."""
    (tmp_path / "sweep" / "runs").mkdir(parents=True)
    shutil.copytree(run, tmp_path / "sweep" / "runs" / "0123456789ab")
    names = {"inside": "0123456789ab", "outside": "../../run", "absolute": str(run), "number": 3}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": names}))
    ResultsTable(tmp_path / "sweep").write()
    rows = (tmp_path / "sweep" / "results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["inside"]


def test_a_link_in_place_of_the_checkpoints(run, tmp_path):
    """Training deletes old checkpoints: not through a link, behind which may be anyone's folders."""
    elsewhere = tmp_path / "elsewhere"
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    for name in ("step-1", "step-2", ".step-3.99"):
        (elsewhere / name).mkdir()
        (elsewhere / name / "thesis").write_text(SECRET)
    before = sorted(path.name for path in elsewhere.iterdir())
    with pytest.raises(ValueError, match=r"checkpoints is a symbolic link, through which nothing is written"):
        train(small_config(), run)
    assert sorted(path.name for path in elsewhere.iterdir()) == before


def test_linked_metrics_become_a_file_of_the_run(run, tmp_path):
    """As in folders of git-annex or DVC, whose files are links into a store."""
    content = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").rename(tmp_path / "stored")
    (run / "metrics.jsonl").symlink_to(tmp_path / "stored")
    train(small_config(), run)
    assert not (run / "metrics.jsonl").is_symlink()
    assert (run / "metrics.jsonl").read_text() == (tmp_path / "stored").read_text() == content
