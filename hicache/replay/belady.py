"""The most hits that any cache of a size can have: Belady's rule with bypass, offline."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.replay.request import TraceRequest

__all__ = ["belady_hits"]

Segments = list[tuple[int, int]]
"""Of one request: (next request that uses the blocks, how many blocks), as far as there is one."""


def belady_hits(requests: Sequence[TraceRequest], capacities: Sequence[int]) -> list[list[int]]:
    """Return the leading blocks of each request that are hits, for each capacity in blocks.

    A request puts all its blocks in; then those go whose next use is farthest away, leaves first.
    A block that is not used again goes before all others and is not counted at all.

    Blocks of a request have their next use in ever later requests the deeper they lie. So blocks
    that wait for the same request lie on its path one below another, what is kept of them is a
    prefix, and a number for each waiting request says everything.
    """
    segments = _segments(requests)
    return [_hits(segments, capacity) for capacity in capacities]


def _segments(requests: Sequence[TraceRequest]) -> list[Segments]:
    num_blocks = 1 + max((int(one.blocks.max()) for one in requests if len(one.blocks)), default=0)
    never = len(requests)
    next_use = np.full(num_blocks, never, dtype=np.int64)
    found: list[Segments] = []
    for index in range(len(requests) - 1, -1, -1):
        blocks = requests[index].blocks
        uses = next_use[blocks]
        bounds = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(uses)]
        found.append(
            [
                (int(uses[begin]), end - begin)
                for begin, end in itertools.pairwise(bounds)
                if end > begin and uses[begin] < never
            ]
        )
        next_use[blocks] = index
    found.reverse()
    return found


def _hits(segments: Sequence[Segments], capacity: int) -> list[int]:
    kept = [0] * len(segments)
    farthest: list[int] = []
    num_kept = 0
    hits = []
    for index, own in enumerate(segments):
        hits.append(kept[index])
        num_kept -= kept[index]
        kept[index] = 0
        for use, num_blocks in own:
            if not kept[use]:
                heapq.heappush(farthest, -use)
            kept[use] += num_blocks
            num_kept += num_blocks
        while num_kept > capacity:
            use = -farthest[0]
            num_gone = min(kept[use], num_kept - capacity)
            kept[use] -= num_gone
            num_kept -= num_gone
            if not kept[use]:
                heapq.heappop(farthest)
    return hits
