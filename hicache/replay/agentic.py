"""Recorded sessions of coding assistants in one tar archive, merged to a stream of requests."""

from __future__ import annotations

import json
import lzma
import random
import tarfile
from typing import TYPE_CHECKING, Any, Final

from hicache.replay.files import Entry
from hicache.replay.request import BlockNumbers, TraceError, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["read_agentic"]

_START_SECONDS: Final = 24 * 3600.0
"""Sessions start within so many seconds of each other."""

_SEED: Final = 0


def read_agentic(path: Path, *, block_tokens: int) -> list[TraceRequest]:
    """Return the requests of all sessions of an archive by the time they arrive.

    Sessions are taken in the order of their names. Each starts at a time drawn from one generator
    with a fixed seed, and its requests, those of sub-agents among them, at their own `t` after
    that. As many ids as make `block_tokens` tokens are one block; sessions share nothing.

    Holds the whole stream in memory: 4 bytes for each block of each request.

    Raises:
        TraceError: the archive or a session cannot be read, or its ids stand for a number of tokens
            that does not divide `block_tokens`.
    """
    sessions = sorted(_sessions(path), key=lambda session: session[0])
    if not sessions:
        raise TraceError(f"{path.name} holds no session (*.json)")
    rng = random.Random(_SEED)
    numbers = BlockNumbers()
    requests: list[TraceRequest] = []
    for index, (name, raw) in enumerate(sessions):
        start = rng.uniform(0, _START_SECONDS)
        requests += _session_requests(
            _load(raw, f"{path.name}, {name}"), index, start, numbers, block_tokens
        )
        sessions[index] = (name, b"")
    requests.sort(key=lambda request: request.arrival_seconds)
    return requests


def _sessions(path: Path) -> Iterator[tuple[str, bytes]]:
    """Return name and text of each session, in the order of the archive."""
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name.endswith(".json") else None
                if file is not None:
                    yield member.name, file.read()
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
        raise TraceError(f"{path} cannot be read as an archive: {error}") from error


def _load(raw: bytes, place: str) -> Entry:
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"{place}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{place}: not a JSON object")
    return Entry(fields, place)


def _session_requests(
    session: Entry, index: int, start: float, numbers: BlockNumbers, block_tokens: int
) -> Iterator[TraceRequest]:
    id_tokens = session.count("block_size")
    if not id_tokens or block_tokens % id_tokens:
        raise session.error(f"{block_tokens} tokens a block are no multiple of {id_tokens} an id")
    group = block_tokens // id_tokens
    for entry in _flat(session):
        ids = entry.integers("hash_ids")
        if not ids:
            continue
        # The session stands in its first block alone, which every later one has before it.
        head: list[Any] = [(index, tuple(ids[:group]))]
        blocks = head + [tuple(ids[k : k + group]) for k in range(group, len(ids), group)]
        yield TraceRequest(
            arrival_seconds=start + entry.number("t"),
            input_tokens=entry.count("in"),
            output_tokens=entry.count("out", 0),
            blocks=numbers.number(blocks),
        )


def _flat(entry: Entry) -> Iterator[Entry]:
    """Return the requests below an entry in the order of the file, those of sub-agents in place."""
    nested = entry.fields.get("requests")
    if not isinstance(nested, list) or not all(isinstance(one, dict) for one in nested):
        raise entry.error("'requests' must be a list of objects")
    for number, fields in enumerate(nested, start=1):
        inner = Entry(fields, f"{entry.place}, request {number}")
        if "requests" in fields:
            yield from _flat(inner)
        else:
            yield inner
