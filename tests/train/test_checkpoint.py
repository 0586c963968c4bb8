"""Checkpoints: whole or absent, verified, pruned, and never unpickled."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import headcode
from headcode.nn import save_model
from headcode.train import checkpoint as checkpoints
from headcode.train import read_metrics, read_run_config
from headcode.train.checkpoint import DamagedCheckpoint, read_checkpoint
from tests.support.files import flip, truncate
from tests.support.training import assert_same, small_config, train, write_sealed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = tmp_path_factory.mktemp("finished") / "run"
    train(small_config(ema_decay=0.9), run)
    return run


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_what_a_checkpoint_holds(run):
    folder = run / "checkpoints" / "step-30"
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["config.json", "ema.safetensors", "model.safetensors", "optimizer.safetensors", "state.json"]
    state = json.loads((folder / "state.json").read_text())
    assert state["step"] == 30 and state["metrics"] == read_metrics(run)
    for name in found[:-1]:
        assert state["files"][name] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert {"cpu"} == set(state["random"])


def test_the_last_two_and_the_best_are_kept(run):
    best = read_checkpoint(run / "checkpoints" / "step-30").state["best"]
    losses = {r["step"]: r["loss"] for r in read_metrics(run) if r["kind"] == "eval" and r["split"] == "iid"}
    assert best == {"step": min(losses, key=losses.get), "split": "iid", "loss": min(losses.values())}
    assert names(run) == sorted({"step-24", "step-30", f"step-{best['step']}"})


def test_a_kill_between_the_last_checkpoint_and_pruning(tmp_path, finished, monkeypatch):
    """Nothing is written after the last checkpoint, so it is the next start that prunes."""

    def killed_at_the_end(run, best_step):
        if (run / "checkpoints" / "step-30").is_dir():
            raise SystemExit("killed")
        checkpoints.prune(run, best_step)

    run, config = tmp_path / "run", small_config(ema_decay=0.9)
    monkeypatch.setattr("headcode.train.loop.prune", killed_at_the_end)
    with pytest.raises(SystemExit, match="killed"):
        train(config, run)
    monkeypatch.undo()
    assert len(names(run)) == len(names(finished)) + 1
    train(config, run)
    assert names(run) == names(finished)
    assert_same(finished, run)


def test_an_old_best_survives_the_last_two(tmp_path):
    """With a rate that ruins the weights after the first evaluation, the best one stays while others come and go."""
    config = small_config(learning_rate=3.0, warmup_steps=0, steps=40, eval_every=1)
    train(config, tmp_path / "run")
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "step-40").state["best"]["step"]
    assert best < 36
    assert set(names(tmp_path / "run")) == {f"step-{best}", "step-36", "step-40"}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "config.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "empty"])
def test_a_damaged_checkpoint_is_named_and_the_previous_used(run, finished, file, how):
    path = run / "checkpoints" / "step-30" / file
    spoil = {
        "truncated": truncate,
        "flipped": flip,
        "missing": Path.unlink,
        "empty": lambda path: path.write_bytes(b""),
    }
    spoil[how](path)
    with pytest.raises(DamagedCheckpoint, match=file.replace(".", r"\.")):
        read_checkpoint(path.parent)
    with pytest.warns(UserWarning, match=file.replace(".", r"\.")):
        model = headcode.load(run)
    assert set(names(run)) == set(names(finished))  # loading changes nothing
    expected = headcode.load(run / "checkpoints" / "step-24")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    with pytest.warns(UserWarning, match=rf"set aside: .*{file}"):
        train(small_config(ema_decay=0.9), run)
    assert ".damaged-step-30" in names(run)
    assert_same(finished, run)


def test_every_single_bit_of_the_state_matters(run):
    path = run / "checkpoints" / "step-30" / "state.json"
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for position in torch.randint(len(content), (50,), generator=generator).tolist():
        changed = bytearray(content)
        changed[position] ^= 1 << (position % 7)
        path.write_bytes(changed)
        try:
            state = read_checkpoint(path.parent).state
        except DamagedCheckpoint:
            continue
        assert state == json.loads(content)  # white space only


def test_all_damaged_is_an_error_and_not_a_fresh_start(run):
    for folder in (run / "checkpoints").iterdir():
        (folder / "model.safetensors").write_bytes(b"x")
    before = names(run)
    with pytest.raises(ValueError, match="Every checkpoint of .* is damaged"):
        train(small_config(ema_decay=0.9), run)
    assert names(run) == before


def test_loading_a_run_a_checkpoint_and_a_model_folder(run, tmp_path):
    newest = headcode.load(run)
    assert not newest.training
    again = headcode.load(str(run / "checkpoints" / "step-30"))
    assert all(torch.equal(a, b) for a, b in zip(newest.parameters(), again.parameters(), strict=True))
    save_model(newest, tmp_path / "model")
    third = headcode.load(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(newest.parameters(), third.parameters(), strict=True))
    with pytest.raises(ValueError, match="does not exist"):
        headcode.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is not a folder"):
        headcode.load(run / "config.json")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        headcode.load(run)


class Bomb:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


FILES = [
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "timing.jsonl",
    ".lock",
    "checkpoints/step-30/config.json",
    "checkpoints/step-30/model.safetensors",
    "checkpoints/step-30/optimizer.safetensors",
    "checkpoints/step-30/ema.safetensors",
    "checkpoints/step-30/state.json",
]


def test_the_list_of_files_is_complete(finished):
    found = {str(p.relative_to(finished)) for p in finished.rglob("*") if p.is_file()}
    assert {name for name in found if "step-" not in name or "step-30" in name} == set(FILES)


OPERATIONS = {
    "load run": lambda run: headcode.load(run),
    "load checkpoint": lambda run: headcode.load(run / "checkpoints" / "step-30"),
    "read config": read_run_config,
    "read metrics": read_metrics,
    "resume": lambda run: train(small_config(ema_decay=0.9), run),
}
# What must refuse a file that is not what it should be. A damaged checkpoint is passed over by those who want the run.
REFUSED = {
    "config.json": {"load run", "read config", "resume"},
    "metrics.jsonl": {"read metrics"},  # a resumed run writes it anew, from the checkpoint
    "environment.json": set(),  # a record of earlier starts, unreadable: made anew
    "timing.jsonl": set(),  # only ever written
    ".lock": set(),
    **{name: {"load checkpoint"} for name in FILES if name.startswith("checkpoints")},
}
# The same with all hashes made to fit.
REFUSED_RESEALED = {
    "checkpoints/step-30/config.json": {"load run", "load checkpoint"},
    "checkpoints/step-30/model.safetensors": {"load run", "load checkpoint", "resume"},
    "checkpoints/step-30/ema.safetensors": {"load run", "load checkpoint", "resume"},
    "checkpoints/step-30/optimizer.safetensors": {"resume"},
}


@pytest.mark.parametrize(
    ("file", "resealed", "refused"),
    [(file, False, refused) for file, refused in REFUSED.items()]
    + [(file, True, refused) for file, refused in REFUSED_RESEALED.items()],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_planted_pickle_is_refused_and_never_run(run, tmp_path, file, resealed, refused):
    mark = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(str(mark)))
    (run / file).write_bytes(bomb)
    if resealed:
        path = run / "checkpoints" / "step-30" / "state.json"
        state = json.loads(path.read_text())
        state["files"][(run / file).name] = hashlib.sha256(bomb).hexdigest()
        write_sealed(path, state)
    found = set()
    for name, operation in OPERATIONS.items():
        try:
            operation(run)
        except ValueError:
            found.add(name)
    assert not mark.exists()
    assert found == refused
    pickle.loads(bomb).close()
    assert mark.exists()  # the bomb was a real one


def test_nothing_in_the_package_can_unpickle():
    root = Path(headcode.__file__).parent
    for path in root.rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        if path == root / "jit.py":
            # A compiled kernel is code whatever holds it; tests/test_jit_cache.py shows whose files are believed.
            assert code.count("pickle.load") == code.count("pickle.loads(_read_sealed(path))") == 1
            continue
        for word in (
            "import pickle",
            "torch.load(",
            "allow_pickle=True",
            "object_list(",
            "import shelve",
            "joblib.load",
        ):
            assert word not in code, f"{path}: {word}"


def test_a_write_that_fails_leaves_the_old_ones(run, monkeypatch):
    before = {name: read_checkpoint(run / "checkpoints" / name).state for name in names(run)}
    written = []

    def failing(path, content):
        written.append(path.name)
        if path.name == "state.json":
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(checkpoints, "write_bytes", failing)
    model = headcode.load(run)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.write_checkpoint(run / "checkpoints", model.config, {"model.safetensors": {}}, {"step": 31})
    assert written == ["config.json", "model.safetensors", "state.json"]
    assert {name: read_checkpoint(run / "checkpoints" / name).state for name in names(run)} == before


def test_resuming_hashes_each_file_of_the_newest_checkpoint_once(run, monkeypatch):
    hashed, sha256_of = [], checkpoints.sha256_of
    monkeypatch.setattr(checkpoints, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    train(small_config(ema_decay=0.9), run)
    assert sorted(hashed) == ["config.json", "ema.safetensors", "model.safetensors", "optimizer.safetensors"]
