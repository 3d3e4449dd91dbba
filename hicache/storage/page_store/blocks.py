"""Space as the page store counts it: blocks of 4 KiB in numbered segment files."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "BLOCK_BYTES",
    "BlockKind",
    "Extent",
    "blocks_for",
    "count_blocks",
    "cut",
    "join",
    "merge",
]

BLOCK_BYTES = 4096
"""What payloads are aligned to: the block of common file systems, as direct I/O wants it."""


class BlockKind(str, Enum):
    """What a segment file holds; also the suffix of its name."""

    PAYLOAD = "pages"
    HEADER = "headers"


class Extent(NamedTuple):
    """Neighbouring blocks of one segment.

    Attributes:
        segment: number of the segment file.
        block: the first one.
        num_blocks: how many, at least 1.
    """

    segment: int
    block: int
    num_blocks: int

    @property
    def end(self) -> int:
        """The first block behind it."""
        return self.block + self.num_blocks


def blocks_for(num_bytes: int) -> int:
    """Return how many blocks hold `num_bytes`."""
    return -(-num_bytes // BLOCK_BYTES)


def count_blocks(extents: Iterable[Extent]) -> int:
    """Return the blocks of all extents together."""
    return sum(extent.num_blocks for extent in extents)


def cut(extents: Sequence[Extent], first: int, num_blocks: int) -> list[Extent]:
    """Return blocks `first` to `first + num_blocks` of the extents put one after the other."""
    parts: list[Extent] = []
    for segment, block, length in extents:
        if num_blocks == 0:
            break
        if first < length:
            taken = min(length - first, num_blocks)
            parts.append(Extent(segment, block + first, taken))
            num_blocks -= taken
            first = 0
        else:
            first -= length
    return parts


def join(extents: Iterable[Extent]) -> list[Extent]:
    """Return the same blocks in the same order, extents joined where one goes on behind another."""
    joined: list[Extent] = []
    for extent in extents:
        if joined and joined[-1].segment == extent.segment and joined[-1].end == extent.block:
            last = joined.pop()
            extent = Extent(last.segment, last.block, last.num_blocks + extent.num_blocks)
        joined.append(extent)
    return joined


def merge(extents: Iterable[Extent]) -> list[Extent]:
    """Return the same blocks in order of their place, neighbours joined."""
    return join(sorted(extents))
