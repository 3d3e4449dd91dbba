"""Free-form options as read-only plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["FrozenMapping", "PlainMapping", "freeze_mapping", "thaw"]

PlainMapping: TypeAlias = Mapping[str, object]
"""Texts, finite numbers, booleans, None, lists and mappings under keys that are texts."""


class FrozenMapping(PlainMapping):
    """A mapping that nobody can change; unlike `types.MappingProxyType` it can be pickled.

    Made by `freeze_mapping`, which also freezes what is nested in it.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, object] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


def freeze_mapping(mapping: Mapping[object, object], name: str) -> FrozenMapping:
    """Return a copy of `mapping` that is read-only all the way down: lists become tuples.

    Args:
        mapping: should be a `PlainMapping`.
        name: what to call it in an error.

    Raises:
        ConfigError: it is not; the message names the place.
    """
    items: dict[str, object] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ConfigError(f"{name} has the key {key!r}; keys must be texts, write '{key}'")
        items[key] = _freeze(value, f"{name}.{key}")
    return FrozenMapping(items)


def _freeze(value: object, name: str) -> object:
    if isinstance(value, Mapping):
        return freeze_mapping(value, name)
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, f"{name}[{index}]") for index, item in enumerate(value))
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ConfigError(
        f"{name} is {value!r}, a {type(value).__name__}; it must be a text, a finite number, "
        "true, false, none, a list or a mapping, so convert it, for example with str()"
    )


def thaw(value: object) -> object:
    """Return frozen data as fresh dicts and lists, ready for JSON."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    return value
