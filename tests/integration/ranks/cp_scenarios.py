"""What each of several context-parallel ranks does; runs in the processes of `rank_processes`."""

from __future__ import annotations

import hashlib
import random
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from cp_ranks import PAGE_SIZE, CpRank
from scripted_parts import InjectedCopyError, InjectedFactory

from hicache.errors import TransferError
from hicache.hiradix_cache import LoadStatus
from hicache.layout import HostLayout
from hicache.radix import RadixKey
from hicache.storage.page_store import PageStore
from hicache.testing.faulty_storage import FaultyStorage, Verb, seeded_faults
from hicache.testing.invariants import check_system
from hicache.transfer import TorchTransferEngine
from hicache.types import PageOutcome, PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.pools import CpPageAllocator
    from hicache.radix import RadixNode
    from hicache.ranks import TorchRankGroup
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig
    from hicache.transfer import TransferPlan
    from hicache.types import IntArray

MANY_PAGES = 10**6
STORE_FAULT_RATE, COPY_FAULT_RATE = 0.15, 0.05
MAX_KEY_PAGES = 5


class CpTrail(NamedTuple):
    """What one rank has gone through.

    Attributes:
        digests: of its whole tree, page ids among it, and of its free lists, after each step.
        answer: of the scenario; the same on all ranks.
        num_agreements: of its caches.
        num_stored: pages that this rank has written to the store.
        seen: names of what has happened here.
    """

    digests: list[str]
    answer: object
    num_agreements: int
    num_stored: int
    seen: list[str]


class CpDriver:
    """The same random calls on every rank, and on each its own faults.

    Copies of layers break, storage calls fail, bend their answers or come late: on one rank and not
    on the others. What a rank has of a prompt's pages is compared with stamps.
    """

    def __init__(self, ranks: TorchRankGroup, seed: int, *, store: str, num_pages: int) -> None:
        self.rng = random.Random(seed)
        self.faults_rng = random.Random(10 * seed + ranks.rank + 1)
        self.ranks = ranks
        self.num_pages = num_pages
        self.config: dict[str, object] = {
            "write_policy": self.rng.choice(list(WritePolicy)),
            "prefetch_policy": self.rng.choice(list(PrefetchPolicy)),
            "host": {
                "layout": self.rng.choice(list(HostLayout)),
                "ratio": 1.5,
                "huge_pages": False,
            },
            "storage": {
                "backend": "injected",
                "extra_config": {"path": store, "min_free_bytes": 0},
                "model_name": "model",
                "weights_revision": "1",
                "batch_pages": 2,
                "breaker_failures": 0,
                "retry_attempts": 0,
            },
        }
        self.breaks = True
        self.backends: list[HiCacheStorage] = []
        self.num_agreements = 0
        self.rank = self.open()
        self.inserted: list[RadixKey] = []
        self.locked: list[RadixNode] = []
        self.prefetching: list[str] = []
        self.num_requests = 0
        self.digests: list[str] = []
        self.seen: set[str] = set()

    def open(self) -> CpRank:
        factory = InjectedFactory(self.create_storage)
        return CpRank(self.ranks, num_pages=self.num_pages, config=self.config, factory=factory)

    def create_storage(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        rate = STORE_FAULT_RATE if self.breaks else 0.0
        faults = {verb: seeded_faults(self.faults_rng.getrandbits(32), rate=rate) for verb in Verb}
        self.backends.append(PageStore(config))
        return FaultyStorage(self.backends[-1], faults=faults, delay_seconds=0.002)

    # -- one step ----------------------------------------------------------------------------

    def step(self) -> None:
        name = self.rng.choice(
            ["insert", "load", "prefetch", "take"] * 5
            + ["evict", "evict_host", "check_prefetch", "unlock"] * 3
            + ["abort", "settle", "reset"]
        )
        getattr(self, name)()
        assert (violations := check_system(self.rank.cache)) == [], f"{name}: {violations}"
        self.digests.append(self.digest())

    def digest(self) -> str:
        """Return a digest of everything that must be equal on all ranks."""
        cache = self.rank.cache
        nodes = sorted(
            (
                (node.start, node.key, _ids(node.device_pages), _ids(node.host_pages)),
                (node.lock_ref, node.host_lock_ref, node.hit_count, node.persisted),
            )
            for node in cache.tree.nodes()
        )
        free = [one.free_pages().tolist() for one in self.allocators]
        return hashlib.sha256(repr((nodes, free, cache.num_in_flight)).encode()).hexdigest()[:16]

    @property
    def allocators(self) -> tuple[CpPageAllocator, CpPageAllocator]:
        return self.rank.allocator, self.rank.cache.controller.host_allocator  # type: ignore[return-value]

    def random_key(self) -> RadixKey:
        if self.inserted and self.rng.random() < 0.6:
            return self.rng.choice(self.inserted[-8:])
        pages = [self.rng.randrange(2) for _ in range(self.rng.randint(1, MAX_KEY_PAGES))]
        return RadixKey([page * PAGE_SIZE + at for page in pages for at in range(PAGE_SIZE)])

    def take(self) -> None:
        """Let the threads go on for a moment, on each rank another, and take what they bring."""
        time.sleep(self.faults_rng.choice([0.0, 0.0, 0.001, 0.003]))
        self.rank.cache.check_hicache_events()

    def insert(self) -> None:
        """Compute what the device does not have of a prompt, layer by layer, and insert it."""
        rank, key = self.rank, self.random_key()
        num_pages = len(key) // PAGE_SIZE
        present = rank.cache.match_prefix(key)
        rank.cache.inc_lock_ref(present.last_device_node)
        first = len(present.device_pages)
        own = self.alloc(num_pages - first)
        rank.cache.dec_lock_ref(present.last_device_node)
        if own is None:
            self.seen.add("no room")
            return
        self.num_requests += 1
        request_id = f"insert {self.num_requests}"
        if self.rng.random() < 0.6 and rank.cache.reserve_write(request_id, own):
            self.seen.add("by layer")
        for pool in rank.pools:
            for layer in range(pool.geometry.num_layers):
                rank.compute_layer(pool, layer, key, own, first_page=first)
                pool.end_layer(layer)
        pages = np.concatenate([present.device_pages, own])
        result = rank.cache.insert(key, pages, request_id=request_id, chunked=False)
        rank.allocator.free(pages[first : result.already_present_pages])
        # From where a load of the same pages is under way on, the tree takes none.
        rank.allocator.free(pages[result.end_page :])
        self.inserted.append(key)
        if len(own) and not rank.layout.owned_by_this_rank(own).any():
            self.seen.add("owns nothing")
        if self.rng.random() < 0.3:
            self.lock(result.node)

    def alloc(self, num_pages: int) -> IntArray | None:
        allocator = self.rank.allocator
        if allocator.num_available < num_pages:
            self.rank.cache.evict(num_pages - allocator.num_available)
        return allocator.alloc(num_pages)

    def lock(self, node: RadixNode) -> None:
        self.rank.cache.inc_lock_ref(node)
        self.locked.append(node)

    def unlock(self) -> None:
        while self.locked:
            self.rank.cache.dec_lock_ref(self.locked.pop())

    def load(self) -> None:
        rank, key = self.rank, self.random_key()
        if self.rng.random() < 0.7:
            rank.cache.evict(MANY_PAGES)
        found = rank.cache.match_prefix(key)
        load = rank.cache.init_load_back(found)
        if load.status is not LoadStatus.QUEUED:
            self.seen.add(f"load {load.status.value}")
            return
        rank.counter.set_consumer(rank.cache.ready_to_load_host_cache())
        try:
            for pool in rank.pools:
                for layer in range(pool.geometry.num_layers):
                    pool.get_key_buffer(layer)
            rank.verify(key, np.concatenate([found.device_pages, load.device_pages]))
            self.seen.add("load")
        except TransferError:
            self.seen.add("load broken")
        rank.counter.set_consumer(())

    def prefetch(self) -> None:
        if self.rng.random() < 0.7:
            self.rank.cache.evict(MANY_PAGES)
            self.rank.cache.evict_host(MANY_PAGES)
        self.num_requests += 1
        request_id = f"prefetch {self.num_requests}"
        if self.rank.cache.prefetch_from_storage(request_id, self.random_key()):
            self.prefetching.append(request_id)

    def check_prefetch(self) -> None:
        for request_id in list(self.prefetching):
            if self.rank.cache.check_prefetch_progress(request_id):
                self.prefetching.remove(request_id)
                if self.rank.cache.pop_prefetch_loaded_tokens(request_id):
                    self.seen.add("prefetch")

    def abort(self) -> None:
        if self.prefetching:
            self.rank.cache.release_aborted_request(self.prefetching.pop())

    def evict(self) -> None:
        self.rank.cache.evict(self.rng.choice([1, 2, MANY_PAGES]))

    def evict_host(self) -> None:
        self.rank.cache.evict_host(self.rng.choice([1, 2, MANY_PAGES]))

    def settle(self) -> None:
        self.rank.cache.ready_to_load_host_cache()
        self.rank.settle()

    def reset(self) -> None:
        self.unlock()
        self.rank.cache.reset()
        self.prefetching.clear()

    # -- the end -----------------------------------------------------------------------------

    def end(self) -> None:
        """Let everything end, without faults from now on; every page can be evicted then."""
        self.breaks = False
        self.unlock()
        self.settle()

    def forget_device(self) -> None:
        """Evict everything, and spoil the pools when what is written then has been copied."""
        while self.rank.cache.evict(MANY_PAGES).num_pending:
            self.rank.settle()
        self.rank.forget_device()

    def verify_host(self) -> int:
        """Load what the host has of each prompt, compare it, and return how many pages came."""
        self.forget_device()
        num_loaded = 0
        for key in dict.fromkeys(self.inserted):
            pages = self.rank.load(key)
            if pages is not None:
                self.rank.verify(key, pages)
                num_loaded += len(pages)
            self.rank.counter.set_consumer(())
            self.rank.settle()
            self.forget_device()
        return num_loaded

    def restart(self) -> None:
        """Close the cache and open another one on the same store."""
        self.close()
        self.rank = self.open()

    def verify_store(self) -> int:
        """Prefetch each prompt from the store, compare it, and return how many tokens came."""
        cache, num_tokens = self.rank.cache, 0
        for number, key in enumerate(dict.fromkeys(self.inserted)):
            request_id = f"again {number}"
            cache.prefetch_from_storage(request_id, key)
            self.rank.settle()
            assert cache.check_prefetch_progress(request_id)
            num_tokens += cache.pop_prefetch_loaded_tokens(request_id)
            self.verify_host()
            cache.evict_host(MANY_PAGES)
            assert list(cache.tree.nodes()) == []
            assert all(one.num_available == one.num_pages for one in self.allocators)
        return num_tokens

    def close(self) -> None:
        assert check_system(self.rank.cache) == []
        self.num_agreements += self.rank.cache.controller.meeting.num_agreements
        assert self.rank.cache.close()

    def trail(self, answer: object) -> CpTrail:
        num_stored = sum(
            backend.stats().set_outcomes.get(PageOutcome.OK, 0) for backend in self.backends
        )
        return CpTrail(self.digests, answer, self.num_agreements, num_stored, sorted(self.seen))


def random_calls(
    ranks: TorchRankGroup, seed: int, steps: int, store: str, num_pages: int = 6
) -> CpTrail:
    """Random calls with faults, an end without, and a restart on what was stored."""
    driver = CpDriver(ranks, seed, store=store, num_pages=num_pages)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_layer", "load_layer"):
            patch.setattr(TorchTransferEngine, name, _breaking(driver, name))
        for _ in range(steps):
            driver.step()
        driver.end()
    num_loaded = driver.verify_host()
    driver.restart()
    num_tokens = driver.verify_store()
    driver.close()
    return driver.trail((num_loaded, num_tokens))


def store_alike(ranks: TorchRankGroup, store: str, num_prompts: int, num_pages: int) -> CpTrail:
    """Store prompts of a page each without faults, restart and restore them."""
    driver = CpDriver(ranks, 0, store=store, num_pages=num_pages)
    driver.config["write_policy"] = WritePolicy.WRITE_THROUGH
    driver.config["prefetch_policy"] = PrefetchPolicy.WAIT_COMPLETE
    driver.breaks = False
    driver.restart()
    for number in range(num_prompts):
        key = RadixKey(range(100 * number, 100 * number + PAGE_SIZE))
        pages = driver.rank.insert(key, request_id=str(number))
        driver.inserted.append(key)
        driver.digests.append(driver.digest())
        driver.seen.add("owned" if driver.rank.layout.owned_by_this_rank(pages).any() else "not")
    driver.settle()
    driver.restart()
    num_tokens = driver.verify_store()
    driver.close()
    return driver.trail(num_tokens)


def _ids(pages: IntArray | None) -> tuple[int, ...]:
    return () if pages is None else tuple(pages.tolist())


def _breaking(
    driver: CpDriver, name: str
) -> Callable[[TorchTransferEngine, TransferPlan, int], None]:
    """Return the method of that name, which now and then raises, as this rank's dice say."""
    dice = random.Random(driver.faults_rng.getrandbits(32))
    copy = getattr(TorchTransferEngine, name)

    def method(engine: TorchTransferEngine, plan: TransferPlan, layer: int) -> None:
        if driver.breaks and dice.random() < COPY_FAULT_RATE:
            raise InjectedCopyError(f"a {name} was broken")
        copy(engine, plan, layer)

    return method
