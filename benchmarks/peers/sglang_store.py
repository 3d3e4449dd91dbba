"""Drives SGLang's file backend `HiCacheFile` as its controller does, for another process.

Run by the interpreter of SGLang's own environment:

    python -m benchmarks.peers.sglang_store [SOURCE]

A page is read as `HiCacheController` reads it from this backend: into a zeroed tensor of its own,
and from there copied into the pool. `SOURCE` is as for `sglang_tree`.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.peers.sglang_packages import prepare_sglang, sglang_version, srt
from benchmarks.peers.store_worker import StoreWorker
from benchmarks.peers.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.page_set import Part

__all__ = ["SglangStore"]


class SglangStore(StoreWorker):
    """`HiCacheFile` without limits and without a cache of what exists, as it is by default."""

    def __init__(self, source: str | None) -> None:
        prepare_sglang(source)
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._storage = srt("mem_cache.hicache_storage")
        self._backend: Any = None

    def version(self) -> str:
        """Return SGLang's version."""
        return sglang_version()

    def exists(self, *, batches: list[int], samples: int) -> dict[str, Any]:
        """Time looks for all pages of one batch after the other; tell the least that was found."""
        names = [[key.hex() for key in self._pages.keys(self._pages.pages_of(b))] for b in batches]
        times, counts, clock = [], [], time.perf_counter_ns
        for keys in itertools.islice(itertools.cycle(names), samples):
            begin = clock()
            count = self._backend.batch_exists(keys)
            times.append((clock() - begin) / 1e3)
            counts.append(count)
        return {"times": times, "found": min(counts)}

    def _connect(self, folder: str, num_threads: int) -> None:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = folder
        config = self._storage.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="model",
        )  # fmt: skip
        self._backend = self._storage.HiCacheFile(config)

    def _write_jobs(self, shares: Sequence[Sequence[Part]]) -> list[Callable[[], object]]:
        return [partial(self._write, self._prepare(share)) for share in shares]

    def _read_jobs(self, shares: Sequence[Sequence[Part]]) -> list[Callable[[], object]]:
        return [partial(self._read, self._prepare(share)) for share in shares]

    def _prepare(self, share: Sequence[Part]) -> list[tuple[list[str], list[Any]]]:
        """Return the names and the memory of the pages of each batch."""
        pool = self._torch.from_numpy(self._memory)
        return [
            ([key.hex() for key in self._pages.keys(part.pages)], [pool[row] for row in part.rows])
            for part in share
        ]

    def _write(self, batches: list[tuple[list[str], list[Any]]]) -> None:
        for keys, pages in batches:
            self._backend.batch_set(keys, pages)

    def _read(self, batches: list[tuple[list[str], list[Any]]]) -> None:
        zeros, uint8, page_bytes = self._torch.zeros, self._torch.uint8, self._pages.page_bytes
        for keys, pages in batches:
            staging = [zeros(page_bytes, dtype=uint8) for _ in keys]
            for page, found in zip(pages, self._backend.batch_get(keys, staging), strict=True):
                if found is not None:
                    page.copy_(found)


if __name__ == "__main__":
    serve(lambda: SglangStore(sys.argv[1] if len(sys.argv) > 1 else None))
