"""What stores of other systems have in common when a benchmark in another process drives them.

Run by the interpreter of the other system. Times are seconds of all threads together; memory is
prepared before and compared after.
"""

from __future__ import annotations

import mmap
import os
import shutil
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.page_set import PageSet, Turn, time_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.page_set import Bytes, Part

__all__ = ["StoreWorker"]

_HUGE_PAGE_BYTES = 2 << 20


class StoreWorker(ABC):
    """One store, and memory with a row for each page; each method answers one kind of line.

    `open` comes first. A subclass says how the pages of a turn are moved.
    """

    _memory: Bytes
    _pages: PageSet
    _folder: str

    @abstractmethod
    def version(self) -> str:
        """Return the version of the system."""

    @abstractmethod
    def _connect(self, folder: str, num_threads: int) -> None:
        """Use the store in `folder`, which may be empty, in place of the one before."""

    @abstractmethod
    def _write_jobs(self, shares: Sequence[Sequence[Part]]) -> list[Callable[[], object]]:
        """Return what writes the pages of `shares` from their rows, to be run side by side."""

    @abstractmethod
    def _read_jobs(self, shares: Sequence[Sequence[Part]]) -> list[Callable[[], object]]:
        """Return what reads the pages of `shares` into their rows, to be run side by side."""

    def open(
        self, *, folder: str, page_bytes: int, num_batches: int, batch_pages: int, huge_pages: bool
    ) -> None:
        """Give memory to a set of pages, whose store is to be in `folder`."""
        self._pages = PageSet(
            page_bytes=page_bytes, num_batches=num_batches, batch_pages=batch_pages
        )
        self._folder = folder
        self._memory = _memory(self._pages.num_bytes, huge_pages).reshape(-1, page_bytes)

    def keep(self, *, num_threads: int) -> None:
        """Write all pages to the store that `read` uses."""
        os.makedirs(self._folder, exist_ok=True)
        self._connect(self._folder, num_threads)
        batches = range(self._pages.num_batches)
        self._move_out(Turn([list(batches[start::num_threads]) for start in range(num_threads)], 0))

    def read(self, *, batches: list[list[int]], seed: int) -> dict[str, Any]:
        """Return the seconds of a turn's reads, and a page that they brought wrong."""
        self._connect(self._folder, len(batches))
        return self._move_in(Turn(batches, seed))

    def write(self, *, batches: list[list[int]], seed: int) -> dict[str, Any]:
        """Return the seconds of a turn's writes into an empty store, and a page that is wrong."""
        folder = self._folder + "-fresh"
        os.makedirs(folder)
        try:
            self._connect(folder, len(batches))
            seconds = self._move_out(Turn(batches, seed))
            return {**self._move_in(Turn(batches, seed)), "seconds": seconds}
        finally:
            shutil.rmtree(folder)

    def _move_out(self, turn: Turn) -> float:
        shares = self._pages.deal(turn)
        self._pages.fill(self._memory, shares)
        return self._run(self._write_jobs(shares))

    def _move_in(self, turn: Turn) -> dict[str, Any]:
        shares = self._pages.deal(turn)
        self._pages.spoil(self._memory, shares)
        seconds = self._run(self._read_jobs(shares))
        return {"seconds": seconds, "wrong": self._pages.first_wrong(self._memory, shares)}

    def _run(self, jobs: list[Callable[[], object]]) -> float:
        with ThreadPoolExecutor(len(jobs)) as threads:
            time_jobs([int] * len(jobs), threads)
            return time_jobs(jobs, threads)


def _memory(num_bytes: int, huge_pages: bool) -> Bytes:
    """Return memory that starts on a huge page, and lies in such if that is asked for."""
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE_BYTES
    if huge_pages:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memory[start : start + num_bytes]
