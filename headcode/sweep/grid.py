"""Named configurations: every combination of some fields' values, or values taken together.

    grid(preset("logic-small"), method=["softmax", "hyla"], seed=range(3))      six runs
    zipped(preset("sraven"), dim=[128, 256], num_heads=[16, 32])                two runs

Both give (name, config) pairs; a name says what was set: `method=hyla,seed=2`.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from headcode.run import RunConfig, known_fields, override

NamedConfig = tuple[str, RunConfig]


def grid(base: RunConfig, **values: Iterable[Any]) -> Iterator[NamedConfig]:
    """One run for every combination of the fields' values, the last field varying fastest.

    >>> from headcode.presets import preset
    >>> [name for name, config in grid(preset("logic"), method=["linear", "hyla"], seed=[0, 1])]
    ['method=linear,seed=0', 'method=linear,seed=1', 'method=hyla,seed=0', 'method=hyla,seed=1']
    """
    columns = _columns(base, values)
    return (_named(base, dict(zip(columns, row, strict=True))) for row in itertools.product(*columns.values()))


def zipped(base: RunConfig, **values: Iterable[Any]) -> Iterator[NamedConfig]:
    """One run for the first values of all fields, one for the second ones, and so on.

    >>> from headcode.presets import preset
    >>> [name for name, config in zipped(preset("logic"), num_heads=[2, 4], qk_dim=[8, 16])]
    ['num_heads=2,qk_dim=8', 'num_heads=4,qk_dim=16']
    """
    columns = _columns(base, values)
    lengths = {field: len(column) for field, column in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{field} has {length}" for field, length in lengths.items())
        raise ValueError(f"Values that are taken together must be equally many: {counts}.")
    return (_named(base, dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))


def _columns(base: RunConfig, values: dict[str, Iterable[Any]]) -> dict[str, list[Any]]:
    """The values as lists, checked before the first configuration is made."""
    if not values:
        raise ValueError("A sweep needs at least one field with values, for example seed=[0, 1, 2].")
    columns: dict[str, list[Any]] = {}
    for field, column in known_fields(base, values).items():
        if isinstance(column, (str, bytes)) or not isinstance(column, Iterable):
            raise ValueError(f"{field} needs a list of values, for example {field}=[{column!r}]; got {column!r}.")
        columns[field] = list(column)
        if not columns[field]:
            raise ValueError(f"{field} has no values: give at least one.")
    return columns


def _named(base: RunConfig, changes: dict[str, Any]) -> NamedConfig:
    name = ",".join(f"{field}={_word(value)}" for field, value in changes.items())
    return name, override(base, **changes)


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    # 3 and 3.0 are one value of a float field, and need one name.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, separators=(",", ":"), default=str)
