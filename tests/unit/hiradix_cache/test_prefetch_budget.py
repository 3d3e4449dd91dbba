"""Prefetches hold a bounded part of the host, and one of them always goes on."""

from __future__ import annotations

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import faulty_storage, injected

from hicache.config import PrefetchConfig
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy

KEYS = {
    name: RadixKey(tokens(*range(10 * number, 10 * number + 4)))
    for number, name in enumerate("abcd")
}


def rig_with(
    limit_pages: int | None,
    gates: dict[Verb, Gate],
    *,
    host_pages: int = 16,
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
) -> Rig:
    config = config_for(
        host_pages,
        prefetch_policy=prefetch_policy,
        storage=injected(),
        prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=limit_pages),
    )
    return Rig(config, create_storage=faulty_storage(store_with(*KEYS.values()), gates=gates))


def test_requests_that_ask_at_once_share_the_budget_and_all_are_served() -> None:
    """C087: each needs 40 % of the budget; those that have to wait run after the others."""
    read = Gate()
    with rig_with(10, {Verb.GET: read}) as rig:
        rig.gates.append(read)
        for name, key in KEYS.items():
            assert rig.begin_prefetch(key, request_id=name)
        rig.step_until(read.entered.is_set)
        for _ in range(20):
            rig.step()
            assert rig.cache.controller.num_prefetch_pages <= 10
        read.open()
        while rig.cache.num_in_flight:
            rig.step()
            assert rig.cache.controller.num_prefetch_pages <= 10
        assert [rig.hit(key) for key in KEYS.values()] == [(0, 4)] * 4
        assert [rig.cache.pop_prefetch_loaded_tokens(name) for name in KEYS] == [4 * PAGE] * 4


def test_a_prefetch_beyond_the_budget_is_counted_once_and_begins_when_there_is_room() -> None:
    read = Gate()
    with rig_with(6, {Verb.GET: read}) as rig:
        rig.gates.append(read)
        rig.begin_prefetch(KEYS["a"])
        rig.step_until(read.entered.is_set)
        assert not rig.begin_prefetch(KEYS["b"], request_id="b")
        for _ in range(3):
            assert not rig.cache.check_prefetch_progress("b")
            rig.step()
        assert rig.cache.counters["prefetch_rate_limited"] == 1
        read.open()
        rig.settle()
        assert not rig.cache.check_prefetch_progress("b")
        rig.settle()
        assert rig.cache.check_prefetch_progress("b")
        assert rig.cache.pop_prefetch_loaded_tokens("b") == 4 * PAGE


def test_best_effort_does_not_wait_for_the_budget_and_remembers_nothing() -> None:
    read = Gate()
    with rig_with(4, {Verb.GET: read}, prefetch_policy=PrefetchPolicy.BEST_EFFORT) as rig:
        rig.gates.append(read)
        rig.begin_prefetch(KEYS["a"])
        rig.step_until(read.entered.is_set)
        assert not rig.begin_prefetch(KEYS["b"], request_id="b")
        assert rig.cache.check_prefetch_progress("b")
        read.open()
        rig.settle()
        assert rig.cache.check_prefetch_progress("b")
        assert rig.hit(KEYS["b"]) == (0, 0)


def test_a_prefetch_that_waits_for_the_budget_can_be_aborted() -> None:
    """C004: the hit is known, there is no memory for it."""
    read = Gate()
    with rig_with(4, {Verb.GET: read}) as rig:
        rig.gates.append(read)
        for name in "ab":
            rig.begin_prefetch(KEYS[name], request_id=name)
        rig.step_until(read.entered.is_set)
        rig.step(5)
        assert rig.cache.num_in_flight == 2
        rig.cache.release_aborted_request("b")
        rig.step()
        assert rig.cache.num_in_flight == 1


def test_a_read_that_hangs_does_not_keep_the_budget() -> None:
    read = Gate()
    with rig_with(4, {Verb.GET: read}) as rig:
        rig.gates.append(read)
        for name in "ab":
            rig.begin_prefetch(KEYS[name], request_id=name)
        rig.step_until(read.entered.is_set)
        rig.clock.advance(1000.0)
        rig.step_until(lambda: rig.cache.check_prefetch_progress("a"))
        rig.step_until(lambda: rig.cache.controller.num_prefetch_pages == 4)
        assert not rig.cache.check_prefetch_progress("b")
        assert rig.host_pages.num_available == 8


@pytest.mark.parametrize("limit_pages", [None, 1])
@pytest.mark.parametrize("host_pages", [7, 8, 9])
def test_the_budget_admits_one_prefetch_whatever_the_size_of_the_host(
    host_pages: int, limit_pages: int | None
) -> None:
    """C097: the host is smaller than the device, as large, and a page larger."""
    with rig_with(limit_pages, {}, host_pages=host_pages) as rig:
        for _ in range(2):
            assert rig.prefetch(KEYS["a"]) == 4 * PAGE
            rig.drop_memory()
