"""A whole cache in one thread: copies and storage calls happen when they are told to."""

from __future__ import annotations

import dataclasses
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import check
from hicache.clock import ManualClock
from hicache.config import HiCacheConfig
from hicache.device.simulated import SimulatedDevice
from hicache.hiradix_cache import HiRadixCache, create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.controller import Executor
    from hicache.controller.workers import Work

__all__ = ["StepwiseCache", "open_stepwise_cache"]

_GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=1, head_dim=8, dtype="float16", page_size=64)


class _QueueExecutor:
    """Carries out storage work in the calling thread, when `run` is called; see `Executor`."""

    num_abandoned = 0

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()

    def submit(self, work: Work) -> None:
        self._queue.append(work)

    def poll(self) -> None:
        """Nothing is ever past its deadline."""

    def run(self) -> None:
        """Do all that is queued."""
        while self._queue:
            while self._queue[0].step():
                pass
            self._queue.popleft()

    def close(self, timeout_seconds: float) -> bool:
        while self._queue:
            self._queue.popleft().refuse("the executor is closed")
        return True


@dataclasses.dataclass(frozen=True)
class StepwiseCache:
    """A cache that writes through to a host pool and to a store in memory.

    Attributes:
        cache: as a scheduler has it.
        allocator: the free list of its device pages.
    """

    cache: HiRadixCache
    allocator: PageAllocator
    _device: SimulatedDevice
    _executors: list[_QueueExecutor]

    def move(self) -> None:
        """Let every copy and storage call that has begun end; the cache does not know it yet."""
        while self._device.step():
            pass
        for executor in self._executors:
            executor.run()


@contextmanager
def open_stepwise_cache(num_pages: int) -> Iterator[StepwiseCache]:
    """Provide a cache of so many pages of 64 tokens on device and host each.

    At the end nothing may be in flight and every invariant must hold, else `CheckFailed`.
    """
    device, allocator, clock = SimulatedDevice(), PageAllocator(num_pages), ManualClock()
    executors: list[_QueueExecutor] = []

    def create_executor(*_: object) -> Executor:
        executors.append(_QueueExecutor())
        return executors[-1]

    cache, _ = create_hiradix_cache(
        HiCacheConfig.from_mapping(
            {
                "page_size": _GEOMETRY.page_size,
                "write_policy": "write_through",
                "prefetch_policy": "wait_complete",
                "load_back_threshold_tokens": _GEOMETRY.page_size,
                "prefetch": {"threshold_tokens": _GEOMETRY.page_size},
                "host": {"size_bytes": num_pages * _GEOMETRY.page_bytes, "huge_pages": False},
                "storage": {
                    "backend": "memory",
                    "model_name": "benchmark",
                    "weights_revision": "none",
                },
            }
        ),
        device=device,
        device_pool=DeviceKVPool(
            _GEOMETRY, num_pages=num_pages, torch_device=torch.device("cpu")
        ),
        device_allocator=allocator,
        clock=clock,
        create_executor=create_executor,
    )  # fmt: skip
    try:
        yield StepwiseCache(cache, allocator, device, executors)
        check(not cache.num_in_flight, f"{cache.num_in_flight} operations have not ended")
        violations = check_system(cache)
        check(not violations, f"the cache contradicts itself: {violations[:1]}")
    finally:
        closed = cache.close()
    check(closed, "the cache does not close")
