"""What a tree remembers of runs: when requests used them, also of those that were evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from hicache.radix.reuse_statistics import ReuseStatistics, cell_of
from hicache.radix.write_rule import Admission

if TYPE_CHECKING:
    from hicache.radix.node import RadixNode

__all__ = ["RunHistory"]

_MAX_EVICTED_RUNS: Final = 1 << 11
"""Evicted runs that are remembered; beyond, the one that was evicted first is forgotten."""

_FLOOR_VICTIMS: Final = 64
"""Host victims over which their worth is averaged."""

_FLOOR_REFUSALS: Final = 1024
"""So many refusals in a row lower the bar to a third."""


_NOTICEABLE: Final = 0.025
"""Share of all uses that is worth writing anew what the host gave up and the device then evicts."""


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

    def note_device_victim(self, node: RadixNode) -> None:
        """Note that the device gives up its pages of `node`."""
        self.statistics.note_stay(node.last_use, node.end - node.start)

    @property
    def room_is_wanted(self) -> bool:
        """Whether the room of what the device has too would bring the host noticeably more uses.

        That is: what the host gave up, had it stayed for as long as those pages stay.
        """
        return self.host_floor * self.statistics.stay_per_use > _NOTICEABLE

    def admit(self, node: RadixNode, admission: Admission) -> bool:
        """Return whether pages of `node` that are about to be lost are to be kept elsewhere.

        Being worth less than what the host gives up lowers that bar: what it has ages meanwhile.
        """
        hopeless = self.statistics.offer(self._cell(node), node.end - node.start)
        if admission is Admission.WORTHY and self._worth(node) < self.host_floor:
            self.host_floor -= self.host_floor / _FLOOR_REFUSALS
            return False
        return admission is Admission.ALL or not hopeless

    def admit_to_storage(self, node: RadixNode) -> RadixNode:
        """Return the nearest run from `node` upwards that may well be used again.

        Or one that storage has already, or the root.
        """
        while node.parent is not None and not node.persisted:
            if not self.statistics.offer(self._cell(node), node.end - node.start):
                break
            node = node.parent
        return node

    def would_admit(self, node: RadixNode, admission: Admission) -> bool:
        """Return what `admit` would, and change nothing: for pages that stay for now."""
        if admission is Admission.WORTHY and self._worth(node) < self.host_floor:
            return False
        return admission is Admission.ALL or not self.statistics.hopeless[self._cell(node)]

    def _cell(self, node: RadixNode) -> int:
        return cell_of(node.num_uses, self.statistics.now - node.last_use)

    def _worth(self, node: RadixNode) -> float:
        return self.statistics.proven_worth[self._cell(node)]

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
