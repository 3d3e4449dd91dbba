"""The pages that a store is measured with: their keys, their bytes, and who moves which.

A page's bytes follow from its number alone, so that every side of a comparison makes and checks
them by itself. Needs nothing but numpy, because the interpreters of other systems run it too.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["PageSet", "Part", "Turn", "time_jobs"]

_SPOILED = 0xEE
"""What is in every byte that a read has to replace."""

_WORD_BYTES = 8


class Part(NamedTuple):
    """One batch, and the rows of memory in which its pages lie.

    Attributes:
        pages: numbers of the pages, in order.
        rows: of each page, its row.
    """

    pages: range
    rows: list[int]


class Turn(NamedTuple):
    """What every side does in one turn.

    Attributes:
        batches: numbers of the batches that each thread moves, in order.
        seed: chooses the rows in which their pages lie.
    """

    batches: list[list[int]]
    seed: int

    @property
    def num_batches(self) -> int:
        """Of all threads together."""
        return sum(map(len, self.batches))


class PageSet:
    """Pages in batches of equal size; a batch is a chain, as the pages of one prompt are.

    Args:
        page_bytes: a multiple of 8.
        num_batches: how many batches there are.
        batch_pages: pages of each.
    """

    def __init__(self, *, page_bytes: int, num_batches: int, batch_pages: int) -> None:
        self.page_bytes = page_bytes
        self.num_batches = num_batches
        self.batch_pages = batch_pages
        self._pattern = np.random.PCG64(page_bytes).random_raw(page_bytes // _WORD_BYTES)
        self._marks = np.random.PCG64(num_batches).random_raw(self.num_pages)

    @property
    def num_pages(self) -> int:
        """Of all batches together."""
        return self.num_batches * self.batch_pages

    @property
    def num_bytes(self) -> int:
        """Of all pages together."""
        return self.num_pages * self.page_bytes

    def pages_of(self, batch: int) -> range:
        """Return the numbers of the pages of `batch`."""
        return range(batch * self.batch_pages, (batch + 1) * self.batch_pages)

    def keys(self, pages: range) -> list[bytes]:
        """Return the key of each page: 32 bytes that no other page has."""
        return [hashlib.sha256(b"page %d" % page).digest() for page in pages]

    def deal(self, turn: Turn) -> list[list[Part]]:
        """Return the parts that each thread moves; every page has a row of its own, anywhere."""
        rows = np.random.default_rng(turn.seed).permutation(self.num_pages).tolist()
        shares: list[list[Part]] = []
        for batches in turn.batches:
            shares.append([])
            for batch in batches:
                shares[-1].append(Part(self.pages_of(batch), rows[: self.batch_pages]))
                del rows[: self.batch_pages]
        return shares

    def fill(self, memory: Bytes, shares: Sequence[Sequence[Part]]) -> None:
        """Write the bytes of all pages of `shares` to their rows.

        Args:
            memory: `[num_pages, page_bytes]`.
            shares: as `deal` gives them.
        """
        words = memory.view(np.uint64)
        for part in _parts(shares):
            for page, row in zip(part.pages, part.rows, strict=True):
                np.bitwise_xor(self._pattern, self._marks[page], out=words[row])

    def spoil(self, memory: Bytes, shares: Sequence[Sequence[Part]]) -> None:
        """Write bytes of no page to all rows of `shares`."""
        for part in _parts(shares):
            for row in part.rows:
                memory[row] = _SPOILED

    def first_wrong(self, memory: Bytes, shares: Sequence[Sequence[Part]]) -> int | None:
        """Return a page of `shares` that differs in any byte from what it is, None if none does."""
        words = memory.view(np.uint64)
        for part in _parts(shares):
            for page, row in zip(part.pages, part.rows, strict=True):
                if not np.array_equal(words[row] ^ self._marks[page], self._pattern):
                    return page
        return None


def _parts(shares: Sequence[Sequence[Part]]) -> list[Part]:
    return [part for share in shares for part in share]


def time_jobs(jobs: Sequence[Callable[[], object]], threads: Executor) -> float:
    """Return the seconds that `jobs` took together, each in a thread; raise what one raised."""
    begin = time.perf_counter()
    for future in [threads.submit(job) for job in jobs]:
        future.result()
    return time.perf_counter() - begin
