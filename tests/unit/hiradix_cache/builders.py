"""One rank with tiny pools and real CPU streams, in which a test can hold or break any movement."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from scripted_parts import InjectedFactory, ScriptedEngine, injected, memory_storage

from hicache.clock import ManualClock
from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig
from hicache.controller import HiCacheController, LocalMover, PoolPair, StorageTier
from hicache.device.cpu import CpuDevice
from hicache.errors import ClosedError
from hicache.hiradix_cache import HiRadixCache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator, create_host_pool
from hicache.pools.agreed_allocator import AgreedAllocator
from hicache.ranks import SingleRank
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Gate
from hicache.testing.invariants import check_system
from hicache.testing.stamped_kv import fill_pages, read_pages, stamp_of, write_stamps
from hicache.transfer import LayerDoneCounter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from hicache.hiradix_cache import LoadBack, PrefixMatch
    from hicache.pools import Allocator
    from hicache.radix import InsertResult, RadixKey
    from hicache.ranks import RankGroup
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig
    from hicache.types import IntArray

PAGE = 4
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE)
GUARD_SECONDS = 10.0
"""How long a test waits for another thread before it fails."""
POISON = -7.0
_RigT = TypeVar("_RigT", bound="Rig")


def store_with(*keys: RadixKey, host_pages: int = 16) -> MemoryPages:
    """Return a store that holds the full pages of `keys`, stamped."""
    store = MemoryPages()
    config = config_for(host_pages, storage=injected())
    with Rig(config, device_pages=16, create_storage=memory_storage(store)) as rig:
        for key in keys:
            rig.insert(key)
            rig.settle()
    return store


def config_for(host_pages: int = 16, **options: object) -> HiCacheConfig:
    """Prefetch and load thresholds of one page; `options` as in `HiCacheConfig`."""
    defaults: dict[str, object] = {
        "page_size": PAGE,
        "load_back_threshold_tokens": PAGE,
        "host": HostPoolConfig(size_bytes=host_pages * GEOMETRY.page_bytes, huge_pages=False),
        "prefetch": PrefetchConfig(threshold_tokens=PAGE),
    }
    return HiCacheConfig.from_mapping(defaults | options)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened for too long"
        time.sleep(0.0005)


def hicache_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache")]


def tokens(*pages: int) -> list[int]:
    """The tokens of whole pages that differ in every token when their numbers do."""
    return [page * PAGE + offset for page in pages for offset in range(PAGE)]


def _free_list(allocator: Allocator) -> PageAllocator | AgreedAllocator:
    """Return `allocator`, which a test can look into."""
    assert isinstance(allocator, PageAllocator | AgreedAllocator)
    return allocator


class Rig:
    """A cache with pools of its own; leaving it checks every invariant and closes.

    Attributes:
        clock: for deadlines of storage; moves only when the test says so.
    """

    def __init__(
        self,
        config: HiCacheConfig | None = None,
        *,
        device_pages: int = 8,
        create_storage: Callable[[HiCacheStorageConfig], HiCacheStorage] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self.config = config or config_for()
        assert self.config.host.size_bytes is not None
        host_pages = self.config.host.size_bytes // GEOMETRY.page_bytes
        self.clock = ManualClock()
        self.gates: list[Gate] = []
        device = CpuDevice(wait_timeout_seconds=GUARD_SECONDS)
        self.pool = DeviceKVPool(GEOMETRY, num_pages=device_pages, torch_device=torch.device("cpu"))
        self.host_pool = create_host_pool(
            GEOMETRY,
            num_pages=host_pages,
            layout=self.config.host.layout,
            pinned=False,
            huge_pages=False,
        )
        device_allocator, host_allocator = PageAllocator(device_pages), PageAllocator(host_pages)
        self.engine = ScriptedEngine(self.pool, self.host_pool)
        self.counter = LayerDoneCounter(
            device, num_layers=GEOMETRY.num_layers, num_slots=self.config.num_load_slots
        )
        self.pool.register_layer_transfer_counter(self.counter)
        self.tier = StorageTier(
            host_pools=[self.host_pool],
            factory=InjectedFactory(create_storage or memory_storage(MemoryPages())),
            clock=self.clock,
        )
        self.mover = LocalMover(
            device=device,
            pairs=[PoolPair("kv", self.engine, self.host_pool)],
            counter=self.counter,
            storage=self.tier,
            clock=self.clock,
        )
        controller = HiCacheController(
            self.config,
            device_allocator=device_allocator,
            host_allocator=host_allocator,
            mover=self.mover,
            ranks=ranks or SingleRank(),
        )
        self.cache = HiRadixCache(controller, clock=self.clock)
        self.device_pages = _free_list(controller.device_allocator)
        self.host_pages = _free_list(controller.host_allocator)
        self.request_pages: list[IntArray] = []
        self._empty_keys: dict[bytes, RadixKey] = {}
        fill_pages(self.pool, self.device_pages.free_pages(), POISON)
        fill_pages(self.host_pool, self.host_pages.free_pages(), POISON)

    def __enter__(self: _RigT) -> _RigT:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, and when the test went well, check the end; an error is not hidden by another."""
        for gate in self.gates:
            gate.open()
        if error is None and not self.closed:
            self.settle()
            self.check()
            self.check_content()
        closed = self.cache.close(GUARD_SECONDS)
        if error is None:
            assert closed
            assert self.cache.num_in_flight == 0
            self.check()
            until(lambda: not hicache_threads())

    @property
    def closed(self) -> bool:
        """Whether the host memory is gone."""
        try:
            return not self.host_pool.regions()
        except ClosedError:
            return True

    # -- what a scheduler does ---------------------------------------------------------------

    def insert(
        self,
        key: RadixKey,
        *,
        request_id: str = "r",
        chunked: bool = False,
        reuse: bool = True,
        priority: int = 0,
    ) -> InsertResult:
        """Insert stamped pages as a request would; evicts when the device is full.

        With `reuse` the request computes only what the device does not have, else everything.
        """
        self.remember(key)
        found = self.match(key if reuse else key.prefix(0))
        self.cache.inc_lock_ref(found.last_device_node)
        num_found = found.match.num_device_pages
        own = self.alloc_device(len(key) // PAGE - num_found)
        self.cache.dec_lock_ref(found.last_device_node)
        write_stamps(self.pool, key, own, first_page=num_found)
        pages = np.concatenate([found.device_pages, own])
        result = self.cache.insert(
            key, pages, request_id=request_id, chunked=chunked, priority=priority
        )
        self.device_pages.free(pages[num_found : result.already_present_pages])
        self.device_pages.free(pages[result.end_page :])
        return result

    def remember(self, key: RadixKey) -> None:
        """Let `check_content` know the names of a key that is inserted by other means."""
        self._empty_keys[key.namespace] = key.prefix(0)

    def alloc_device(self, num_pages: int) -> IntArray:
        """Allocate device pages; evicts, and steps until what is evicted is free."""

        def has_room() -> bool:
            missing = num_pages - self.device_pages.num_available
            if missing > 0:
                missing -= self.cache.evict(missing).num_freed
            return missing <= 0

        self.step_until(has_room)
        pages = self.device_pages.alloc(num_pages)
        assert pages is not None
        return pages

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.cache.check_hicache_events()
            self.check()

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Step until `condition`; check after every step."""
        end = time.monotonic() + GUARD_SECONDS
        while not condition():
            self.step()
            assert time.monotonic() < end, f"{self.cache.num_in_flight} operations in flight"
            time.sleep(0.0002)

    def settle(self) -> None:
        """Step until nothing is in flight."""
        self.step_until(lambda: not self.cache.num_in_flight)

    def evict_device(self, num_pages: int | None = None) -> None:
        """Evict from L1 until that many pages, by default all, have become free."""
        wanted = self.device_pages.num_pages if num_pages is None else num_pages
        while (num_available := self.device_pages.num_available) < wanted:
            self.cache.evict(wanted - num_available)
            self.settle()
            assert self.device_pages.num_available > num_available, "nothing more can be evicted"
        fill_pages(self.pool, self.device_pages.free_pages(), POISON)

    def drop_memory(self) -> None:
        """Evict everything from L1 and L2."""
        self.settle()
        self.evict_device()
        self.cache.evict_host(self.host_pages.num_pages)
        fill_pages(self.host_pool, self.host_pages.free_pages(), POISON)
        assert list(self.cache.tree.nodes()) == []

    def prefetch(self, key: RadixKey, *, request_id: str = "p") -> int:
        """Prefetch to the end; return the tokens that it brought."""
        if not self.begin_prefetch(key, request_id=request_id):
            return 0
        self.settle()
        assert self.cache.check_prefetch_progress(request_id)
        return self.cache.pop_prefetch_loaded_tokens(request_id)

    def begin_prefetch(self, key: RadixKey, *, request_id: str = "p") -> bool:
        self.remember(key)
        return self.cache.prefetch_from_storage(request_id, key)

    def begin_load(self, key: RadixKey, *, mem_quota: int | None = None) -> LoadBack:
        """Match and queue the load of what only the host has."""
        return self.cache.init_load_back(self.match(key), mem_quota=mem_quota)

    def load(self, key: RadixKey) -> LoadBack:
        """Load the host part of `key`, wait for it by layer as a model does, and check it."""
        first_page = self.match(key).match.num_device_pages
        load = self.begin_load(key)
        self.await_load(key, load, first_page, self.cache.ready_to_load_host_cache())
        self.settle()
        return load

    def await_load(self, key: RadixKey, load: LoadBack, first_page: int, producer: int) -> None:
        """Read the pages of a started load layer by layer, as soon as each has arrived."""
        stamp = stamp_of(key, GEOMETRY, first_page=first_page)
        pages = torch.from_numpy(load.device_pages)
        self.counter.set_consumer(producer)
        for layer in range(GEOMETRY.num_layers):
            both = self.pool.get_kv_buffer(layer)
            for kv, rows in enumerate(both):
                found = rows.view(-1, *stamp.shape[3:])[pages]
                assert torch.equal(found, stamp[kv, layer, : len(pages)]), f"layer {layer} is wrong"
        self.counter.set_consumer(())

    def match(self, key: RadixKey) -> PrefixMatch:
        return self.cache.match_prefix(key)

    # -- what must be true -------------------------------------------------------------------

    def hit(self, key: RadixKey) -> tuple[int, int]:
        """Pages of `key` on the device and then on the host alone, after a look at their bytes."""
        found = self.match(key).match
        device, host = found.num_device_pages, found.num_host_pages
        nodes = self.cache.tree.path(found.last_host_node, device)
        chunks = [node.host_pages for node in nodes if node.host_pages is not None]
        pages = np.concatenate([np.empty(0, dtype=np.int64), *chunks])
        stamp = stamp_of(key, GEOMETRY)[:, :, : device + host]
        assert torch.equal(read_pages(self.pool, found.device_pages), stamp[:, :, :device])
        assert torch.equal(read_pages(self.host_pool, pages[:host]), stamp[:, :, device:])
        return device, host

    def check(self) -> None:
        """Assert every invariant that holds at any moment."""
        violations = check_system(self.cache, request_device_pages=self.request_pages)
        assert violations == [], "\n".join(violations)

    def check_content(self) -> None:
        """Assert that every page of the tree, in either memory, holds its own stamp."""
        tree = self.cache.tree
        for node in tree.nodes():
            data = b"".join(member.key for member in tree.path(node))
            key = self._empty_keys[node.namespace].extend(np.frombuffer(data, dtype=np.int32))
            stamp = stamp_of(key, GEOMETRY, first_page=node.start)
            for pool, pages in ((self.pool, node.device_pages), (self.host_pool, node.host_pages)):
                if pages is not None:
                    assert torch.equal(read_pages(pool, pages), stamp), f"{node} has other bytes"

    def gate(self) -> Gate:
        """A gate that opens at the latest when the rig is left."""
        self.gates.append(Gate())
        return self.gates[-1]
