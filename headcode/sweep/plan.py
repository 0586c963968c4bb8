"""What a sweep has to do: each different configuration once, in a folder that its hash names."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headcode.config import Config
from headcode.files import canonical
from headcode.run import RunConfig

RUNS = "runs"
HASH_LENGTH = 12
LONGEST_NAME = 200

Configs = Mapping[str, RunConfig] | Iterable[tuple[str, RunConfig]]


@dataclasses.dataclass
class Run:
    """One training run of a sweep, with all the names that the sweep gives it."""

    names: list[str]
    hash: str
    config: RunConfig
    folder: Path

    @property
    def name(self) -> str:
        return self.names[0]


def config_hash(config: RunConfig) -> str:
    """The first 12 hex digits of a SHA-256 of the configuration.

    Fields at their default are left out, so a field that a later version adds does not rename the runs that are there.
    (Should a default itself change, the run folder notices: it compares every field.)

    >>> from headcode.presets import override, preset
    >>> config_hash(preset("logic")) == config_hash(override(preset("logic"), seed=0))
    True
    """
    content = {"task_name": config.task.name, **_set_fields(config)}
    return hashlib.sha256(canonical(content)).hexdigest()[:HASH_LENGTH]


def _set_fields(config: Config) -> dict[str, Any]:
    """The fields of a configuration that differ from their default; nested configurations likewise."""
    found: dict[str, Any] = {}
    # A renamed field counts under its first name: the runs that are there keep their hashes.
    first_names = {name: former for former, name in config.former_names.items()}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), first_names.get(field.name, field.name)
        if isinstance(value, Config):
            found[name] = _set_fields(value)
        elif field.default is dataclasses.MISSING or value != field.default:
            found[name] = value
    return found


def plan(configs: Configs, out: Path) -> list[Run]:
    """The different runs of a sweep, in the order given.

    A configuration under two names is one run; one name for two configurations is a mistake.
    """
    by_name: dict[str, str] = {}
    by_hash: dict[str, Run] = {}
    for name, config in pairs_of(configs):
        identity = config_hash(config)
        if by_name.setdefault(name, identity) != identity:
            raise ValueError(f"Two different configurations are called {name!r}; give each run a name of its own.")
        run = by_hash.setdefault(identity, Run([], identity, config, out / RUNS / identity))
        if name not in run.names:
            run.names.append(name)
    if not by_hash:
        raise ValueError("The sweep has no runs: it must give at least one (name, config) pair.")
    return list(by_hash.values())


def pairs_of(configs: Configs) -> Iterable[tuple[str, RunConfig]]:
    """The (name, config) pairs of a sweep, each checked when it is its turn."""
    if not isinstance(configs, Iterable) or isinstance(configs, (str, bytes)):
        raise ValueError(f"A sweep is a mapping or a series of (name, config) pairs, got {type(configs).__name__}.")
    for entry in configs.items() if isinstance(configs, Mapping) else configs:
        if not (isinstance(entry, (tuple, list)) and len(entry) == 2):
            raise ValueError(f"A sweep yields (name, config) pairs, got {type(entry).__name__}.")
        name, config = entry
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
            raise ValueError(f"A run's name is one line of at most {LONGEST_NAME} characters, got {name!r:.80}.")
        if not isinstance(config, RunConfig):
            raise ValueError(f"The configuration of {name!r} must be a RunConfig, got {type(config).__name__}.")
        yield name, config
