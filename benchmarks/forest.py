"""Trees of many leaves: what is done to them, and what they must answer, known from outside."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.harness import check
from hicache.radix import RadixKey, RadixTree

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence


__all__ = ["VOCABULARY", "Cycle", "Forest", "Outcome", "grown_bytes", "run_cycle"]

VOCABULARY = 128_000
"""Token ids are drawn from below this."""


class Cycle(NamedTuple):
    """Use some leaves, insert a new one, evict one page; and what has to come of it.

    Attributes:
        chosen: pages of the leaves to match, lock and unlock.
        keys: their keys.
        new_key: what is inserted then.
        new_path: the pages to insert it with.
        evicted: the page that is least recently used afterwards.
    """

    chosen: Sequence[int]
    keys: Sequence[RadixKey]
    new_key: RadixKey
    new_path: Sequence[int]
    evicted: int


class Outcome(NamedTuple):
    """What a tree has made of a cycle.

    Attributes:
        matched: by leaf, the pages found.
        present: pages of the new key that the tree said it had.
        freed: pages that it gave back.
        insert_us, evict_us, cycle_us: how long the insert, the eviction and all of it took.
    """

    matched: Sequence[Sequence[int]]
    present: int
    freed: Sequence[int]
    insert_us: float
    evict_us: float
    cycle_us: float


class Forest:
    """What a tree of leaves of one page holds, and in which order they were used.

    Leaf `i` is in page `i`. One page is always spare: a new leaf takes it, the evicted one leaves
    it. With a shared parent, all leaves are below a node of one more page. There is no tree in it:
    several can be planted and taken through the same cycles.

    Attributes:
        head: pages above every leaf.
    """

    def __init__(self, num_leaves: int, page_size: int, *, shared_parent: bool) -> None:
        self.head = [num_leaves + 1] * shared_parent
        self._new_keys = _random_keys(page_size, shared_parent=shared_parent)
        self._keys = list(itertools.islice(self._new_keys, num_leaves + 1))
        self._spare = num_leaves
        # Least recently used first.
        self._used = OrderedDict.fromkeys(range(num_leaves))

    def leaves(self) -> Iterator[tuple[RadixKey, list[int]]]:
        """Yield key and path of every leaf, to be planted in this order before any cycle."""
        for page in self._used:
            yield self._keys[page], [*self.head, page]

    def next_cycle(self, rng: random.Random, *, num_matches: int) -> Cycle:
        """Return the next cycle, of `num_matches` leaves drawn with replacement."""
        last = len(self._keys) - 1
        drawn = [rng.randrange(last) for _ in range(num_matches)]
        chosen = [last if page == self._spare else page for page in drawn]
        keys = [self._keys[page] for page in chosen]
        for page in chosen:
            self._used.move_to_end(page)
        new_key, new_page = next(self._new_keys), self._spare
        self._keys[new_page] = new_key
        self._used[new_page] = None
        self._spare, _ = self._used.popitem(last=False)
        return Cycle(chosen, keys, new_key, [*self.head, new_page], self._spare)

    def confirm(self, cycle: Cycle, outcome: Outcome) -> None:
        """Raise `CheckFailed` unless `outcome` is what has to come of `cycle`."""
        for page, found in zip(cycle.chosen, outcome.matched, strict=True):
            check(found == [*self.head, page], f"match of page {page} gives {found}")
        present, freed = outcome.present, outcome.freed
        check(present == len(self.head), f"insert of a new leaf found {present} pages present")
        check(
            freed == [cycle.evicted],
            f"evict freed {freed}, the least recently used is page {cycle.evicted}",
        )


def run_cycle(tree: RadixTree, cycle: Cycle) -> Outcome:
    """Take `tree` through `cycle`; look at the end whether it knows the new leaf."""
    new_key, new_pages, matches = cycle.new_key, np.array(cycle.new_path, dtype=np.int64), []
    begin = time.perf_counter_ns()
    for key in cycle.keys:
        match = tree.match(key)
        tree.lock(match.last_device_node)
        tree.unlock(match.last_device_node)
        matches.append(match)
    before_insert = time.perf_counter_ns()
    inserted = tree.insert(new_key, new_pages)
    before_evict = time.perf_counter_ns()
    freed = tree.evict(1).freed
    end = time.perf_counter_ns()
    found = tree.match(new_key).device_pages.tolist()
    check(found == cycle.new_path, f"match of page {cycle.new_path[-1]}, just new, gives {found}")
    return Outcome(
        matched=[match.device_pages.tolist() for match in matches],
        present=inserted.already_present_pages,
        freed=freed.tolist(),
        insert_us=(before_evict - before_insert) / 1e3,
        evict_us=(end - before_evict) / 1e3,
        cycle_us=(end - begin) / 1e3,
    )


def _random_keys(page_size: int, *, shared_parent: bool) -> Iterator[RadixKey]:
    """Yield random keys without end: of one page, or of two whose first they all share."""
    rng = np.random.default_rng(1)
    head = RadixKey(rng.integers(VOCABULARY, size=page_size * shared_parent))
    while True:
        for tokens in rng.integers(VOCABULARY, size=(1024, page_size), dtype=np.int32):
            yield head.extend(tokens)


def grown_bytes(num_leaves: int, page_size: int) -> int:
    """Return by how much this process's resident memory grows with a tree of leaves of one page.

    Their keys are not kept beside the tree. Right only in a process of its own, whose memory nobody
    has used and freed before.
    """
    keys = _random_keys(page_size, shared_parent=False)
    tree = RadixTree(page_size)
    gc.collect()
    before = _resident_bytes()
    for page, key in enumerate(itertools.islice(keys, num_leaves)):
        tree.insert(key, np.array([page], dtype=np.int64))
    gc.collect()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
