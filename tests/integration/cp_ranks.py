"""Context-parallel ranks, each a whole cache over its share of one device pool, in threads here."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from hicache.config import HiCacheConfig, RankPlacement
from hicache.device import create_device
from hicache.hiradix_cache import LoadStatus, create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import CpPageAllocator, CpSharedKVLayout, DeviceKVPool
from hicache.testing.invariants import check_system
from hicache.testing.stamped_kv import fill_pages, read_pages, stamp_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache.radix import RadixKey
    from hicache.ranks import TorchRankGroup
    from hicache.storage import StorageBackendFactory
    from hicache.types import IntArray

PAGE_SIZE = 4
GUARD_SECONDS = 30.0

_T = TypeVar("_T")


class Meeting:
    """Where ranks in threads meet once per step to take the minimum of their vectors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=GUARD_SECONDS)
        self.vectors: list[Sequence[int]] = [()] * size


class RankInThread:
    """See `RankGroup`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = len(meeting.vectors)

    def agree(self, values: Sequence[int]) -> list[int]:
        """See `RankGroup.agree`."""
        self.meeting.vectors[self.rank] = list(values)
        self.meeting.barrier.wait()
        agreed = [min(column) for column in zip(*self.meeting.vectors, strict=True)]
        self.meeting.barrier.wait()
        return agreed


class CpRank:
    """One rank: a pool of its own pages and a draft pool beside it, and the whole tree."""

    def __init__(
        self,
        group: RankInThread | TorchRankGroup,
        *,
        num_pages: int,
        config: Mapping[str, object],
        factory: StorageBackendFactory | None = None,
    ) -> None:
        self.layout = CpSharedKVLayout(
            cp_rank=group.rank,
            cp_size=group.size,
            num_physical_pages=num_pages,
            page_size=PAGE_SIZE,
        )
        self.allocator = CpPageAllocator(self.layout)
        self.pools = [
            DeviceKVPool(
                KVGeometry(
                    num_layers=layers,
                    num_kv_heads=1,
                    head_dim=8,
                    dtype="float32",
                    page_size=PAGE_SIZE,
                ),
                num_pages=num_pages,
                torch_device=torch.device("cpu"),
            )
            for layers in (3, 1)
        ]
        defaults = {
            "page_size": PAGE_SIZE,
            "load_back_threshold_tokens": PAGE_SIZE,
            "prefetch_policy": "wait_complete",
            "host": {"ratio": 2.0, "huge_pages": False},
            "prefetch": {"threshold_tokens": PAGE_SIZE},
        }
        self.cache, self.counter = create_hiradix_cache(
            HiCacheConfig.from_mapping({**defaults, **config}),
            device=create_device("cpu"),
            device_pool=self.pools[0],
            side_pools=self.pools[1:],
            device_allocator=self.allocator,
            ranks=group,
            placement=RankPlacement(cp_rank=group.rank, cp_size=group.size),
            cp_layout=self.layout,
            factory=factory,
        )

    def compute(self, key: RadixKey, pages: IntArray, *, first_page: int = 0) -> None:
        """Store what a model computes for those of the pages of `key` that this rank has."""
        for pool in self.pools:
            for layer in range(pool.geometry.num_layers):
                self.compute_layer(pool, layer, key, pages, first_page=first_page)

    def compute_layer(
        self,
        pool: DeviceKVPool,
        layer: int,
        key: RadixKey,
        pages: IntArray,
        *,
        first_page: int = 0,
    ) -> None:
        """Store one layer of it."""
        owned = self.layout.owned_by_this_rank(pages)
        index = torch.from_numpy(self.layout.physical_pages(pages[owned]))
        stamp = stamp_of(key, pool.geometry, first_page=first_page)
        for part, rows in zip(pool.layer_parts(layer), stamp[:, layer], strict=True):
            part[index] = rows[: len(pages)][torch.from_numpy(owned)]

    def verify(self, key: RadixKey, pages: IntArray) -> None:
        """Raise unless the first `len(pages)` pages of `key` are in those that this rank has."""
        owned = self.layout.owned_by_this_rank(pages)
        physical = self.layout.physical_pages(pages[owned])
        for pool in self.pools:
            expected = stamp_of(key, pool.geometry)[:, :, : len(pages)][
                :, :, torch.from_numpy(owned)
            ]
            assert torch.equal(read_pages(pool, physical), expected)

    def insert(self, key: RadixKey, request_id: str = "one") -> IntArray:
        """Compute a whole prompt into new pages and insert it; return the pages."""
        pages = self.allocator.alloc(len(key) // PAGE_SIZE)
        assert pages is not None
        self.compute(key, pages)
        self.cache.insert(key, pages, request_id=request_id, chunked=False)
        return pages

    def settle(self) -> None:
        """Step until nothing is in flight, as many times on every rank."""
        end = time.monotonic() + GUARD_SECONDS
        while self.cache.num_in_flight:
            self.cache.check_hicache_events()
            assert time.monotonic() < end
            time.sleep(0.0005)

    def forget_device(self) -> int:
        """Evict everything from L1 and spoil the pools; return how many pages were evicted."""
        num_freed = self.cache.evict(self.layout.num_pages).num_freed
        for pool in self.pools:
            fill_pages(pool, np.arange(pool.num_pages), -1.0)
        return num_freed

    def load(self, key: RadixKey) -> IntArray | None:
        """Load what the host has, wait for every layer, and return the pages; None for no room."""
        load = self.cache.init_load_back(self.cache.match_prefix(key))
        if load.status is not LoadStatus.QUEUED:
            return None
        self.counter.set_consumer(self.cache.ready_to_load_host_cache())
        for pool in self.pools:
            for layer in range(pool.geometry.num_layers):
                pool.get_key_buffer(layer)
        return load.device_pages

    def owners(self, pages: IntArray) -> list[int]:
        """Return the owner of each page."""
        owners: list[int] = self.layout.owner_for_logical_pages(pages).tolist()
        return owners


def run_ranks(
    size: int,
    script: Callable[[CpRank], _T],
    *,
    num_pages: int = 8,
    **config: object,
) -> list[_T]:
    """Run `script` on every rank at once; return the answers, after closing every cache."""
    meeting = Meeting(size)

    def run(rank: int) -> _T:
        try:
            one = CpRank(RankInThread(meeting, rank), num_pages=num_pages, config=config)
            answer = script(one)
            one.settle()
            assert check_system(one.cache) == []
            assert one.cache.close()
        except BaseException:
            meeting.barrier.abort()
            raise
        return answer

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
        errors = [future.exception(GUARD_SECONDS * 2) for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
