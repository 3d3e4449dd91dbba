"""Drives a whole rank with random calls over a store that fails at random."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from builders import GEOMETRY, PAGE, POISON, Rig, config_for, tokens
from scripted_parts import Barrier, injected

from hicache.config import HostPoolConfig, PrefetchConfig
from hicache.errors import TransferError
from hicache.hiradix_cache import LoadStatus
from hicache.layout import HostLayout
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import FaultyStorage, Verb, seeded_faults
from hicache.testing.stamped_kv import fill_pages
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from hicache.radix import RadixNode
    from hicache.ranks import RankGroup
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig

DEVICE_PAGES, HOST_PAGES = 10, 12
FAULT_RATE = 0.2


class SystemDriver:
    """Random calls over a tiny key space, so that paths collide all the time.

    The bytes of every page that a match, a load or a settled tree gives are compared with stamps.

    Several ranks do the same to their caches, each with faults of its own.

    Attributes:
        seen: names of what has happened, for a test of the driver itself.
    """

    def __init__(
        self,
        seed: int,
        *,
        ranks: RankGroup | None = None,
        faults_seed: int | None = None,
        device_pages: int = DEVICE_PAGES,
        host_pages: int = HOST_PAGES,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.faults_rng = rng if faults_seed is None else random.Random(faults_seed)
        self.store = MemoryPages()
        first_seed = 1000 * (seed if faults_seed is None else faults_seed)
        self.seeds = iter(range(first_seed, first_seed + 1000))
        self.storage = injected(batch_pages=2, num_workers=2, max_inflight_persist_operations=4)
        config = config_for(
            write_policy=rng.choice(list(WritePolicy)),
            prefetch_policy=rng.choice(list(PrefetchPolicy)),
            num_load_slots=rng.choice([1, 2, 5]),
            host=HostPoolConfig(
                layout=rng.choice(list(HostLayout)),
                size_bytes=host_pages * GEOMETRY.page_bytes,
                huge_pages=False,
            ),
            prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=5),
            storage=self.storage,
        )
        self.barriers = {verb: Barrier() for verb in Verb}
        self.rig = Rig(
            config, device_pages=device_pages, create_storage=self.create_storage, ranks=ranks
        )
        self.copy_barriers = [Barrier(), Barrier()]
        self.rig.engine.write_gates[1], self.rig.engine.load_gates[0] = self.copy_barriers
        self.rig.gates += [*self.barriers.values(), *self.copy_barriers]
        self.cache = self.rig.cache
        self.locked: list[RadixNode] = []
        self.inserted: list[RadixKey] = []
        self.prefetching: dict[str, RadixKey] = {}
        self.num_requests = 0
        self.seen: set[str] = set()

    def create_storage(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        faults = {verb: seeded_faults(next(self.seeds), rate=FAULT_RATE) for verb in Verb}
        inner = MemoryStorage(config, store=self.store)
        return FaultyStorage(inner, faults=faults, gates=self.barriers, delay_seconds=0.001)

    def step(self) -> None:
        name = self.rng.choice(
            ["insert", "match", "prefetch", "load", "work"] * 6
            + ["unlock", "evict", "evict_host", "check_prefetch"] * 4
            + ["abort", "let_go"] * 3
            + ["break_copy", "hold", "hang", "settle", "reset"]
            + ["attach_again"] * (self.rng.random() < 0.3)
        )
        getattr(self, name)()
        self.rig.check()

    def work(self) -> None:
        """Let the threads go on for a moment and take what they bring."""
        time.sleep(self.rng.choice([0.0, 0.001]))
        self.rig.step()

    def random_key(self) -> RadixKey:
        if self.inserted and self.rng.random() < 0.6:
            return self.rng.choice(self.inserted[-8:])
        pages = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 6))]
        tail = [9] * self.rng.randrange(PAGE)
        return RadixKey([*tokens(*pages), *tail], cache_salt=self.rng.choice([None, None, "a"]))

    def insert(self) -> None:
        key, rig = self.random_key(), self.rig
        num_pages = len(key) // PAGE
        if rig.device_pages.num_available < num_pages:
            self.cache.evict(num_pages - rig.device_pages.num_available)
        if rig.device_pages.num_available < num_pages:
            self.seen.add("no device memory")
            return
        request_id = f"insert {self.num_requests // 3}"
        self.num_requests += 1
        self.inserted.append(key)
        chunked = self.rng.random() < 0.3
        reuse = self.rng.random() < 0.5
        result = rig.insert(key, request_id=request_id, chunked=chunked, reuse=reuse)
        if self.rng.random() < 0.3:
            self.lock(result.node)

    def match(self) -> None:
        self.rig.hit(self.random_key())
        if self.rng.random() < 0.3:
            self.lock(self.rig.match(self.random_key()).last_device_node)

    def lock(self, node: RadixNode) -> None:
        self.cache.inc_lock_ref(node)
        self.locked.append(node)

    def unlock(self) -> None:
        """Finish a request, or as many as there are."""
        for _ in range(self.rng.choice([1, 1, len(self.locked)])):
            if self.locked:
                self.cache.dec_lock_ref(self.locked.pop(self.rng.randrange(len(self.locked))))

    def evict(self) -> None:
        self.cache.evict(self.rng.choice([1, 2, DEVICE_PAGES]))

    def evict_host(self) -> None:
        self.cache.evict_host(self.rng.choice([1, 2, HOST_PAGES]))

    def load(self) -> None:
        """Load, and either wait for the layers as a model does or leave it to its own."""
        key = self.random_key()
        if self.rng.random() < 0.5:
            self.cache.evict(DEVICE_PAGES)
        first_page = self.rig.match(key).match.num_device_pages
        load = self.rig.begin_load(key)
        self.seen.add(f"load {load.status.value}")
        if load.status is LoadStatus.QUEUED and self.rng.random() < 0.5:
            self.lock(load.node)
        producer = self.cache.ready_to_load_host_cache()
        if load.status is LoadStatus.QUEUED and producer >= 0 and self.rng.random() < 0.5:
            self.copy_barriers[1].open()
            try:
                self.rig.await_load(key, load, first_page, producer)
            except TransferError:
                self.rig.counter.set_consumer(())
                self.seen.add("load broken")

    def prefetch(self) -> None:
        if self.rng.random() < 0.5:
            self.cache.evict(DEVICE_PAGES)
            self.cache.evict_host(HOST_PAGES)
        key, request_id = self.random_key(), f"prefetch {self.num_requests}"
        self.num_requests += 1
        if self.rig.begin_prefetch(key, request_id=request_id):
            self.prefetching[request_id] = key

    def check_prefetch(self) -> None:
        for request_id, key in list(self.prefetching.items()):
            if self.cache.check_prefetch_progress(request_id):
                del self.prefetching[request_id]
                brought = self.cache.pop_prefetch_loaded_tokens(request_id)
                assert 0 <= brought <= len(key)
                self.seen.add(f"prefetch {'hit' if brought else 'miss'}")

    def abort(self) -> None:
        if self.prefetching:
            request_id = self.rng.choice(list(self.prefetching))
            del self.prefetching[request_id]
            self.cache.release_aborted_request(request_id)
            self.seen.add("abort")

    def break_copy(self) -> None:
        engine = self.rig.engine
        broken = self.faults_rng.choice([engine.broken_writes, engine.broken_loads])
        broken.add(self.faults_rng.randrange(GEOMETRY.num_layers))

    def hold(self) -> None:
        """Let the calls of a kind, or the copies in a direction, not come back for now."""
        self.faults_rng.choice([*self.barriers.values(), *self.copy_barriers]).shut()

    def hang(self) -> None:
        """Let so much time pass that every storage call under way is overdue."""
        self.rig.clock.advance(1000.0)

    def let_go(self) -> None:
        for barrier in (*self.barriers.values(), *self.copy_barriers):
            barrier.open()

    def reset(self) -> None:
        while self.locked:
            self.unlock()
        self.seen.add("reset in flight" if self.cache.num_in_flight else "reset")
        self.cache.reset()
        self.prefetching.clear()

    def attach_again(self) -> None:
        self.settle()
        self.cache.detach_storage_backend()
        self.cache.attach_storage_backend(self.storage)
        self.seen.add("attach again")

    def settle(self) -> None:
        """Let everything end; then free pages are nobody's, and every other holds its stamp."""
        self.let_go()
        self.cache.ready_to_load_host_cache()
        self.rig.settle()
        self.rig.check_content()
        fill_pages(self.rig.pool, self.rig.device_pages.free_pages(), POISON)
        fill_pages(self.rig.host_pool, self.rig.host_pages.free_pages(), POISON)

    def drain(self) -> None:
        """End everything; afterwards every page can be evicted."""
        while self.locked:
            self.unlock()
        self.settle()
        self.rig.evict_device()
        self.cache.evict_host(HOST_PAGES)
        assert list(self.cache.tree.nodes()) == []
        for pages in (self.rig.device_pages, self.rig.host_pages):
            assert pages.num_available == pages.num_pages
