"""A tree of many leaves, and what it must answer known from bookkeeping of its own."""

from __future__ import annotations

import gc
import itertools
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness import check
from hicache.radix import MatchResult, RadixKey, RadixTree

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from hicache.types import IntArray

__all__ = ["VOCABULARY", "Forest", "grown_bytes"]

VOCABULARY = 128_000
"""Token ids are drawn from below this."""


class Forest:
    """A tree of leaves of one page, with the order of their use kept from outside.

    Leaf `i` is in page `i`. One page is always spare: a new leaf takes it, the evicted one leaves
    it. With a shared parent, all leaves are below a node of one more page.

    What is done to `tree` has to be told to the `confirm_*` methods in the same order; each raises
    `CheckFailed` when the tree's answer is not what it has to be.

    Attributes:
        tree: what is measured.
        keys: by page; that of the spare page is not in the tree.
        new_keys: keys that no leaf has had, without end.
        spare: the page that no leaf is in.
    """

    def __init__(
        self,
        num_leaves: int,
        page_size: int,
        *,
        shared_parent: bool,
        create_tree: Callable[[int], RadixTree],
    ) -> None:
        self.tree = create_tree(page_size)
        self._parent_pages = np.array([num_leaves + 1] * shared_parent, dtype=np.int64)
        self.new_keys = _random_keys(page_size, shared_parent=shared_parent)
        self.keys = list(itertools.islice(self.new_keys, num_leaves + 1))
        self.spare = num_leaves
        # Least recently used first.
        self._used: OrderedDict[int, None] = OrderedDict()
        for page in range(num_leaves):
            self.tree.insert(self.keys[page], self.path_pages(page))
            self._used[page] = None

    def take_spare(self, new_key: RadixKey) -> IntArray:
        """Give the spare page to `new_key`; return the page ids to insert it with."""
        self.keys[self.spare] = new_key
        return self.path_pages(self.spare)

    def path_pages(self, page: int) -> IntArray:
        """Return the page ids on the path of the leaf in `page`."""
        return np.append(self._parent_pages, page)

    def choose(self, rng: random.Random, count: int) -> list[int]:
        """Return the pages of `count` random leaves, drawn with replacement."""
        last = len(self.keys) - 1
        drawn = [rng.randrange(last) for _ in range(count)]
        return [last if page == self.spare else page for page in drawn]

    def confirm_match(self, page: int, match: MatchResult) -> None:
        """Note the use of the leaf in `page`, of whose key `match` is the result."""
        found = match.device_pages.tolist()
        check(found == self.path_pages(page).tolist(), f"match of page {page} gives {found}")
        self._used.move_to_end(page)

    def confirm_insert(self, num_present: int) -> None:
        """Note that the key of the spare page was inserted."""
        expected = len(self._parent_pages)
        check(num_present == expected, f"insert of a new leaf found {num_present} pages present")
        self._used[self.spare] = None

    def confirm_evict(self, freed: IntArray) -> None:
        """Note that `freed` was evicted; it has to be the least recently used leaf."""
        oldest = next(iter(self._used))
        found = freed.tolist()
        check(found == [oldest], f"evict freed {found}, the least recently used is page {oldest}")
        del self._used[oldest]
        self.spare = oldest


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
