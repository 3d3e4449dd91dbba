"""Which store a person means."""

from __future__ import annotations

from hicache.errors import ConfigError

__all__ = ["store_directory"]


def store_directory(location: str) -> str:
    """Return the directory of a page store from `DIRECTORY` or `file:DIRECTORY`.

    Raises:
        ConfigError: it names no directory, or a kind of store that cannot be looked into.
    """
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        scheme, rest = "file", location
    if scheme != "file" or not rest:
        raise ConfigError(f"location {location!r} is not a page store; give DIRECTORY or file:DIR")
    return rest.removeprefix("//")
