"""A request can go at any moment of its prefetch; its memory returns when storage has let go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from builders import POISON, Rig, config_for, store_with, tokens
from scripted_parts import Barrier, faulty_storage, injected

from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.testing.stamped_kv import fill_pages, read_pages
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.storage.memory import MemoryPages

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(11, 12, 13, 14))


def rig_over(store: MemoryPages, gates: dict[Verb, Gate], **storage: object) -> Rig:
    config = config_for(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, storage=injected(**storage))
    rig = Rig(config, create_storage=faulty_storage(store, gates=gates))
    rig.gates += gates.values()
    return rig


def num_remembered(rig: Rig) -> int:
    """Entries in every table that is keyed by a request or an operation."""
    owners = (rig.cache, rig.cache._prefetcher, rig.cache.controller, rig.tier)
    tables = [table for owner in owners for table in vars(owner).values()]
    not_keyed_so = (rig.cache.counters, rig.cache.controller.stats)
    return sum(
        len(table)
        for table in tables
        if isinstance(table, dict) and not any(table is one for one in not_keyed_so)
    )


def assert_nothing_is_left(rig: Rig, *, num_host_pages: int = 0) -> None:
    """Assert that the tree's `num_host_pages` are all that is still owned."""
    rig.step_until(lambda: num_remembered(rig) == 0)
    assert rig.cache.controller.num_prefetch_pages == 0
    assert rig.host_pages.num_available == 16 - num_host_pages
    rig.drop_memory()
    assert rig.prefetch(KEY) == len(KEY)
    assert rig.hit(KEY) == (0, 4)


def test_aborted_while_it_waits_to_be_queried() -> None:
    """C004."""
    query = Gate()
    with rig_over(store_with(KEY), {Verb.EXISTS: query}, num_workers=1) as rig:
        rig.begin_prefetch(OTHER, request_id="ahead")
        assert query.entered.wait(10)
        rig.begin_prefetch(KEY)
        rig.step(2)
        rig.cache.release_aborted_request("p")
        rig.step()
        assert rig.cache.num_in_flight == 1
        query.open()
        rig.settle()
        assert rig.cache.pop_prefetch_loaded_tokens("ahead") == 0
        assert_nothing_is_left(rig)


def test_aborted_while_it_is_queried() -> None:
    """C004."""
    query = Gate()
    with rig_over(store_with(KEY), {Verb.EXISTS: query}) as rig:
        rig.begin_prefetch(KEY)
        assert query.entered.wait(10)
        rig.cache.release_aborted_request("p")
        rig.step(2)
        assert rig.cache.num_in_flight == 0
        query.open()
        assert_nothing_is_left(rig)


def test_aborted_while_it_is_read() -> None:
    """C003, C004: the pages belong to the read until it returns, and then to nobody."""
    read = Barrier()
    with rig_over(store_with(KEY), {Verb.GET: read}) as rig:
        for _ in range(100):
            read.shut()
            rig.begin_prefetch(KEY)
            rig.step_until(read.entered.is_set)
            rig.cache.release_aborted_request("p")
            rig.step(2)
            assert rig.host_pages.num_available == 12
            read.open()
            rig.settle()
            assert rig.host_pages.num_available == 16
        assert_nothing_is_left(rig)


def test_aborted_when_it_is_done_but_not_collected_keeps_what_has_arrived() -> None:
    """C004."""
    with rig_over(store_with(KEY), {}) as rig:
        rig.begin_prefetch(KEY)
        rig.step_until(lambda: rig.host_pages.num_available == 12)
        rig.cache.release_aborted_request("p")
        rig.settle()
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        num_arrived = sum(rig.hit(KEY))
        assert num_arrived in (0, 4)
        assert_nothing_is_left(rig, num_host_pages=num_arrived)


def test_aborted_when_it_is_collected_keeps_the_pages_and_forgets_the_request() -> None:
    """C004."""
    with rig_over(store_with(KEY), {}) as rig:
        rig.begin_prefetch(KEY)
        rig.settle()
        rig.cache.release_aborted_request("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        assert_nothing_is_left(rig, num_host_pages=4)


def test_a_thousand_aborted_prefetches_leave_no_entry_behind() -> None:
    """C006."""
    with rig_over(store_with(KEY), {}) as rig:
        for number in range(1000):
            rig.begin_prefetch(KEY, request_id=str(number))
            rig.cache.release_aborted_request(str(number))
            rig.cache.check_hicache_events()
        assert_nothing_is_left(rig, num_host_pages=sum(rig.hit(KEY)))


def test_a_late_read_of_an_aborted_prefetch_touches_no_page_of_others() -> None:
    """C038: meanwhile every other host page is given out, again and again."""
    read = Gate()
    with rig_over(store_with(KEY), {Verb.GET: read}) as rig:
        rig.begin_prefetch(KEY)
        rig.step_until(read.entered.is_set)
        rig.cache.release_aborted_request("p")
        rig.step()
        others = rig.host_pages.free_pages()
        assert len(others) == 12
        for _ in range(1000):
            taken = rig.host_pages.alloc(12)
            assert taken is not None
            rig.host_pages.free(taken)
        fill_pages(rig.host_pool, others, POISON)
        read.open()
        rig.settle()
        assert torch.all(read_pages(rig.host_pool, others) == POISON)
        assert_nothing_is_left(rig)
