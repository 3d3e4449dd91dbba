"""Acceptance cases: who gets which page, and what it costs."""

from __future__ import annotations

import math
import random
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from builders import GEOMETRY, PAGE, Rig, config_for, store_with, tokens, until
from scripted_parts import injected, memory_storage

from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig
from hicache.device import create_device
from hicache.device.host_memory import available_host_memory_bytes
from hicache.errors import CapacityError, ConfigError
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator, host_pool_pages
from hicache.radix import CopyKind, RadixKey, RadixTree
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import Gate
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from hicache.storage import HiCacheStorageConfig, Page
    from hicache.types import PageHash, PageOutcome

WAIT = PrefetchPolicy.WAIT_COMPLETE


def consume(rig: Rig, key: RadixKey, name: str) -> int:
    """Admit a request when its prefetch has ended; return the pages that it found on the host."""
    rig.step_until(lambda: rig.cache.check_prefetch_progress(name))
    rig.cache.pop_prefetch_loaded_tokens(name)
    _, num_found = rig.hit(key)
    if num_found:
        load = rig.begin_load(key)
        rig.await_load(key, load, 0, rig.cache.ready_to_load_host_cache())
        rig.step_until(lambda: rig.hit(key)[0] == num_found)
        rig.cache.evict(8)
    return num_found


@pytest.mark.parametrize("newest_first", [False, True])
def test_requests_that_wait_do_not_push_each_others_pages_out(newest_first: bool) -> None:
    """C088: 10 of them need 4 of 8 host pages each; they are admitted one at a time.

    One that is asked about before its turn is served all the same, at the cost of others.
    """
    keys = {
        str(number): RadixKey(tokens(*range(4 * number, 4 * number + 4))) for number in range(10)
    }
    create = memory_storage(store_with(*keys.values(), host_pages=40))
    config = config_for(
        8,
        storage=injected(),
        prefetch_policy=WAIT,
        prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=8),
    )
    with Rig(config, create_storage=create) as rig:
        for name, key in keys.items():
            rig.begin_prefetch(key, request_id=name)
        read = rig.cache.controller.stats[CopyKind.PREFETCH].outcomes
        rig.step_until(lambda: rig.cache.tree.host_size == 8 * PAGE)
        rig.step(10)
        assert read["ok"] == 8
        num_used = 0
        for name in sorted(keys, reverse=newest_first):
            num_used += consume(rig, keys[name], name)
        assert num_used == 40 if not newest_first else num_used >= 20
        assert read["ok"] == 40


def test_free_pages_are_usable_however_scattered_they_are() -> None:
    """C090: mixed sizes close to capacity for a long time; a failure means too few pages."""
    seed = 90
    rng = random.Random(seed)
    allocator = PageAllocator(1000)
    held: list[Any] = []
    num_failures = 0
    for _ in range(20_000):
        count = rng.choice([1, 2, 3, 7, 16, 50])
        available = allocator.num_available
        pages = allocator.alloc(count)
        assert (pages is not None) == (count <= available), f"{seed=}"
        if pages is None:
            num_failures += 1
            for _ in range(rng.randrange(1, 4)):
                allocator.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(pages)
    owned = np.concatenate(held)
    assert len(np.unique(owned)) == len(owned) == 1000 - allocator.num_available
    assert num_failures > 1000


@pytest.mark.parametrize("pinned", ["copies of device pages", "sole copies"])
def test_room_comes_from_the_other_queue_when_one_is_pinned(pinned: str) -> None:
    """C091: the host evicts copies of device pages first, then sole copies; a batch is whole."""
    sole, twice, new = RadixKey(tokens(1, 2)), RadixKey(tokens(11, 12)), RadixKey(tokens(21, 22))
    with Rig(config_for(4)) as rig:
        rig.insert(sole)
        rig.settle()
        rig.evict_device()
        rig.insert(twice)
        rig.settle()
        held = rig.match(sole if pinned == "sole copies" else twice).last_host_node
        rig.cache.tree.residency.host_lock(held)
        rig.insert(RadixKey(tokens(31, 32, 33)))  # does not fit beside what is pinned
        rig.settle()
        assert rig.cache.counters["unwritten_pages"] == 3
        rig.insert(new)
        rig.settle()
        rig.cache.tree.residency.host_unlock(held)
        rig.evict_device()
        expected = [(0, 2), (0, 0)] if pinned == "sole copies" else [(0, 0), (0, 2)]
        assert [rig.hit(sole), rig.hit(twice)] == expected
        assert rig.hit(new) == (0, 2)


# -- configuration and start ---------------------------------------------------------------


def build(host: HostPoolConfig, pool: DeviceKVPool) -> Any:
    config = HiCacheConfig(page_size=PAGE, host=host)
    return create_hiradix_cache(
        config,
        device=create_device("cpu"),
        device_pool=pool,
        device_allocator=PageAllocator(pool.num_pages),
    )


def make_pool(num_pages: int = 8) -> DeviceKVPool:
    return DeviceKVPool(GEOMETRY, num_pages=num_pages, torch_device=torch.device("cpu"))


def test_a_host_pool_beyond_the_machine_is_refused_with_both_numbers_and_nothing_is_left() -> None:
    """C100: ten times the machine; then the same start with less works."""
    pool = make_pool()
    wanted = 10 * available_host_memory_bytes()
    with pytest.raises(CapacityError, match=r"\d+ bytes of host memory wanted, \d+ available"):
        build(HostPoolConfig(size_bytes=wanted), pool)
    pool.get_key_buffer(0)  # waits for no counter of a cache that is not there
    cache, _ = build(HostPoolConfig(size_bytes=1 << 20, huge_pages=False), pool)
    assert cache.close()


def test_two_instances_share_what_the_process_may_take() -> None:
    """C100: the limit lets one in; the second is refused and harms nobody."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    size = 96 << 20
    host = HostPoolConfig(size_bytes=size, huge_pages=False)
    pools = make_pool(), make_pool()
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * size // 2 + (32 << 20), old[1]))
    try:
        first, _ = build(host, pools[0])
        with pytest.raises(CapacityError):
            build(host, pools[1])
        assert first.close()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def test_sizes_are_bytes_and_the_number_of_pages_can_be_read() -> None:
    """C101: a size given twice is refused; 1 GB and 1 GiB differ by what they differ."""
    with pytest.raises(ConfigError, match="give one of them"):
        HostPoolConfig(ratio=2.0, size_bytes=1 << 30)
    page_bytes = GEOMETRY.page_bytes
    for size_bytes in (10**9, 1 << 30):
        num_pages = host_pool_pages(page_bytes, device_pages=8, size_bytes=size_bytes)
        assert num_pages == size_bytes // page_bytes
    cache, _ = build(HostPoolConfig(ratio=2.5, huge_pages=False), make_pool())
    assert cache.controller.host_allocator.num_pages == 20
    assert cache.controller.device_allocator.num_pages == 8
    assert cache.close()


# -- cost ----------------------------------------------------------------------------------


def num_lines(call: Callable[[], object]) -> int:
    """Run `call`; return how many lines of Python it took: a cost that no machine changes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def tree_of_leaves(num_leaves: int, tier: str) -> RadixTree:
    """Return a tree with that many leaves of one page, on the device or on the host alone."""
    tree = RadixTree(1)
    for leaf in range(num_leaves):
        page = np.array([leaf])
        result = tree.insert(RadixKey([leaf]), page)
        if tier == "host":
            ticket = tree.begin_write(result.node)
            assert ticket is not None
            tree.commit_write(ticket, page, 1)
            tree.evict(1)
    return tree


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("part_locked", [0.0, 0.9])
def test_the_cost_of_an_eviction_does_not_grow_with_the_number_of_nodes(
    tier: str, part_locked: float
) -> None:
    """C104, C107: counted in lines of Python, with the oldest nodes free or pinned."""
    costs = {}
    sizes = (1_000, 10_000, 50_000) if tier == "device" else (1_000, 20_000)
    for num_leaves in sizes:
        tree = tree_of_leaves(num_leaves, tier)
        for node in list(tree.nodes())[::-1][: int(part_locked * num_leaves)]:
            (tree.lock if tier == "device" else tree.residency.host_lock)(node)

        def evict_100(tree: RadixTree = tree) -> None:
            for _ in range(100):
                pages = tree.evict(1).freed if tier == "device" else tree.evict_host(1)
                assert len(pages) == 1

        costs[num_leaves] = num_lines(evict_100)
    smallest = min(sizes)
    for num_leaves, cost in costs.items():
        assert cost <= costs[smallest] * math.log(num_leaves) / math.log(smallest), costs


class HeldStorage(MemoryStorage):
    """Holds every read but that of one page."""

    def __init__(self, config: HiCacheStorageConfig, store: MemoryPages, gate: Gate) -> None:
        super().__init__(config, store=store)
        self._gate = gate
        self.free: PageHash | None = None

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        if keys[0] != self.free:
            self._gate.pass_through()
        return super().batch_get(keys, parent_keys, pages, deadline=deadline)


def test_a_finished_prefetch_is_collected_at_the_next_event_check() -> None:
    """C105: it is the last of 50 that wait; the reads of 30 others hang, 19 found nothing."""
    keys = [RadixKey(tokens(number)) for number in range(50)]
    stored = [*keys[:30], keys[-1]]
    gate = Gate()
    storages: list[HeldStorage] = []
    store = store_with(*stored, host_pages=64)

    def create(config: HiCacheStorageConfig) -> HeldStorage:
        storages.append(HeldStorage(config, store, gate))
        return storages[-1]

    config = config_for(64, storage=injected(num_workers=32), prefetch_policy=WAIT)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        node = rig.insert(keys[-1]).node
        rig.settle()
        storages[0].free = rig.cache.tree.page_hashes(node)[0]
        rig.drop_memory()
        for number, key in enumerate(keys[:-1]):
            rig.begin_prefetch(key, request_id=str(number))
        rig.step_until(lambda: rig.cache.num_in_flight == 30)
        rig.step_until(lambda: rig.host_pages.num_available == 34)
        rig.begin_prefetch(keys[-1], request_id="last")
        rig.step_until(lambda: rig.host_pages.num_available == 33)
        until(lambda: len(rig.tier._results) > 0)
        rig.step()
        assert rig.cache.check_prefetch_progress("last")
        assert rig.hit(keys[-1]) == (0, 1)
        assert rig.cache.controller.num_prefetch_pages == 30
