"""The run folder: one run, one configuration, one process (or group) at a time.

config.json          the RunConfig
environment.json     versions, seed, git state, threads; one entry per start
metrics.jsonl        losses and evaluations: the same bytes however often the run was killed and resumed
timing.jsonl         steps per second and the share of time spent waiting for data
checkpoints/step-N/  see `checkpoint`
text.json            language modelling: where the text and its token shards were found (not part of the result)
tokenizer.json       language modelling: what made the tokens
"""

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

from headcode.files import (
    is_locked,
    open_own,
    parse_json,
    read_bytes,
    read_object,
    read_text,
    replace_file,
    take_lock,
    to_json,
)
from headcode.run import RunConfig
from headcode.tasks.language.tokenizer import Tokenizer, read_tokenizer
from headcode.train.checkpoint import (
    RUN_CONFIG_FILE,
    find_run,
    first_difference,
    refuse_linked_checkpoints,
    remove_leftovers,
)
from headcode.train.records import is_record, is_start, is_timing

ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
TOKENIZER_FILE = "tokenizer.json"
TIMING_FILE = "timing.jsonl"
LOCK_FILE = ".lock"


class RunInUse(ValueError):
    """Another process holds the run's lock."""


class RunFolder:
    """A run folder that is open for writing, and locked against every other process until `close`."""

    def __init__(self, path: Path, config: RunConfig, lock: IO[str]) -> None:
        self.path, self.config = path, config
        self._lock: IO[str] | None = lock
        self._metrics: IO[str] | None = None

    @classmethod
    def create(cls, path: str | Path, config: RunConfig) -> "RunFolder":
        """A new run in an empty or missing folder, or the same run again; never another one."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; choose a folder for the run.")
        task_files = config.task.run_files()
        try:
            if (path / RUN_CONFIG_FILE).is_file():
                _refuse_other_config(path, config)
            elif path.is_dir():
                _refuse_strangers(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise _cannot_write(path, error) from None
        if not (path / RUN_CONFIG_FILE).is_file():
            replace_file(path / RUN_CONFIG_FILE, config.to_json().encode())
        _refuse_other_config(path, config)
        refuse_linked_checkpoints(path)
        remove_leftovers(path)
        for name, content in task_files.items():
            if not (path / name).is_file() or read_bytes(path / name) != content:
                replace_file(path / name, content)
        return cls(path, config, lock)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run, to continue it."""
        path = Path(path)
        config = read_run_config(path)
        try:
            lock = _take_lock(path)
        except OSError as error:
            raise _cannot_write(path, error) from None
        refuse_linked_checkpoints(path)
        remove_leftovers(path)
        return cls(path, config, lock)

    def record_environment(self, environment: dict[str, Any], step: int) -> None:
        """Add this start to environment.json."""
        starts = read_environments(self.path)
        starts.append({"step": step, **environment})
        replace_file(self.path / ENVIRONMENT_FILE, to_json({"seed": self.config.seed, "starts": starts}))

    def rewind_metrics(self, records: list[dict[str, Any]]) -> None:
        """Bring metrics.jsonl to what it was at the checkpoint, and open it for more."""
        self._close_metrics()
        path = self.path / METRICS_FILE
        content = "".join(_line(record) for record in records).encode()
        if path.is_symlink() or not path.is_file() or read_bytes(path) != content:
            replace_file(path, content)
        self._metrics = open_own(path, "a", encoding="utf-8")

    def add_metrics(self, record: dict[str, Any]) -> None:
        assert self._metrics is not None, "rewind_metrics opens the file"
        self._metrics.write(_line(record))
        self._metrics.flush()

    def sync_metrics(self) -> None:
        assert self._metrics is not None
        os.fsync(self._metrics.fileno())

    def add_timing(self, record: dict[str, Any]) -> None:
        with open_own(self.path / TIMING_FILE, "a", encoding="utf-8") as file:
            file.write(_line(record))

    def close(self) -> None:
        self._close_metrics()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            # Every line was flushed when it was added: what is left after a full disk is cut off on resuming anyway.
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None


def read_run_config(path: str | Path) -> RunConfig:
    """The configuration of a run folder, or one sentence that says why it is none."""
    path = find_run(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a run folder: there is no such folder.")
    if not (path / RUN_CONFIG_FILE).is_file():
        raise ValueError(f"{path} is not a run folder: it has no {RUN_CONFIG_FILE}.")
    values = read_object(path / RUN_CONFIG_FILE)
    if "task" not in values:
        raise ValueError(f"{path} is not a run folder: its {RUN_CONFIG_FILE} is not that of a run.")
    try:
        config = RunConfig.from_dict(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path / RUN_CONFIG_FILE} is not a valid run configuration: {error}") from None
    config.task.read_run_files(path)
    return config


def tokenizer_of(run: Path, config: RunConfig, given: Path | None = None) -> Tokenizer:
    """The tokenizer that a run was trained with, and no other."""
    task: Any = config.task
    path = run / TOKENIZER_FILE if given is None else given
    tokenizer = read_tokenizer(path, task.tokenizer)
    if tokenizer.sha256 != task.tokenizer_hash:
        raise ValueError(
            f"{path} is not the tokenizer that {run} was trained with ({tokenizer.vocab_size} tokens, the model has "
            f"{task.vocab_size}): its numbers would mean other text."
        )
    return tokenizer


def read_environments(path: Path) -> list[dict[str, Any]]:
    """What environment.json says of each start; an unreadable file counts as none."""
    try:
        starts = read_object(path / ENVIRONMENT_FILE).get("starts", [])
    except (ValueError, OSError):
        return []
    return [start for start in starts if is_start(start)] if isinstance(starts, list) else []


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl; a last line that is still being written is left out."""
    file, records = Path(path) / METRICS_FILE, []
    *lines, unfinished = read_bytes(file).split(b"\n")
    for number, line in enumerate([*lines, *([] if unfinished.startswith(b"{") else [unfinished])], start=1):
        if not line:
            continue
        try:
            record = parse_json(line.decode("utf-8"))
        except ValueError:
            raise ValueError(f"{file} line {number} is not valid JSON.") from None
        if not is_record(record):
            raise ValueError(f"{file} line {number} is not a record: those have kind, step, split and finite numbers.")
        records.append(record)
    return records


def read_timings(path: Path) -> list[dict[str, Any]]:
    """The lines of timing.jsonl; those that a kill cut short are left out, and an unreadable file has none."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in read_bytes(path / TIMING_FILE).splitlines():
            with contextlib.suppress(ValueError):
                found.append(parse_json(line.decode("utf-8")))
    return [timing for timing in found if is_timing(timing)]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _is_leftover(name: str) -> bool:
    """What a process that was killed before it had written config.json may have left."""
    return name == LOCK_FILE or name.startswith(f".{RUN_CONFIG_FILE}.")


def _refuse_strangers(path: Path) -> None:
    if strangers := sorted(entry.name for entry in path.iterdir() if not _is_leftover(entry.name)):
        raise ValueError(
            f"{path} is not a run folder (it has no {RUN_CONFIG_FILE}, but {strangers[0]}); "
            f"choose an empty or a new folder with --out."
        )


def _refuse_other_config(path: Path, config: RunConfig) -> None:
    if difference := first_difference(read_run_config(path).to_dict(), config.to_dict()):
        name, there, here = difference
        raise ValueError(
            f"{path} belongs to another run: {name} is {there!r} there and {here!r} here; "
            f"choose another folder with --out."
        )


def _take_lock(path: Path) -> IO[str]:
    """The run's lock, with the number of this process in it, for whoever finds it taken."""
    lock = take_lock(path / LOCK_FILE)
    if lock is None:
        owner = ""
        with contextlib.suppress(OSError, ValueError):  # Windows lets nobody read a locked file
            owner = read_text(path / LOCK_FILE, 32).strip()
        known = f" (process {owner})" if owner.isdigit() else ""
        raise RunInUse(f"{path} is in use by another process{known}; wait for it, or stop it.")
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def is_in_use(path: Path) -> bool:
    """Whether a process holds the run's lock now."""
    return is_locked(path / LOCK_FILE)


def _cannot_write(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be written ({error.strerror or error}); choose another folder with --out.")
