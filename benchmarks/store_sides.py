"""The sides that move the same pages in turn: a storage backend, and memcpy."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from benchmarks.harness import check
from benchmarks.page_set import Turn, time_jobs
from benchmarks.store_disk import drop_page_cache
from hicache.device.host_memory import HostMemory
from hicache.hashing import StorageNamespace
from hicache.storage.base import HiCacheStorageConfig, Piece
from hicache.storage.factory import StorageBackendFactory
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.page_set import Bytes, PageSet, Part
    from hicache.storage.base import HiCacheStorage, Page

    _Call = tuple[list[PageHash], list[bytes], list[Page]]

__all__ = ["HicacheSide", "MemcpySide", "Memory", "OpenStore", "Side", "open_file_store"]

_CALL_SECONDS = 600.0


class OpenStore(Protocol):
    """Opens a storage backend in a folder; `ConfigError` when it cannot be opened that way."""

    def __call__(self, folder: Path, *, page_bytes: int, direct: bool = False) -> HiCacheStorage:
        """Return a backend for pages of that length, past the page cache if `direct`."""


def open_file_store(folder: Path, *, page_bytes: int, direct: bool = False) -> HiCacheStorage:
    """Return the backend that is named `file`; see `OpenStore`."""
    namespace = StorageNamespace(
        model="benchmark",
        weights_revision="none",
        dtype="uint8",
        layout="page_first",
        page_size=64,
        kv_shape=f"bytes={page_bytes}",
    )
    options: dict[str, object] = {"path": str(folder)}
    if direct:
        options["direct_io"] = True
    config = HiCacheStorageConfig(namespace=namespace, page_bytes=page_bytes, extra_config=options)
    return StorageBackendFactory.default().create_backend("file", config)


class Side(Protocol):
    """Moves pages and checks every byte of them, outside of the time that it measures.

    Attributes:
        name: how results name it.
    """

    name: str

    def read(self, turn: Turn) -> float:
        """Return how long the reads of `turn` took, in seconds; `CheckFailed` if they are wrong."""

    def write(self, turn: Turn) -> float:
        """Return how long the writes of `turn` to an empty place took; `CheckFailed` likewise."""


class _Threads:
    """Threads that are started already, one for each job."""

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def time(self, jobs: Sequence[Callable[[], object]]) -> float:
        """Return the seconds that `jobs` took side by side."""
        if len(jobs) not in self._pools:
            self._pools[len(jobs)] = ThreadPoolExecutor(len(jobs))
            time_jobs([partial(time.sleep, 0.01)] * len(jobs), self._pools[len(jobs)])
        return time_jobs(jobs, self._pools[len(jobs)])

    def close(self) -> None:
        """End them."""
        for pool in self._pools.values():
            pool.shutdown()


class Memory:
    """Host memory as a host pool has it: pages to write from, and as much room to read them into.

    Args:
        pages: the pages.
        huge_pages: ask for 2 MiB pages.

    Attributes:
        pages: as given.
        source: `[num_pages, page_bytes]`, with every page in a row somewhere.
        home: of each batch, in which rows of `source` its pages are.
        target: as large.
        regions: address and bytes of both.
        huge_pages: whether the kernel gives 2 MiB pages.
        threads: for who moves pages.
    """

    def __init__(self, pages: PageSet, *, huge_pages: bool) -> None:
        self.pages = pages
        self.threads = _Threads()
        self._memories = [
            HostMemory(pages.num_bytes, pinned=False, huge_pages=huge_pages) for _ in range(2)
        ]
        self.huge_pages = all(memory.huge_pages for memory in self._memories)
        self.regions = [(memory.address, memory.num_bytes) for memory in self._memories]
        self.source, self.target = (
            memory.tensor.numpy().reshape(-1, pages.page_bytes) for memory in self._memories
        )
        (self.home,) = pages.deal(Turn([list(range(pages.num_batches))], seed=0))
        pages.fill(self.source, [self.home])

    def close(self) -> None:
        """Give the memory back."""
        self.threads.close()
        for memory in self._memories:
            memory.close()

    def home_of(self, shares: Sequence[Sequence[Part]]) -> list[list[Part]]:
        """Return `shares` with the rows of `source` in which their pages are."""
        size = self.pages.batch_pages
        return [[self.home[part.pages.start // size] for part in share] for share in shares]

    def spoil(self, shares: Sequence[Sequence[Part]]) -> None:
        """Make sure that what is in the rows of `target` afterwards has come there meanwhile."""
        self.pages.spoil(self.target, shares)

    def check(self, shares: Sequence[Sequence[Part]], doing: str) -> None:
        """Raise `CheckFailed` unless every page of `shares` is in its row of `target`."""
        page = self.pages.first_wrong(self.target, shares)
        check(page is None, f"{doing} gives other bytes than page {page} has")


class MemcpySide:
    """Copies as many pieces of the same size, from memory to memory, whatever the direction."""

    name = "memcpy"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def read(self, turn: Turn) -> float:
        """See `Side.read`."""
        memory, shares = self._memory, self._memory.pages.deal(turn)
        memory.spoil(shares)
        jobs = [
            partial(_copy, _rows(memory.target, to), _rows(memory.source, source))
            for to, source in zip(shares, memory.home_of(shares), strict=True)
        ]
        seconds = memory.threads.time(jobs)
        memory.check(shares, self.name)
        return seconds

    write = read


def _rows(memory: Bytes, share: Sequence[Part]) -> list[Bytes]:
    return [memory[row] for part in share for row in part.rows]


def _copy(targets: list[Bytes], sources: list[Bytes]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


class HicacheSide:
    """A storage backend of hicache, moved through its contract alone.

    Args:
        memory: of the pages.
        folder: for its stores; made if it is not there.
        open_store: what is measured.
        direct: past the page cache.

    Attributes:
        storage: the store that is read.

    Raises:
        ConfigError: the backend refuses to work like that.
    """

    name = "hicache"

    def __init__(
        self, memory: Memory, folder: Path, open_store: OpenStore, *, direct: bool = False
    ) -> None:
        self._memory = memory
        self._folder = folder
        self._open = partial(open_store, page_bytes=memory.pages.page_bytes, direct=direct)
        self._direct = direct
        self.storage = self._open(folder / "kept")
        self.storage.register_memory(memory.regions)

    def keep(self, num_threads: int) -> None:
        """Write all pages to the store that is read."""
        batches = range(self._memory.pages.num_batches)
        turn = Turn([list(batches[start::num_threads]) for start in range(num_threads)], seed=0)
        self._write(self.storage, self._memory.pages.deal(turn))

    def read(self, turn: Turn) -> float:
        """See `Side.read`."""
        if self._direct:
            drop_page_cache(self._folder)
        return self._read(self.storage, self._memory.pages.deal(turn))

    def write(self, turn: Turn) -> float:
        """See `Side.write`."""
        fresh = self._folder / "fresh"
        storage = self._open(fresh)
        try:
            storage.register_memory(self._memory.regions)
            shares = self._memory.pages.deal(turn)
            seconds = self._write(storage, shares)
            self._read(storage, shares)
        finally:
            storage.close()
            shutil.rmtree(fresh)
        return seconds

    def close(self) -> None:
        """Close the store that is read."""
        self.storage.close()

    def _read(self, storage: HiCacheStorage, shares: list[list[Part]]) -> float:
        self._memory.spoil(shares)
        address, _ = self._memory.regions[1]
        seconds = self._run(
            [
                [partial(storage.batch_get, *call) for call in calls]
                for calls in self._calls(address, shares)
            ],
            "batch_get",
        )
        self._memory.check(shares, "batch_get")
        return seconds

    def _write(self, storage: HiCacheStorage, shares: list[list[Part]]) -> float:
        address, _ = self._memory.regions[0]
        return self._run(
            [
                [partial(storage.batch_set, *call) for call in calls]
                for calls in self._calls(address, self._memory.home_of(shares))
            ],
            "batch_set",
        )

    def _run(self, calls: list[list[Callable[..., list[PageOutcome]]]], name: str) -> float:
        outcomes: list[PageOutcome] = []
        deadline = time.monotonic() + _CALL_SECONDS

        def run(share: list[Callable[..., list[PageOutcome]]]) -> None:
            for call in share:
                outcomes.extend(call(deadline=deadline))

        seconds = self._memory.threads.time([partial(run, share) for share in calls])
        wanted = [PageOutcome.OK] * sum(map(len, calls)) * self._memory.pages.batch_pages
        check(outcomes == wanted, f"{name} answers {sorted({one.value for one in outcomes})}")
        return seconds

    def _calls(self, address: int, shares: list[list[Part]]) -> list[list[_Call]]:
        """Return the keys, the keys before them and the places of the pages of every batch."""
        pages = self._memory.pages
        calls: list[list[_Call]] = []
        for share in shares:
            calls.append([])
            for part in share:
                keys = [PageHash(key) for key in pages.keys(part.pages)]
                places: list[Page] = [
                    (Piece(address + row * pages.page_bytes, pages.page_bytes),)
                    for row in part.rows
                ]
                calls[-1].append((keys, [b"", *keys[:-1]], places))
        return calls
