"""Frozen keyword-only dataclasses with strict JSON in and out: an unknown key, a wrong type or a NaN is an error."""

import dataclasses
import functools
import json
import math
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headcode.files import parse_json, read_json
from headcode.suggest import no_such

C = TypeVar("C", bound="Config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of every configuration. Subclasses are frozen keyword-only dataclasses; `__post_init__` checks the types."""

    former_names: ClassVar[Mapping[str, str]] = {}
    """Former name -> name, of fields that were renamed; see `renamed`."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _coerce(getattr(self, field.name), hints[field.name], field.name)
            object.__setattr__(self, field.name, value)

    def replace(self: C, **changes: Any) -> C:
        """A copy with some fields changed, checked again."""
        changes = _warn_of_former_names(type(self), changes)
        unknown = sorted(set(changes) - {field.name for field in dataclasses.fields(self)})
        if unknown:
            raise ValueError(_unknown_keys(type(self), unknown))
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python: nested configs become dictionaries."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The inverse of `to_dict`; an unknown or missing key is an error."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{cls.__name__} is made from a mapping of its fields, got {type(values).__name__}.")
        values = cls.with_current_names(values)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in set(values) - set(fields))
        if unknown:
            raise ValueError(_unknown_keys(cls, unknown))
        missing = [
            name
            for name, field in fields.items()
            if name not in values
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{cls.__name__} needs {', '.join(missing)}: add what is missing.")
        return cls(**dict(values))

    @classmethod
    def with_current_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """A file's values, those of nested configurations included, under the names that the fields have today."""
        kinds = typing.get_type_hints(cls)
        if both := [name for former, name in cls.former_names.items() if former in values and name in values]:
            raise ValueError(f"{cls.__name__} has {both[0]} twice, under its former name too: leave that out.")
        found = {cls.former_names.get(name, name): value for name, value in values.items()}
        for name, value in found.items():
            kind = kinds.get(name)
            if isinstance(kind, type) and issubclass(kind, Config) and isinstance(value, Mapping):
                found[name] = kind.with_current_names(value)
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls: type[C], text: str) -> C:
        return cls.from_dict(parse_json(text, cls.__name__))

    @classmethod
    def load(cls: type[C], path: str | Path) -> C:
        return cls.from_dict(read_json(path))


def renamed(**names: str) -> Callable[[type[C]], type[C]]:
    """Decorates a configuration whose fields had other names: renamed(former="name").

    Files with the former names are read as ever. Code that uses one still works and is warned.
    """

    def decorate(cls: type[C]) -> type[C]:
        cls.former_names = names
        initialise = cls.__init__

        @functools.wraps(initialise)
        def __init__(self: C, **values: Any) -> None:
            initialise(self, **_warn_of_former_names(cls, values))

        cls.__init__ = __init__  # type: ignore
        for former in names:
            setattr(cls, former, property(functools.partial(_former_value, former)))
        return cls

    return decorate


def _former_value(former: str, config: Config) -> Any:
    return getattr(config, next(iter(_warn_of_former_names(type(config), {former: None}))))


def _warn_of_former_names(cls: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    for former in cls.former_names.keys() & values.keys():
        words = f"{cls.__name__}.{former} is called {cls.former_names[former]} now."
        warnings.warn(words, DeprecationWarning, stacklevel=4)
    return cls.with_current_names(values)


def _unknown_keys(cls: type, unknown: list[str]) -> str:
    return no_such(f"{cls.__name__} has no field", unknown[0], [f.name for f in dataclasses.fields(cls)], "it has")


def _coerce(value: Any, annotation: Any, name: str) -> Any:
    """`value` as its annotation demands (an int may stand for a float, a list for a tuple), or one clear sentence."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors = []
        for option in (a for a in arguments if a is not type(None)):
            try:
                return _coerce(value, option, name)
            except ValueError as error:
                errors.append(error)
        raise errors[0] if len(errors) == 1 else _wrong(name, annotation, value)
    if origin is typing.Literal:
        if value not in arguments or isinstance(value, bool) != any(isinstance(a, bool) for a in arguments):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, arguments))}, got {value!r:.100}.")
        return value
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            raise _wrong(name, annotation, value)
        item = arguments[0]
        return tuple(_coerce(entry, item, f"{name}[{i}]") for i, entry in enumerate(value))
    if isinstance(annotation, type) and issubclass(annotation, Config):
        if isinstance(value, annotation):
            return value
        if isinstance(value, Mapping):
            return annotation.from_dict(value)
        raise _wrong(name, annotation, value)
    if annotation is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"{name} must be a finite number, got an integer of {len(str(value))} digits.") from None
        if not math.isfinite(number):
            raise ValueError(f"{name} must be a finite number, got {value}.")
        return number
    if annotation is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if annotation in (str, bool, dict) and isinstance(value, annotation):
        return value
    if annotation is Any:
        return value
    raise _wrong(name, annotation, value)


KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", dict: "a mapping"}
"""What a value must be, in words."""


def in_words(annotation: Any) -> str:
    """What a field's values are.

    >>> in_words(tuple[int, ...] | None)
    'several values, each a whole number, or None'
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(option) for option in arguments).replace(" or None", ", or None")
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"several values, each {in_words(arguments[0])}"
    return KINDS.get(annotation, "None" if annotation is type(None) else getattr(annotation, "__name__", "a value"))


def _wrong(name: str, annotation: Any, value: Any) -> ValueError:
    return ValueError(f"{name} must be {in_words(annotation)}, got {value!r:.100}.")
