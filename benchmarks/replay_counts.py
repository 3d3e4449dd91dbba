"""What each policy finds in a trace, counted by the real replay and compared with other counts."""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, Final

from benchmarks.harness import check
from benchmarks.replay_traces import BLOCK_TOKENS
from hicache.replay import CacheOptions, TimeModel, replay, replay_belady

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.replay_traces import ReplayTrace
    from hicache.replay import TraceRequest

__all__ = ["BOUND", "POLICIES", "ReplayCounts", "hits_of_single_blocks"]

POLICIES: Final = ("adaptive", "lru", "slru", "lfu")
"""The one that is judged, and those it is judged by."""

BOUND: Final = "belady"


class ReplayCounts:
    """The hits of every policy at every size of a trace, counted when they are first asked for.

    Attributes:
        trace: what is replayed.
        speeds: requests by second of each policy, all sizes in one pass.
    """

    def __init__(self, trace: ReplayTrace) -> None:
        self.trace = trace
        self.speeds: dict[str, float] = {}

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that all requests together ask for."""
        return sum(len(request.blocks) for request in self.trace.requests)

    @cached_property
    def hits(self) -> Mapping[tuple[str, int], int]:
        """Blocks found, by policy and size.

        Raises:
            CheckFailed: others have counted something else.
        """
        requests, hits = self.trace.requests, {}
        for policy in (*POLICIES, BOUND):
            options = [CacheOptions(policy=policy, device_blocks=size) for size in self.trace.sizes]
            run = replay_belady if policy == BOUND else replay
            begin = time.perf_counter()
            results = run(requests, options, block_tokens=BLOCK_TOKENS, model=TimeModel())
            self.speeds[policy] = len(requests) / (time.perf_counter() - begin)
            for size, result in zip(self.trace.sizes, results, strict=True):
                hits[policy, size] = result.hit_blocks
        self._compare(hits)
        return hits

    def ratio(self, policy: str, size: int) -> float:
        """Return the share of the blocks that `policy` finds."""
        return self.hits[policy, size] / self.num_blocks

    def _compare(self, hits: Mapping[tuple[str, int], int]) -> None:
        trace = self.trace
        for (policy, size), found in hits.items():
            most = hits[BOUND, size]
            check(found <= most, f"{policy} finds {found} of at most {most} blocks in {size}")
            known = trace.known.get((policy, size))
            if known is None and policy == "lru":
                known = hits_of_single_blocks(trace.requests, size)
            check(
                known is None or found == known,
                f"{policy} finds {found} blocks of {trace.name} in {size}, and should find {known}",
            )


def hits_of_single_blocks(requests: Sequence[TraceRequest], size: int) -> int:
    """Return the hits of LRU over single blocks; of one request the last block goes first."""
    used: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        blocks = request.blocks.tolist()
        absent = (index for index, block in enumerate(blocks) if block not in used)
        hits += next(absent, len(blocks))
        for block in reversed(blocks):
            used[block] = None
            used.move_to_end(block)
        while len(used) > size:
            used.popitem(last=False)
    return hits
