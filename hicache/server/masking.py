"""Keeps the options of a storage backend, which can be secrets, out of what is said about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MASK", "mask_options", "mask_text"]

MASK = "***"

_SHORTEST = 3
"""Characters of a value that is looked for in a text; shorter ones are in every text by chance."""

_HEAD = 6
"""Characters after which the rest of a value may be missing: errors are cut short."""

_CREDENTIALS = re.compile(r"//([^/@\s]+)@|=([^;&,\s]+)")
"""In an address or a connection string: what stands before the host, and what is assigned."""

_NAMES_OF_CODE = frozenset({"backend", "backend_name", "module_path", "class_name"})
"""Options whose values an error has to name."""


def mask_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return `options` with their names and without their values."""
    return {
        name: mask_options(value) if isinstance(value, Mapping) else MASK
        for name, value in options.items()
    }


def mask_text(text: str, options: Mapping[str, object]) -> str:
    """Return `text` without the values of `options` and the credentials in them.

    The names of options stay, and so do names of backends, modules and classes.
    """
    secrets: set[str] = set()
    for value in _values(options):
        # As Python prints it, too.
        secrets |= {value, repr(value)[1:-1]}
        for credentials in _CREDENTIALS.findall(value):
            secrets.update(*(part.split(":") for part in credentials))
    secrets = {secret for secret in secrets if len(secret) >= _SHORTEST}
    kept: list[str] = []
    position = 0
    while position < len(text):
        length = max((_num_equal(text, position, secret) for secret in secrets), default=0)
        kept.append(MASK if length else text[position])
        position += length or 1
    return "".join(kept)


def _num_equal(text: str, position: int, secret: str) -> int:
    """Return how much of `secret` begins at `position`; 0 when that can be chance."""
    if not text.startswith(secret[:_HEAD], position):
        return 0
    length = len(secret)
    while not text.startswith(secret[:length], position):
        length -= 1
    return length


def _values(value: object) -> Iterator[str]:
    """Yield the texts and numbers in a nest of options."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _NAMES_OF_CODE:
                yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)
