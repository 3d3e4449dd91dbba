"""What a tree remembers of runs: when requests used them, also of those that were evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from hicache.radix.reuse_statistics import ReuseStatistics, cell_of

if TYPE_CHECKING:
    from hicache.radix.node import RadixNode

__all__ = ["RunHistory"]

_MAX_EVICTED_RUNS: Final = 1 << 11
"""Evicted runs that are remembered; beyond, the one that was evicted first is forgotten."""


_FLOOR_VICTIMS: Final = 64
"""Host victims over which their worth is averaged."""

_FLOOR_REFUSALS: Final = 1024
"""So many refusals in a row lower the bar to a third."""


class _EvictedRun(NamedTuple):
    above: int
    lineage: int
    num_pages: int
    num_uses: int
    last_use: int


class RunHistory:
    """Uses of runs by requests, which outlive the runs themselves for a while.

    A run that comes back gets its uses back, and is cut as it was before, so that runs with
    different pasts stay apart. An evicted run is known by its first page and by the lineage of the
    run before it, whose bytes may be gone as well: a lineage is the id of the node that first stood
    there. Confusing two runs costs nothing but a worse guess.

    Memory is constant, and so is the cost per call, amortised, but for hashing one page.

    Attributes:
        statistics: how likely runs are used again.
        host_floor: worth of what the host gave up lately; 0 before it has given up anything.
    """

    def __init__(self) -> None:
        self.statistics = ReuseStatistics()
        self.host_floor = 0.0
        self._evicted: OrderedDict[int, _EvictedRun] = OrderedDict()
        self._below: dict[int, int] = {}

    def use(self, node: RadixNode) -> None:
        """Note that the current request uses `node`; call it before the use is counted."""
        statistics, num_pages = self.statistics, node.end - node.start
        num_uses = node.num_uses
        if num_uses:
            statistics.end_wait(num_uses, node.last_use, num_pages, reused=True)
        node.last_use = statistics.now
        statistics.wait(num_uses + 1, num_pages)

    def note_host_victim(self, node: RadixNode) -> None:
        """Note that the host gives up its pages of `node`."""
        self.host_floor += (self._worth(node) - self.host_floor) / _FLOOR_VICTIMS

    def admit_to_host(self, node: RadixNode) -> bool:
        """Return whether the pages of `node` are worth what the host would give up for them.

        Each refusal lowers the bar: what the host has ages meanwhile.
        """
        admitted = self._worth(node) >= self.host_floor
        if not admitted:
            self.host_floor -= self.host_floor / _FLOOR_REFUSALS
        return admitted

    def _worth(self, node: RadixNode) -> float:
        age = self.statistics.now - node.last_use
        return self.statistics.worth[cell_of(node.num_uses, age)]

    def remember(self, node: RadixNode, parent: RadixNode, page: bytes) -> None:
        """Note that `node`, which begins with `page` below `parent`, is deleted."""
        num_uses = node.num_uses
        if not num_uses:
            return
        lineage, num_pages = node.lineage, node.end - node.start
        # A run that goes in pieces, from its end, becomes one again.
        rest = self._evicted.get(self._below.get(lineage, -1))
        if rest is not None and (rest.num_uses, rest.last_use) == (num_uses, node.last_use):
            self._take(self._below[lineage])
            lineage, num_pages = rest.lineage, num_pages + rest.num_pages
        slot = _slot(parent, page)
        self._forget(slot)
        self._evicted[slot] = _EvictedRun(
            parent.lineage, lineage, num_pages, num_uses, node.last_use
        )
        self._below[parent.lineage] = slot
        if len(self._evicted) > _MAX_EVICTED_RUNS:
            self._forget(next(iter(self._evicted)))

    def recall(self, node: RadixNode, parent: RadixNode, page: bytes) -> int | None:
        """Give `node`, which is new below `parent`, the past of the evicted run that stood there.

        Returns how many pages that run had, which is where to cut the new one; None without a past.
        """
        run = self._take(_slot(parent, page))
        if run is None:
            return None
        node.past_hits, node.last_use = run.num_uses, run.last_use
        if node.num_pages >= run.num_pages:
            node.lineage = run.lineage
        else:
            self.statistics.end_wait(
                run.num_uses, run.last_use, run.num_pages - node.num_pages, reused=False
            )
        return run.num_pages

    def _forget(self, slot: int) -> None:
        run = self._take(slot)
        if run is not None:
            self.statistics.end_wait(run.num_uses, run.last_use, run.num_pages, reused=False)

    def _take(self, slot: int) -> _EvictedRun | None:
        run = self._evicted.pop(slot, None)
        if run is not None and self._below.get(run.above) == slot:
            del self._below[run.above]
        return run


def _slot(parent: RadixNode, page: bytes) -> int:
    return xxhash.xxh3_64_intdigest(page, seed=parent.lineage)
