"""Records of finished runs without their weights: all that an experiment needs which looks at metrics alone.

KEPT/HASH/ has the run's config.json, metrics.jsonl and timing.jsonl. That is little, and nothing of the machine (no
paths, no command line), so a repository can carry it: another machine goes on with an experiment without training these
runs again.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from headcode.experiments.base import Row
from headcode.files import read_bytes, replace_file
from headcode.run import RunConfig, fields_of, get_field
from headcode.sweep import config_hash
from headcode.sweep.status import is_finished, result_row
from headcode.train.checkpoint import RUN_CONFIG_FILE
from headcode.train.folder import METRICS_FILE, TIMING_FILE, read_metrics, read_run_config

FILES = (RUN_CONFIG_FILE, METRICS_FILE, TIMING_FILE)


def keep(rows: Iterable[Row], kept: Path) -> int:
    """Copy the records of the rows' finished runs, and say how many are new; a run with a path in its fields stays."""
    added = 0
    for row in rows:
        run, target = Path(row["folder"]), kept / row["hash"]
        config = read_run_config(run)
        if is_kept(target, config) or not is_finished(run, config) or _has_paths(config):
            continue
        target.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            replace_file(target / name, read_bytes(run / name))
        added += 1
    return added


def kept_rows(pairs: Sequence[tuple[str, RunConfig]], kept: Path) -> dict[str, Row]:
    """By name: the results of those runs whose records are kept, as a sweep would give them."""
    found = {}
    for name, config in pairs:
        identity = config_hash(config)
        if is_kept(kept / identity, config):
            found[name] = {**result_row(name, identity, kept / identity, config), "error": None}
    return found


def is_kept(folder: Path, config: RunConfig) -> bool:
    """Whether a folder has the records of exactly this configuration, whole to its last step and evaluation."""
    try:
        if read_run_config(folder) != config:
            return False
        records = read_metrics(folder)
    except (OSError, ValueError):
        return False
    splits = {record["split"] for record in records if record["kind"] == "eval"}
    last = {record["split"] for record in records if record["kind"] == "eval" and record["step"] == config.steps}
    return bool(records) and records[-1]["step"] == config.steps and bool(last) and last == splits


def _has_paths(config: RunConfig) -> bool:
    values = [get_field(config, field) for field in fields_of(config)]
    return any(isinstance(value, str) and Path(value).is_absolute() for value in values)
