"""Traces in the format of Mooncake: a line per request, with an id per block of its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.replay.files import read_entries
from hicache.replay.request import BlockNumbers, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MOONCAKE_BLOCK_TOKENS", "read_mooncake"]

MOONCAKE_BLOCK_TOKENS: Final = 512


def read_mooncake(path: Path, *, block_tokens: int) -> Iterator[TraceRequest]:
    """Return the requests of a file in the order of their lines.

    A line holds `timestamp` (ms), `input_length`, `hash_ids` and, if known, `output_length`. There
    is one id for each `block_tokens` of the input, begun ones too.

    Raises:
        TraceError: a line is not so, or its time is before that of the line before it.
    """
    numbers = BlockNumbers()
    newest = 0.0
    for entry in read_entries(path):
        arrival = entry.number("timestamp") / 1000
        if arrival < newest:
            raise entry.error("its timestamp is before that of the line before; sort the file")
        newest = arrival
        input_tokens = entry.count("input_length")
        ids = entry.integers("hash_ids")
        num_blocks = -(-input_tokens // block_tokens)
        if len(ids) != num_blocks:
            raise entry.error(
                f"{len(ids)} hash_ids for {input_tokens} input tokens, which are {num_blocks} "
                f"blocks of {block_tokens}; say how many tokens an id stands for (--block-tokens)"
            )
        yield TraceRequest(
            arrival_seconds=arrival,
            input_tokens=input_tokens,
            output_tokens=entry.count("output_length", 0),
            blocks=numbers.number(ids),
        )
