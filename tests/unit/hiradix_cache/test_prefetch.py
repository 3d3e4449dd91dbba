"""L3 -> L2: exactly the hit, verified, in order, and below what the host can reach."""

from __future__ import annotations

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import GateAt, faulty_storage, injected, memory_storage

from hicache.config import PrefetchConfig
from hicache.hiradix_cache import LoadStatus
from hicache.hiradix_cache.snapshot import snapshot_of
from hicache.radix import CopyKind, RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy, WritePolicy

WAIT, BEST_EFFORT = PrefetchPolicy.WAIT_COMPLETE, PrefetchPolicy.BEST_EFFORT
KEY = RadixKey(tokens(1, 2, 3, 4))
LONG = RadixKey(tokens(1, 2, 3, 4, 5, 6, 7, 8))


def test_only_what_storage_has_takes_host_memory() -> None:
    """C002."""
    store = store_with(KEY.prefix(2 * PAGE))
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store)) as rig:
        assert rig.prefetch(LONG) == 2 * PAGE
        assert rig.hit(LONG) == (0, 2)
        assert rig.host_pages.num_available == 14
        assert rig.cache.controller.stats[CopyKind.PREFETCH].outcomes == {"ok": 2}


@pytest.mark.parametrize("num_tail_tokens", [0, 1, PAGE - 1])
def test_lengths_are_rounded_down_to_whole_pages(num_tail_tokens: int) -> None:
    """C043."""
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store_with(KEY))) as rig:
        tail = [99] * num_tail_tokens
        assert not rig.begin_prefetch(RadixKey(tail))
        assert rig.prefetch(KEY.extend(tail)) == len(KEY)
        assert rig.prefetch(KEY.extend(tail)) == 0
        assert rig.hit(KEY) == (0, 4)


def test_a_hit_below_the_threshold_is_not_fetched() -> None:
    config = config_for(storage=injected(), prefetch=PrefetchConfig(threshold_tokens=2 * PAGE + 1))
    gate = Gate()
    gate.open()
    create = faulty_storage(store_with(KEY), gates={Verb.EXISTS: gate})
    with Rig(config, create_storage=create) as rig:
        assert not rig.begin_prefetch(KEY.prefix(2 * PAGE))
        assert not gate.entered.is_set()
        assert rig.prefetch(KEY.prefix(2 * PAGE).extend(tokens(9))) == 0
        assert rig.cache.counters["prefetch_revoked"] == 1
        assert rig.prefetch(KEY.prefix(3 * PAGE)) == 3 * PAGE


def test_a_request_has_one_prefetch_and_none_without_a_store() -> None:
    with Rig() as rig:
        assert not rig.begin_prefetch(KEY)
        assert rig.cache.check_prefetch_progress("p")
    gate = Gate()
    create = faulty_storage(store_with(KEY), gates={Verb.EXISTS: gate})
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.gates.append(gate)
        assert rig.begin_prefetch(KEY)
        assert rig.begin_prefetch(KEY)
        assert rig.cache.num_in_flight == 1


def test_best_effort_ends_at_the_first_question_with_what_has_arrived() -> None:
    gate = GateAt(1)
    create = faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    config = config_for(storage=injected(batch_pages=2), prefetch_policy=BEST_EFFORT)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(KEY)
        rig.step_until(gate.entered.is_set)
        assert not rig.cache.check_prefetch_progress("p")
        rig.step()
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 2 * PAGE
        assert rig.hit(KEY) == (0, 2)
        assert rig.host_pages.num_available == 12
        gate.open()
        rig.settle()
        assert rig.hit(KEY) == (0, 2)
        assert rig.host_pages.num_available == 14


def test_wait_complete_is_not_disturbed_by_early_questions() -> None:
    """C005."""
    gate = Gate()
    create = faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    config = config_for(storage=injected(), prefetch_policy=WAIT)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(KEY)
        rig.step_until(gate.entered.is_set)
        for _ in range(20):
            assert not rig.cache.check_prefetch_progress("p")
            rig.step()
        gate.open()
        rig.settle()
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == len(KEY)
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0


def test_pages_from_storage_land_behind_those_of_the_host_and_load_in_order() -> None:
    """C045 (a)."""
    create = memory_storage(store_with(LONG))
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.prefetch(KEY)
        assert rig.hit(LONG) == (0, 4)
        assert rig.prefetch(LONG) == len(LONG) - len(KEY)
        assert rig.load(LONG).status is LoadStatus.QUEUED
        assert rig.hit(LONG) == (8, 0)


def test_an_anchor_that_only_the_device_has_is_written_first_and_may_be_evicted() -> None:
    """C010."""
    gate = Gate()
    create = faulty_storage(store_with(LONG), gates={Verb.GET: gate})
    config = config_for(storage=injected(), write_policy=WritePolicy.WRITE_BACK)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.insert(KEY)
        rig.begin_prefetch(LONG)
        rig.step_until(lambda: gate.entered.is_set() and rig.cache.tree.host_size == len(KEY))
        rig.cache.evict(8)
        assert rig.device_pages.num_available == 8
        gate.open()
        rig.settle()
        assert rig.hit(LONG) == (0, 8)


def test_without_room_for_the_anchor_there_is_no_prefetch_and_a_counter_says_so() -> None:
    create = memory_storage(store_with(LONG))
    config = config_for(3, storage=injected(), write_policy=WritePolicy.WRITE_BACK)
    with Rig(config, create_storage=create) as rig:
        rig.insert(KEY)
        assert rig.prefetch(LONG) == 0
        assert rig.cache.counters["no_host_anchor"] == 1
        assert rig.hit(LONG) == (4, 0)


def test_pages_below_an_anchor_whose_write_fails_go_back() -> None:
    create = memory_storage(store_with(LONG))
    config = config_for(storage=injected(), write_policy=WritePolicy.WRITE_BACK)
    with Rig(config, create_storage=create) as rig:
        write, rig.engine.write_gates[0] = rig.gate(), rig.gates[-1]
        rig.engine.broken_writes.add(1)
        rig.insert(KEY)
        rig.begin_prefetch(LONG)
        prefetch = rig.cache.controller.stats[CopyKind.PREFETCH]
        rig.step_until(lambda: prefetch.num_operations == 1)
        rig.step(3)
        assert rig.cache.num_in_flight == 2
        write.open()
        rig.settle()
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        assert rig.hit(LONG) == (4, 0)
        assert rig.host_pages.num_available == 16


def test_pages_meet_those_that_were_computed_meanwhile_and_leave_no_hole() -> None:
    """C084 (a)."""
    gate = Gate()
    create = faulty_storage(store_with(LONG), gates={Verb.GET: gate})
    config = config_for(storage=injected(), write_policy=WritePolicy.WRITE_BACK)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(LONG)
        rig.step_until(gate.entered.is_set)
        rig.insert(LONG.prefix(5 * PAGE))
        gate.open()
        rig.settle()
        assert rig.hit(LONG) == (5, 3)
        rig.evict_device()
        assert rig.hit(LONG) == (0, 8)
        assert rig.host_pages.num_available == 8


def test_a_host_copy_made_meanwhile_is_kept_and_the_page_from_storage_given_back() -> None:
    gate = Gate()
    create = faulty_storage(store_with(LONG), gates={Verb.GET: gate})
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(LONG)
        rig.step_until(gate.entered.is_set)
        rig.insert(LONG.prefix(5 * PAGE))
        rig.step_until(lambda: rig.cache.tree.host_size == 5 * PAGE)
        gate.open()
        rig.settle()
        assert rig.hit(LONG) == (5, 3)
        assert rig.host_pages.num_available == 8


@pytest.mark.parametrize(("num_held", "num_brought"), [(4, 0), (2, 2), (3, 1)])
def test_a_prefetch_takes_the_head_of_its_hit_when_the_host_has_room_for_no_more(
    num_held: int, num_brought: int
) -> None:
    """C016, C039: storage still reads what fills the host."""
    gate = Gate()
    create = faulty_storage(store_with(KEY), gates={Verb.SET: gate})
    with Rig(config_for(4, storage=injected()), create_storage=create) as rig:
        rig.gates.append(gate)
        rig.insert(RadixKey(tokens(*range(10, 10 + num_held))))
        rig.step_until(gate.entered.is_set)
        rig.begin_prefetch(KEY)
        rig.step_until(lambda: rig.cache.num_in_flight == 1)
        assert rig.cache.counters["prefetch_no_host_memory"] == 1
        assert rig.hit(KEY) == (0, num_brought)
        gate.open()
        rig.settle()
        assert rig.prefetch(KEY) == len(KEY) - num_brought * PAGE
        assert rig.hit(KEY) == (0, 4)


def test_what_takes_longer_to_read_than_to_compute_is_left_in_storage_and_counted() -> None:
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store_with(KEY))) as rig:
        costs = rig.cache.controller.costs
        costs.note_read(1, 1.0)
        rig.cache.note_prefill(1000, 1.0)
        assert rig.prefetch(KEY) == 0
        assert rig.cache.counters["prefetch_revoked"] == 1
        assert snapshot_of(rig.cache).events["prefetch_cost_not_worth"] == 1
        # Computing has become slow.
        for _ in range(32):
            rig.cache.note_prefill(1, 10.0)
        assert rig.prefetch(KEY, request_id="later") == len(KEY)
