"""How fast a page store writes and reads where it is, beside memcpy."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from hicache.clock import MonotonicClock
from hicache.controller.call_size import pages_per_call
from hicache.errors import ConfigError, HiCacheError
from hicache.hashing import StorageNamespace, hash_pages
from hicache.storage.base import HiCacheStorageConfig, Piece
from hicache.storage.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.storage.base import Page
    from hicache.types import PageHash, PageOutcome

__all__ = ["StoreFigures", "bench_store"]

_QUERY_PAGES = 128
_READ_ROUNDS = 3
_FOREVER_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreFigures:
    """What was measured; GB are 10^9 bytes."""

    write_gb_per_s: float
    read_gb_per_s: float
    memcpy_gb_per_s: float
    exists_us: float
    exists_keys: int


def bench_store(
    directory: str, *, page_bytes: int, total_bytes: int, num_threads: int, direct_io: bool
) -> StoreFigures:
    """Write pages under a namespace of their own, read them back, compare, and remove them.

    What else is stored stays, as long as the store has room for both. Takes three times
    `total_bytes` of memory.

    Raises:
        ConfigError: the sizes cannot be.
        HiCacheError: the store did not take or did not give back a page.
    """
    num_pages = total_bytes // page_bytes
    if num_pages < 1 or num_threads < 1:
        raise ConfigError(
            f"{total_bytes} bytes in pages of {page_bytes} on {num_threads} threads measure "
            "nothing; give at least one page and one thread"
        )
    namespace = StorageNamespace(
        model="hicache storage bench",
        weights_revision=f"process {os.getpid()}",
        dtype="uint8",
        layout="page_first",
        page_size=1,
        kv_shape=f"bytes={page_bytes}",
    )
    store = PageStore(
        HiCacheStorageConfig(
            namespace=namespace,
            page_bytes=page_bytes,
            extra_config={"path": directory, "direct_io": direct_io},
        )
    )
    try:
        return _Bench(store, page_bytes, num_pages, num_threads).run()
    finally:
        try:
            store.clear()
        finally:
            store.close()


class _Memory:
    """Pages in anonymous memory, huge where the kernel gives such."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_pages * page_bytes)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(self._map, dtype=np.uint8).reshape(num_pages, page_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.pages: list[Page] = [
            (Piece(self.address + page * page_bytes, page_bytes),) for page in range(num_pages)
        ]


class _Bench:
    def __init__(self, store: PageStore, page_bytes: int, num_pages: int, num_threads: int) -> None:
        self._store = store
        self._num_threads = num_threads
        self._num_bytes = num_pages * page_bytes
        self._source = _Memory(num_pages, page_bytes)
        self._target = _Memory(num_pages, page_bytes)
        words = np.random.default_rng(0).integers(0, 256, page_bytes, dtype=np.uint8)
        for index, row in enumerate(self._source.array):
            # Cheap, and no two pages alike.
            row[:] = words
            row[:8] = np.frombuffer(index.to_bytes(8, "little"), dtype=np.uint8)[: len(row[:8])]
        self._target.array.fill(0)
        for memory in (self._source, self._target):
            store.register_memory([(memory.address, self._num_bytes)])
        tokens = np.arange(num_pages, dtype=np.int32).tobytes()
        self._keys = hash_pages(tokens, page_size=1)
        step = pages_per_call(page_bytes, call_bytes=store.capabilities.call_bytes)
        self._batches = [slice(first, first + step) for first in range(0, num_pages, step)]

    def run(self) -> StoreFigures:
        """Measure one thing after the other."""
        written = self._speed(self._write)
        # The first time pays for blocks that the file system has to find.
        self._store.clear()
        written = max(written, self._speed(self._write))
        read = max(self._speed(self._read) for _ in range(_READ_ROUNDS))
        if not np.array_equal(self._source.array, self._target.array):
            raise HiCacheError("the store gave back other bytes than it was given")
        copied = max(self._speed(self._copy) for _ in range(_READ_ROUNDS))
        keys = self._keys[:_QUERY_PAGES]
        begin = time.perf_counter()
        rounds = 100
        for _ in range(rounds):
            self._store.batch_exists(keys)
        exists = (time.perf_counter() - begin) / rounds
        return StoreFigures(
            write_gb_per_s=written,
            read_gb_per_s=read,
            memcpy_gb_per_s=copied,
            exists_us=exists * 1e6,
            exists_keys=len(keys),
        )

    def _speed(self, move: Callable[[slice], None]) -> float:
        with ThreadPoolExecutor(self._num_threads) as threads:
            begin = time.perf_counter()
            list(threads.map(move, self._batches))
            return self._num_bytes / (time.perf_counter() - begin) / 1e9

    def _write(self, batch: slice) -> None:
        keys, parents, pages = self._keys[batch], self._parents(batch), self._source.pages[batch]
        self._require_good(
            "write", keys, self._store.batch_set(keys, parents, pages, deadline=self._deadline())
        )

    def _read(self, batch: slice) -> None:
        keys, parents, pages = self._keys[batch], self._parents(batch), self._target.pages[batch]
        self._require_good(
            "read", keys, self._store.batch_get(keys, parents, pages, deadline=self._deadline())
        )

    def _parents(self, batch: slice) -> list[bytes]:
        before: Sequence[bytes] = self._keys[batch.start - 1 : batch.start] or [b""]
        return [*before, *self._keys[batch][:-1]]

    def _copy(self, batch: slice) -> None:
        for target, source in zip(
            self._target.array[batch], self._source.array[batch], strict=True
        ):
            np.copyto(target, source)

    def _require_good(
        self, verb: str, keys: Sequence[PageHash], outcomes: Sequence[PageOutcome]
    ) -> None:
        bad = next((outcome for outcome in outcomes if not outcome.good), None)
        if bad is not None:
            error = self._store.stats().last_error
            raise HiCacheError(
                f"could not {verb} {len(keys)} pages: {bad.value}"
                + (f" ({error})" if error else "")
            )

    def _deadline(self) -> float:
        return MonotonicClock().now() + _FOREVER_SECONDS
