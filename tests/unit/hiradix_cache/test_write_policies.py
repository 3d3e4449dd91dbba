"""L1 -> L2: what is written when, and what eviction does to what was not written."""

from __future__ import annotations

import pytest
import torch
from builders import GEOMETRY, PAGE, POISON, Rig, config_for, tokens
from scripted_parts import faulty_storage, injected, memory_storage

from hicache.device import create_device
from hicache.hiradix_cache import EvictOutcome, create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import CopyKind, RadixKey
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Gate, Verb
from hicache.testing.stamped_kv import fill_pages
from hicache.types import WritePolicy

WRITE_BACK = WritePolicy.WRITE_BACK
CHAIN = RadixKey(tokens(1, 2, 3, 4, 5, 6, 7, 8))
"""Fills the device."""


def insert_chain(rig: Rig, key: RadixKey = CHAIN, *, run_pages: int = 2) -> None:
    """Insert `key` as a chain of nodes."""
    for end in range(run_pages * PAGE, len(key) + 1, run_pages * PAGE):
        rig.insert(key.prefix(end), chunked=end < len(key))


def num_written(rig: Rig) -> int:
    return rig.cache.controller.stats[CopyKind.WRITE].num_bytes // rig.pool.geometry.page_bytes


def poison_free_pages(rig: Rig) -> None:
    fill_pages(rig.pool, rig.device_pages.free_pages(), POISON)


def test_write_through_copies_at_the_first_insert() -> None:
    with Rig() as rig:
        rig.insert(CHAIN.prefix(3 * PAGE))
        rig.settle()
        assert num_written(rig) == 3
        rig.evict_device()
        assert rig.hit(CHAIN) == (0, 3)


def test_inserting_what_is_cached_copies_and_evicts_nothing() -> None:
    """C093."""
    a, b = RadixKey(tokens(1, 2, 3, 4)), RadixKey(tokens(5, 6, 7))
    with Rig(config_for(7)) as rig:
        rig.insert(a)
        rig.insert(b)
        rig.settle()
        rig.insert(b.prefix(PAGE))
        rig.settle()
        assert num_written(rig) == 7
        assert (rig.hit(a), rig.hit(b)) == ((4, 0), (3, 0))


def test_write_back_copies_nothing_before_eviction() -> None:
    with Rig(config_for(write_policy=WRITE_BACK)) as rig:
        insert_chain(rig)
        rig.settle()
        assert num_written(rig) == 0
        assert rig.host_pages.num_available == 16


def test_write_back_pages_are_pending_until_their_copy_has_ended_and_then_free() -> None:
    with Rig(config_for(write_policy=WRITE_BACK)) as rig:
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.insert(CHAIN.prefix(3 * PAGE))
        assert rig.cache.evict(2) == EvictOutcome(num_freed=0, num_pending=3)
        assert rig.cache.evict(2) == EvictOutcome(num_freed=0, num_pending=3)
        assert rig.device_pages.num_available == 5
        gate.open()
        rig.settle()
        assert rig.device_pages.num_available == 8
        assert rig.hit(CHAIN) == (0, 3)


def test_write_back_evicts_a_chain_from_the_leaf_up_and_the_host_has_the_right_bytes() -> None:
    """C009; eviction never waits, so the caller asks again until the pages are free."""
    with Rig(config_for(write_policy=WRITE_BACK)) as rig:
        insert_chain(rig)
        num_free = [0]
        while num_free[-1] < 8:
            rig.cache.evict(8 - num_free[-1])
            poison_free_pages(rig)
            rig.settle()
            num_free.append(rig.device_pages.num_available)
            assert rig.hit(CHAIN) == (8 - num_free[-1], num_free[-1])
        poison_free_pages(rig)
        assert rig.hit(CHAIN) == (0, 8)
        assert len(rig.cache.tree.path(rig.match(CHAIN).last_host_node)) == 4


def test_pages_used_again_while_they_are_written_stay_on_the_device() -> None:
    with Rig(config_for(write_policy=WRITE_BACK)) as rig:
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.insert(CHAIN.prefix(3 * PAGE))
        rig.cache.evict(3)
        assert rig.match(CHAIN).device_hit_tokens == 3 * PAGE
        gate.open()
        rig.settle()
        assert rig.hit(CHAIN) == (3, 0)
        assert rig.cache.tree.num_pending_evict_pages == 0
        rig.evict_device()
        assert rig.hit(CHAIN) == (0, 3)


def test_pages_of_a_running_request_are_never_evicted() -> None:
    """C014."""
    with Rig(config_for(write_policy=WRITE_BACK)) as rig:
        insert_chain(rig)
        node = rig.match(CHAIN.prefix(4 * PAGE)).last_device_node
        rig.cache.inc_lock_ref(node)
        for _ in range(5):
            rig.cache.evict(8)
            rig.settle()
        assert rig.device_pages.num_available == 4
        assert rig.hit(CHAIN) == (4, 4)
        rig.cache.dec_lock_ref(node)
        assert rig.cache.protected_size == 0


def test_the_tail_of_a_prompt_goes_before_its_head() -> None:
    """C094."""
    with Rig() as rig:
        insert_chain(rig, run_pages=1)
        rig.settle()
        rig.insert(RadixKey(tokens(9)))
        assert rig.hit(CHAIN) == (7, 1)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WRITE_BACK])
def test_what_the_host_has_no_room_for_is_dropped_and_counted(policy: WritePolicy) -> None:
    """C127: the host is full, and nothing in it may go because storage still reads it."""
    held, lost = RadixKey(tokens(1, 2, 3)), RadixKey(tokens(4, 5))
    gate = Gate()
    create = faulty_storage(MemoryPages(), gates={Verb.SET: gate})
    config = config_for(4, write_policy=policy, storage=injected())
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.insert(held)
        if policy is WRITE_BACK:
            rig.cache.evict(3)
        rig.step_until(gate.entered.is_set)
        rig.insert(lost)
        rig.cache.evict(8)
        rig.step_until(lambda: rig.device_pages.num_available == 8)
        assert rig.hit(held) == (0, 3)
        assert rig.hit(lost) == (0, 0)
        assert rig.cache.counters["unwritten_pages"] == 2


def test_a_write_makes_room_by_evicting_others_never_its_own_ancestors() -> None:
    """C081: three of the four host pages are needed, and the oldest is the parent's."""
    parent = RadixKey(tokens(1))
    others = [RadixKey(tokens(page)) for page in (11, 12, 13)]
    child = RadixKey(tokens(1, 2, 3, 4))
    with Rig(config_for(4)) as rig:
        for key in (parent, *others):
            rig.insert(key)
            rig.settle()
        rig.insert(child)
        rig.settle()
        rig.evict_device()
        assert rig.hit(child) == (0, 4)
        assert [rig.hit(key) for key in others] == [(0, 0)] * 3


def test_a_child_is_not_written_where_its_parent_had_no_room() -> None:
    """C084 (b): one host page is free and stays so while storage reads the others."""
    gate = Gate()
    create = faulty_storage(MemoryPages(), gates={Verb.SET: gate})
    parent, child = RadixKey(tokens(1, 2)), RadixKey(tokens(1, 2, 3))
    with Rig(config_for(4, storage=injected()), create_storage=create) as rig:
        rig.gates.append(gate)
        rig.insert(RadixKey(tokens(7, 8, 9)))
        rig.step_until(gate.entered.is_set)
        rig.insert(parent)
        rig.insert(child)
        rig.step(3)
        assert rig.host_pages.num_available == 1
        assert rig.cache.counters["unwritten_pages"] == 2 + 3
        gate.open()
        rig.settle()
        rig.insert(child)
        rig.settle()
        rig.evict_device()
        assert rig.hit(child) == (0, 3)


def test_a_host_smaller_than_the_device_lets_everything_pass_through_to_storage() -> None:
    """C082: copies of device pages are given up for new ones once they are persisted."""
    store = MemoryPages()
    keys = [RadixKey(tokens(page)) for page in range(16)]
    config = config_for(4, storage=injected())
    with Rig(config, device_pages=16, create_storage=memory_storage(store)) as rig:
        for key in keys:
            rig.insert(key)
            rig.settle()
        assert [rig.hit(key) for key in keys] == [(1, 0)] * 16
        rig.drop_memory()
        assert [rig.prefetch(key) for key in keys] == [PAGE] * 16


def test_write_back_persists_the_head_with_the_first_tail_so_that_all_can_hit() -> None:
    """C108: only tails are ever evicted."""
    store = MemoryPages()
    prompts = [RadixKey(tokens(1, 2, 10 + tail)) for tail in range(5)]
    config = config_for(write_policy=WRITE_BACK, storage=injected())
    with Rig(config, device_pages=6, create_storage=memory_storage(store)) as rig:
        head = rig.insert(prompts[0].prefix(2 * PAGE), chunked=True).node
        rig.cache.inc_lock_ref(head)
        for key in prompts:
            rig.insert(key)
            rig.cache.evict(6)
            rig.settle()
        rig.cache.dec_lock_ref(head)
    with Rig(config, device_pages=6, create_storage=memory_storage(store)) as rig:
        for key in prompts:
            rig.prefetch(key)
            assert rig.hit(key) == (0, 3)


def test_a_request_counts_once_per_node_however_many_chunks() -> None:
    """C085."""
    with Rig() as rig:
        for request_id in ("a", "b"):
            for end in (2, 4, 6):
                rig.insert(CHAIN.prefix(end * PAGE), request_id=request_id, chunked=end < 6)
        path = rig.cache.tree.path(rig.match(CHAIN).last_device_node)
        assert [node.hit_count for node in path] == [2, 2, 2]
        rig.insert(CHAIN.prefix(6 * PAGE), request_id="c")
        assert [node.hit_count for node in path] == [3, 3, 3]


def test_an_aborted_request_counts_anew() -> None:
    with Rig() as rig:
        node = rig.insert(CHAIN.prefix(2 * PAGE), request_id="a", chunked=True).node
        rig.cache.release_aborted_request("a")
        rig.insert(CHAIN.prefix(2 * PAGE), request_id="a", chunked=True)
        assert node.hit_count == 2


@pytest.mark.parametrize(("eviction_policy", "is_written"), [("adaptive", True), ("lru", False)])
def test_selective_counts_uses_before_an_eviction_where_the_policy_remembers_them(
    eviction_policy: str, is_written: bool
) -> None:
    """A run that no second request has used yet goes unwritten; its second use is its second."""
    config = config_for(
        8, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, eviction_policy=eviction_policy
    )
    key, allocator = RadixKey(tokens(1, 2)), PageAllocator(8)
    cache, _ = create_hiradix_cache(
        config,
        device=create_device("cpu"),
        device_pool=DeviceKVPool(GEOMETRY, num_pages=8, torch_device=torch.device("cpu")),
        device_allocator=allocator,
    )
    for request_id in ("first", "second"):
        assert cache.tree.host_size == 0
        pages = allocator.alloc(2)
        assert pages is not None
        cache.insert(key, pages, request_id=request_id, chunked=False)
        if request_id == "first":
            assert cache.evict(2).num_freed == 2
    assert bool(cache.num_in_flight) == is_written
    assert cache.close()
