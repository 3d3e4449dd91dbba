"""Lines of a trace file, plain or compressed, as JSON objects."""

from __future__ import annotations

import gzip
import json
import lzma
from typing import IO, TYPE_CHECKING, Any

from hicache.replay.request import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Entry", "read_entries"]


class Entry:
    """A JSON object of a trace and where it stands, so that every complaint can say so."""

    def __init__(self, fields: dict[str, Any], place: str) -> None:
        self.fields = fields
        self.place = place

    def error(self, complaint: str) -> TraceError:
        """Return a complaint about this entry, to be raised."""
        return TraceError(f"{self.place}: {complaint}")

    def count(self, name: str, default: int | None = None) -> int:
        """Return a field that is a number of something; without a default it has to be there."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(f"{name!r} must be an integer that is not negative, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a field that is a number; without a default it has to be there."""
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{name!r} must be a number, not {value!r}")
        return float(value)

    def integers(self, name: str) -> list[int]:
        """Return a field that is a list of integers."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise self.error(f"{name!r} must be a list of integers")
        return value


def read_entries(path: Path) -> Iterator[Entry]:
    """Return the objects of a file of JSON lines, read as they are asked for; `.xz`, `.gz` too.

    Raises:
        TraceError: the file cannot be read, or a line is no JSON object.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Entry(_object(line, path, number), f"{path.name}, line {number}")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        after = f" after line {number}" if number else ""
        raise TraceError(f"{path} cannot be read{after}: {error}") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path.name}, line {number}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{path.name}, line {number}: not a JSON object but {fields!r:.40}")
    return fields
