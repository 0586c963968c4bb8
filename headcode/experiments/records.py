"""Records of finished runs, without their weights: enough for an experiment that looks at metrics alone.

RECORDS/EXPERIMENT.jsonl is a table with a line for each run, which begins with the hash of the run's configuration and
has what its config.json, metrics.jsonl and timing.jsonl say, and the commit of its code. Tables are small and tell
nothing of the machine (no paths, no command line), so a repository can hold them: with them another machine continues
an experiment without training these runs again. `python -m headcode.experiments.records TABLE RUN [RUN ...]` adds
finished runs to a table.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headcode.experiments.base import Row
from headcode.files import locked, parse_json, read_bytes, read_json, replace_file, to_json
from headcode.run import RunConfig, fields_of, get_field
from headcode.sweep import config_hash
from headcode.sweep.status import is_finished, result_row
from headcode.train.checkpoint import RUN_CONFIG_FILE
from headcode.train.folder import (
    METRICS_FILE,
    TIMING_FILE,
    read_environments,
    read_metrics,
    read_run_config,
    read_timings,
)


def add_records(runs: Iterable[Path], table: Path) -> int:
    """Add the records of finished runs, and return how many are new; runs with a path in a field are left out."""
    new, configs = {}, {run: read_run_config(run) for run in runs}
    known = find_records(table.parent, map(config_hash, configs.values()))
    with tempfile.TemporaryDirectory() as folder:
        for run, config in configs.items():
            identity = config_hash(config)
            recorded = identity in known and unpack(known[identity], Path(folder, identity), config)
            if not recorded and is_finished(run, config) and not _has_paths(config):
                new[identity] = _pack(run, identity)
    if not new:
        return 0
    table.parent.mkdir(parents=True, exist_ok=True)
    with locked(table.parent / ".lock"):
        lines = read_bytes(table).splitlines() if table.exists() else []
        kept = [line for line in lines if not line.startswith(tuple(map(_start, new)))]
        replace_file(table, b"".join(line + b"\n" for line in sorted([*kept, *new.values()])))
    return len(new)


def recorded_rows(pairs: Sequence[tuple[str, RunConfig]], records: Path, folder: Path) -> dict[str, Row]:
    """By name: the results of those runs that have records, as a sweep would give them.

    Records are unpacked to FOLDER/HASH; those in RECORDS/HASH, as version 0.1 kept them, count as well.
    """
    hashes = {name: config_hash(config) for name, config in pairs}
    lines, found = find_records(records, hashes.values()), {}
    for name, config in pairs:
        identity = hashes[name]
        unpacked = identity in lines and unpack(lines[identity], folder / identity, config)
        source = folder / identity if unpacked else records / identity
        if unpacked or has_records(source, config):
            commit = parse_json(lines[identity].decode()).get("commit") if unpacked else None
            found[name] = {**result_row(name, identity, source, config), "error": None, "commit": commit}
    return found


def recorded_names(pairs: Sequence[tuple[str, RunConfig]], records: Path) -> set[str]:
    """The names of those runs that have a line in a table of the folder; nothing is unpacked."""
    hashes = {name: config_hash(config) for name, config in pairs}
    lines = find_records(records, hashes.values())
    return {name for name, identity in hashes.items() if identity in lines}


def find_records(records: Path, hashes: Iterable[str]) -> dict[str, bytes]:
    """The lines of these runs in all tables of a folder."""
    starts = {_start(identity): identity for identity in hashes}
    lines = (line for table in sorted(records.glob("*.jsonl")) for line in read_bytes(table).splitlines())
    return {starts[start]: line for line in lines if (start := line[: line.find(b",")]) in starts}


def unpack(line: bytes, folder: Path, config: RunConfig) -> bool:
    """Write a line as a run folder's files, if it has the records of exactly this run up to its last step."""
    try:
        entry = parse_json(line.decode("utf-8"))
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RUN_CONFIG_FILE, to_json(entry["config"]))
        for name, packed in ((METRICS_FILE, entry["metrics"]), (TIMING_FILE, entry["timing"])):
            rows = [dict(zip(packed["keys"][kind], row, strict=True)) for kind, *row in packed["rows"]]
            replace_file(folder / name, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return has_records(folder, config)
    except (ValueError, KeyError, TypeError, IndexError):
        return False


def has_records(folder: Path, config: RunConfig) -> bool:
    """Whether a folder has the records of exactly this configuration, up to its last step and evaluation."""
    try:
        if read_run_config(folder) != config:
            return False
        records = read_metrics(folder)
    except (OSError, ValueError):
        return False
    splits = {record["split"] for record in records if record["kind"] == "eval"}
    last = {record["split"] for record in records if record["kind"] == "eval" and record["step"] == config.steps}
    return bool(records) and records[-1]["step"] == config.steps and bool(last) and last == splits


def _start(identity: str) -> bytes:
    return f'{{"hash": "{identity}"'.encode()


def _pack(run: Path, identity: str) -> bytes:
    entry = {"hash": identity, "config": read_json(run / RUN_CONFIG_FILE)}
    if (commit := commit_of(run)) is not None:
        entry["commit"] = commit
    entry |= {"metrics": _columns(read_metrics(run)), "timing": _columns(read_timings(run))}
    return json.dumps(entry, allow_nan=False).encode()


def commit_of(run: Path) -> str | None:
    """The first digits of the commit that a run's folder was begun with, if it was begun in a clone."""
    starts = read_environments(run)
    commit = (starts[0].get("git") or {}).get("commit") if starts else None
    return commit[:12] if isinstance(commit, str) else None


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Records with each list of keys written once; a row begins with the number of its keys' list."""
    kinds = {keys: kind for kind, keys in enumerate(dict.fromkeys(tuple(record) for record in records))}
    return {"keys": list(kinds), "rows": [[kinds[tuple(record)], *record.values()] for record in records]}


def _has_paths(config: RunConfig) -> bool:
    values = [get_field(config, field) for field in fields_of(config)]
    return any(isinstance(value, str) and Path(value).is_absolute() for value in values)


def main(arguments: list[str]) -> None:
    """Add runs to a table, or one sentence and exit code 2."""
    try:
        if len(arguments) < 2:
            raise ValueError("python -m headcode.experiments.records takes TABLE RUN [RUN ...].")
        table, *runs = map(Path, arguments)
        print(f"{add_records(runs, table)} of {len(runs)} runs were added to {table}.")
    except (ValueError, OSError) as error:
        print(f"headcode: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
