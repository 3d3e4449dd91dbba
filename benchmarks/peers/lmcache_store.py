"""Drives LMCache's storage adapter `fs_native` through its own interface, for another process.

Run by the interpreter of LMCache's own environment:

    python -m benchmarks.peers.lmcache_store

The adapter has its own threads, in C++: as many as there are shares of a turn. All batches of a
turn are submitted at once, as objects that lie in the pool.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import select
from typing import TYPE_CHECKING, Any

from benchmarks.peers.store_worker import StoreWorker
from benchmarks.peers.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.page_set import Part

__all__ = ["LmcacheStore"]

_PATIENCE_MS = 120_000


class LmcacheStore(StoreWorker):
    """`fs_native` on the page cache, without eviction."""

    def __init__(self) -> None:
        os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        self._torch = importlib.import_module("torch")
        self._api = importlib.import_module("lmcache.v1.distributed.api")
        self._objects = importlib.import_module("lmcache.v1.memory_management")
        self._adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters")
        self._configs = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
        self._adapter: Any = None
        self._connected: tuple[str, int] | None = None

    def version(self) -> str:
        """Return LMCache's version."""
        return importlib.metadata.version("lmcache")

    def _connect(self, folder: str, num_threads: int) -> None:
        if self._connected == (folder, num_threads) and folder == self._folder:
            return
        if self._adapter is not None:
            self._adapter.close()
        spec = {"type": "fs_native", "base_path": folder, "num_workers": num_threads}
        arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = self._configs.parse_args_to_l2_adapters_config(arguments).adapters
        self._adapter = self._adapters.create_l2_adapter(config)
        self._connected = (folder, num_threads)

    def _write_jobs(self, shares: Sequence[Sequence[Part]]) -> list[Callable[[], object]]:
        adapter, batches = self._adapter, self._prepare(shares)

        def ended(tasks: set[int]) -> set[int]:
            return tasks & set(adapter.pop_completed_store_tasks())

        def write() -> None:
            tasks = {adapter.submit_store_task(*batch) for batch in batches}
            _wait(adapter.get_store_event_fd(), tasks, ended)

        return [write]

    def _read_jobs(self, shares: Sequence[Sequence[Part]]) -> list[Callable[[], object]]:
        adapter, batches = self._adapter, self._prepare(shares)

        def ended(tasks: set[int]) -> set[int]:
            return {task for task in tasks if adapter.query_load_result(task) is not None}

        def read() -> None:
            tasks = {adapter.submit_load_task(*batch) for batch in batches}
            _wait(adapter.get_load_event_fd(), tasks, ended)

        return [read]

    def _prepare(self, shares: Sequence[Sequence[Part]]) -> list[tuple[list[Any], list[Any]]]:
        """Return the keys and the objects of each batch, in the order in which they come up."""
        longest = max(map(len, shares))
        parts = [share[turn] for turn in range(longest) for share in shares if turn < len(share)]
        return [
            (
                [self._api.ObjectKey(key, "model", 0) for key in self._pages.keys(part.pages)],
                [self._object(row) for row in part.rows],
            )
            for part in parts
        ]

    def _object(self, row: int) -> Any:
        page_bytes, objects = self._pages.page_bytes, self._objects
        metadata = objects.MemoryObjMetadata(
            shape=self._torch.Size([page_bytes]),
            dtype=self._torch.uint8,
            address=row * page_bytes,
            phy_size=page_bytes,
            ref_count=1,
            fmt=objects.MemoryFormat.KV_2LTD,
        )
        page = self._torch.from_numpy(self._memory[row])
        return objects.TensorMemoryObj(raw_data=page, metadata=metadata, parent_allocator=None)


def _wait(event: int, tasks: set[int], ended: Callable[[set[int]], set[int]]) -> None:
    """Wait until all `tasks` have ended; `event` becomes readable as they do."""
    poller = select.poll()
    poller.register(event, select.POLLIN)
    while tasks:
        if not poller.poll(_PATIENCE_MS):
            raise TimeoutError(f"{len(tasks)} tasks do not end")
        os.read(event, 8)
        tasks = tasks - ended(tasks)


if __name__ == "__main__":
    serve(LmcacheStore)
