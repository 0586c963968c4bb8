"""Checkpoints: folders `step-N` that appear whole or not at all, with a hash for every file, and nothing to unpickle.

step-300/config.json             the model's configuration: the folder is a model folder as well
         model.safetensors       weights
         optimizer.safetensors   the optimiser's moments
         ema.safetensors         averaged weights, if the run keeps them
         state.json              step, the run's configuration, random state, metrics so far, hashes of the others and
                                 of itself
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headcode.files import canonical, is_plain_name, read_object, sha256_of, sync_folder, to_json, write_bytes
from headcode.memory import aligned
from headcode.nn import ModelConfig, Transformer, load_model
from headcode.nn.storage import CONFIG_FILE, WEIGHTS_FILE, check_weights
from headcode.run import RunConfig
from headcode.suggest import no_such
from headcode.train.records import is_state
from headcode.train.runtime import RunWarning

OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "ema.safetensors"
STATE_FILE = "state.json"
RUN_CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
KEEP_LAST = 2
ZOO = Path(__file__).parents[1] / "zoo" / "models"
"""The models that come with the package; `headcode.zoo` tells about them."""


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what was written."""

    def __init__(self, folder: Path, complaint: str) -> None:
        self.folder = folder
        super().__init__(complaint)


class Checkpoint(NamedTuple):
    """A checkpoint whose hashes were found right."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        return read_tensors(self.folder / name)


def write_checkpoint(
    checkpoints: Path, model: ModelConfig, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> Path:
    """Write `step-N` for the step in `state`: under a hidden name, synced, then renamed. `tensors` is by file name."""
    from safetensors.torch import save

    target = checkpoints / f"step-{state['step']}"
    temporary = checkpoints / f".{target.name}.{os.getpid()}"
    checkpoints.mkdir(exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        contents = {CONFIG_FILE: model.to_json().encode()}
        contents |= {name: save(dict(values)) for name, values in tensors.items()}
        for name, content in contents.items():
            write_bytes(temporary / name, content)
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        write_bytes(temporary / STATE_FILE, to_json(_sealed({**state, "files": hashes})))
        sync_folder(temporary)
        with contextlib.suppress(FileNotFoundError):
            # Only a run that went back behind this step finds the folder taken.
            target.rename(checkpoints / f".{target.name}.replaced")
        temporary.rename(target)
        sync_folder(checkpoints)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(checkpoints / f".{target.name}.replaced", ignore_errors=True)
    return target


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint with every hash verified, or DamagedCheckpoint with the file's name."""
    if not (folder / STATE_FILE).is_file():
        raise DamagedCheckpoint(folder, f"{folder} has no {STATE_FILE}.")
    state = read_object(folder / STATE_FILE, functools.partial(DamagedCheckpoint, folder))
    if not is_state(state) or _sealed(state) != state:
        raise DamagedCheckpoint(folder, f"{folder / STATE_FILE} does not have the content that was written.")
    for name, expected in state["files"].items():
        if not is_plain_name(name):
            raise DamagedCheckpoint(folder, f"{folder / STATE_FILE} names a file of another folder.")
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(folder, f"{folder} has no {name}.")
        if sha256_of(path) != expected:
            raise DamagedCheckpoint(folder, f"{path} does not have the content that was written.")
    return Checkpoint(folder, state)


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {name: aligned(tensor) for name, tensor in load_file(path).items()}
    except SafetensorError as error:
        raise DamagedCheckpoint(path.parent, f"{path} is not a safetensors file: {error}.") from None


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    found = {}
    for folder in (run / CHECKPOINTS).glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", folder.name):
            found[int(match[1])] = folder
    return [found[step] for step in sorted(found, reverse=True)]


def newest_checkpoint(run: Path) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
    """The newest whole checkpoint of a run, if it has any, and what is wrong with the newer ones."""
    damaged: list[DamagedCheckpoint] = []
    for folder in list_checkpoints(run):
        try:
            return read_checkpoint(folder), damaged
        except DamagedCheckpoint as error:
            damaged.append(error)
    if damaged:
        raise ValueError(
            f"Every checkpoint of {run} is damaged ({damaged[0]} …); to start again from step 0, "
            f"remove {run / CHECKPOINTS}."
        )
    return None, []


def choose_checkpoint(run: Path, which: str) -> Checkpoint:
    """The checkpoint `last`, `best` or `step-N` of a run."""
    newest, damaged = newest_checkpoint(run)
    for complaint in damaged:
        warnings.warn(RunWarning(f"A damaged checkpoint was passed over: {complaint}"), stacklevel=3)
    if newest is None:
        raise ValueError(f"{run} has no checkpoint yet; train it first with headcode resume {run}.")
    if (run / RUN_CONFIG_FILE).is_file():
        # As it stands in the file: a model can be loaded though its run is of a task that only its author knows.
        refuse_changed_config(newest, run, read_object(run / RUN_CONFIG_FILE))
    if which == "last":
        return newest
    if which == "best":
        best = newest.state.get("best")
        if best is None:
            raise ValueError(f"{run} was never evaluated, so it has no best checkpoint; use last.")
        which = f"step-{best['step']}"
    if which == newest.folder.name:  # its hashes are verified already
        return newest
    names = [folder.name for folder in list_checkpoints(run)]
    if which not in names:
        raise ValueError(f"{run} has no checkpoint {which!r}; it has: {', '.join(names)} (and the words last, best).")
    return read_checkpoint(run / CHECKPOINTS / which)


def refuse_changed_config(checkpoint: Checkpoint, run: Path, config: Mapping[str, Any]) -> None:
    """Compare a run's configuration with the one that its checkpoint was sealed with; older checkpoints have none."""
    if difference := first_difference(RunConfig.with_current_names(checkpoint.state.get("config", {})), config):
        name, before, now = difference
        raise ValueError(
            f"{run / RUN_CONFIG_FILE} was changed after {checkpoint.folder.name} was saved: {name} was {before!r} and "
            f"is {now!r} now; put {before!r} back, or start another run with --out."
        )


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first field in which two configurations differ, by its full name, and its two values.

    A field that only one of them has is no difference: versions add fields, and the other has their defaults.
    """
    first, second = _flatten(one), _flatten(other)
    names = (name for name in second if name in first and first[name] != second[name])
    return next(((name, first[name], second[name]) for name in names), None)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": _plain(value)}
    return flat


def _plain(value: Any) -> Any:
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def set_aside(damaged: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer counts as one, without deleting it."""
    aside = damaged.with_name(f".damaged-{damaged.name}")
    shutil.rmtree(aside, ignore_errors=True)
    damaged.rename(aside)


def prune(run: Path, best_step: int | None) -> None:
    """Delete all checkpoints but the last two and the best."""
    for folder in list_checkpoints(run)[KEEP_LAST:]:
        if folder.name != f"step-{best_step}":
            # Hidden first, so that a kill in between leaves no half folder under a valid name.
            doomed = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def refuse_linked_checkpoints(run: Path) -> None:
    """Refuse a run whose checkpoints are a link: old ones are deleted, and a link may lead to anyone's folder."""
    if (run / CHECKPOINTS).is_symlink():
        raise ValueError(
            f"{run / CHECKPOINTS} is a symbolic link, through which nothing is written or deleted; put the folder "
            f"itself in its place, or keep the whole run elsewhere and link {run}."
        )


def remove_leftovers(run: Path) -> None:
    """Delete what a killed process left half written; only for the holder of the run's lock."""
    for path in (run / CHECKPOINTS).glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in run.glob(".*.json*.*"):
        path.unlink(missing_ok=True)


def find_run(path: str | Path) -> Path:
    """The folder that a user means: `zoo/NAME` is the zoo's, unless there is a run of that path."""
    path = Path(path)
    if len(path.parts) != 2 or path.parts[0] != "zoo" or (path / RUN_CONFIG_FILE).is_file():
        return path
    known = sorted(folder.name for folder in ZOO.glob("[!.]*") if folder.is_dir())
    if path.parts[1] not in known:
        raise ValueError(no_such("The zoo has no model", path.parts[1], known, "it has"))
    return ZOO / path.parts[1]


def load(path: str | Path) -> Transformer:
    """The model of a run folder (its newest checkpoint), a checkpoint, a model folder or of the zoo (`zoo/NAME`).

    It is in evaluation mode.

    A run that keeps averaged weights gives those, as its evaluations do.
    """
    folder = find_run(path)
    if (folder / CHECKPOINTS).is_dir() or _is_run_folder(folder):
        return load_from(choose_checkpoint(folder, "last"))
    if (folder / STATE_FILE).is_file():
        return load_from(read_checkpoint(folder))
    if not folder.is_dir():
        words = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {words}; give a run folder, a checkpoint, a model folder or a model of the zoo.")
    return load_model(folder)


def load_from(checkpoint: Checkpoint) -> Transformer:
    """The model of a checkpoint whose hashes were verified."""
    read_object(checkpoint.folder / CONFIG_FILE, functools.partial(DamagedCheckpoint, checkpoint.folder))
    model = load_model(checkpoint.folder)
    if AVERAGE_FILE in checkpoint.state["files"]:
        average = checkpoint.tensors(AVERAGE_FILE)
        check_weights(model, average, checkpoint.folder / AVERAGE_FILE)
        model.load_state_dict(average)
    return model.eval()


def _is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run that has not written a checkpoint yet."""
    if not (folder / RUN_CONFIG_FILE).is_file() or (folder / WEIGHTS_FILE).is_file():
        return False
    return "task" in read_object(folder / RUN_CONFIG_FILE)


def _sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with a hash over all its other entries."""
    content = {key: value for key, value in state.items() if key != "sha256"}
    return {**content, "sha256": hashlib.sha256(canonical(content)).hexdigest()}
