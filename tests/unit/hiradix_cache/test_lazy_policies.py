"""Policies that write later than at once, and prefetches that wait for a time."""

from __future__ import annotations

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import GateAt, faulty_storage, injected, memory_storage

from hicache.config import PrefetchConfig
from hicache.radix import CopyKind, RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy, WritePolicy

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(5, 6))
SELECTIVE = WritePolicy.WRITE_THROUGH_SELECTIVE
BEHIND = WritePolicy.WRITE_BEHIND
WRITE_BACK = WritePolicy.WRITE_BACK
TIMEOUT = PrefetchPolicy.TIMEOUT


def num_written(rig: Rig) -> int:
    return rig.cache.controller.stats[CopyKind.WRITE].num_bytes // rig.pool.geometry.page_bytes


def test_selective_writes_what_a_second_request_uses_and_nothing_else() -> None:
    """C085: one request counts once, however many chunks."""
    with Rig(config_for(write_policy=SELECTIVE)) as rig:
        for end in (2, 3, 4):
            rig.insert(KEY.prefix(end * PAGE), request_id="first", chunked=end < 4)
        rig.settle()
        assert num_written(rig) == 0
        rig.insert(KEY.prefix(3 * PAGE).extend(tokens(9)), request_id="second")
        rig.settle()
        assert num_written(rig) == 3
        rig.evict_device()
        assert rig.hit(KEY) == (0, 3)


def test_write_behind_writes_when_the_stream_is_idle() -> None:
    with Rig(config_for(write_policy=BEHIND)) as rig:
        rig.insert(KEY)
        assert num_written(rig) == 0
        assert rig.cache.num_in_flight == 0
        rig.step()
        rig.settle()
        assert num_written(rig) == 4
        assert rig.hit(KEY) == (4, 0)
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_write_behind_writes_one_node_at_a_time_while_memory_is_plenty() -> None:
    with Rig(config_for(write_policy=BEHIND, write_watermark=0)) as rig:
        rig.insert(KEY)
        rig.insert(OTHER)
        rig.cache.check_hicache_events()
        assert len(rig.cache.controller.writes) == 1
        rig.settle()
        rig.step()
        rig.settle()
        assert num_written(rig) == 6


def test_what_is_evicted_before_write_behind_came_to_it_is_written_then() -> None:
    with Rig(config_for(write_policy=BEHIND, write_watermark=0)) as rig:
        rig.insert(KEY)
        assert rig.cache.evict(4).num_pending == 4
        rig.settle()
        assert rig.hit(KEY) == (0, 4)
        assert num_written(rig) == 4


def test_what_write_behind_remembers_may_be_gone_when_its_turn_comes() -> None:
    with Rig(config_for(write_policy=BEHIND)) as rig:
        rig.insert(KEY)
        rig.cache.reset()
        rig.step(3)
        rig.settle()
        assert num_written(rig) == 0


def test_few_free_pages_start_write_back_copies_ahead_of_need() -> None:
    with Rig(config_for(write_policy=WRITE_BACK, write_watermark=0.5)) as rig:
        rig.insert(KEY)
        rig.step()
        assert num_written(rig) == 0
        rig.insert(OTHER)  # 2 of 8 pages are free now, fewer than the 4 of the watermark
        rig.step()
        rig.settle()
        assert num_written(rig) == 4
        # The oldest run can go at once; the newer one was not touched.
        assert rig.cache.evict(4) == (4, 0)
        assert rig.hit(OTHER) == (2, 0)


def test_writing_ahead_ends_when_enough_could_go_at_once() -> None:
    with Rig(config_for(write_policy=WRITE_BACK, write_watermark=0.5)) as rig:
        rig.insert(KEY)
        rig.insert(OTHER)
        for _ in range(5):
            rig.step()
            rig.settle()
        assert num_written(rig) == 4


@pytest.mark.parametrize("policy", [WRITE_BACK, BEHIND])
def test_victims_do_not_undo_each_others_writes_for_ever(policy: WritePolicy) -> None:
    config = config_for(8, write_policy=policy, write_watermark=0.7)
    a, b, c = (RadixKey(tokens(*pages)) for pages in ((11, 12), (21, 22), (31, 32, 33)))
    with Rig(config) as rig:
        rig.insert(KEY)
        rig.evict_device()  # the host holds 4 sole pages now
        for key in (a, b):
            rig.insert(key)
            rig.step()
            rig.settle()
        rig.insert(c)
        rig.match(a)
        for _ in range(10):
            rig.step()
            rig.settle()
        num_operations = rig.cache.controller.stats[CopyKind.WRITE].num_operations
        for _ in range(20):
            rig.step()
            rig.settle()
        assert rig.cache.controller.stats[CopyKind.WRITE].num_operations == num_operations


def test_timeout_waits_for_a_base_time_and_a_time_per_token_then_takes_what_is_there() -> None:
    gate = GateAt(1)
    create = faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    prefetch = PrefetchConfig(
        threshold_tokens=PAGE, timeout_base_seconds=2.0, timeout_per_ki_token_seconds=64.0
    )
    config = config_for(storage=injected(batch_pages=2), prefetch_policy=TIMEOUT, prefetch=prefetch)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(KEY)
        rig.step_until(gate.entered.is_set)
        rig.clock.advance(2.9)  # 2 s and 16 tokens of 1/16 s: 3 s in all
        rig.step()
        assert not rig.cache.check_prefetch_progress("p")
        rig.clock.advance(0.2)
        rig.step(2)
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 2 * PAGE
        assert rig.hit(KEY) == (0, 2)


def test_timeout_does_not_wait_once_everything_is_there() -> None:
    config = config_for(storage=injected(), prefetch_policy=TIMEOUT)
    with Rig(config, create_storage=memory_storage(store_with(KEY))) as rig:
        assert rig.prefetch(KEY) == 4 * PAGE


def test_a_request_whose_prefetch_finds_no_room_waits_no_longer_than_the_timeout() -> None:
    gate = Gate()
    prefetch = PrefetchConfig(
        threshold_tokens=PAGE,
        max_inflight_pages=4,
        timeout_base_seconds=1.0,
        timeout_per_ki_token_seconds=0.0,
    )
    config = config_for(storage=injected(), prefetch_policy=TIMEOUT, prefetch=prefetch)
    create = faulty_storage(store_with(KEY, OTHER), gates={Verb.GET: gate})
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(KEY, request_id="holds the budget")
        rig.step_until(gate.entered.is_set)
        assert not rig.begin_prefetch(OTHER, request_id="waits")
        rig.step()
        assert not rig.cache.check_prefetch_progress("waits")
        rig.clock.advance(1.5)
        rig.step()
        assert rig.cache.check_prefetch_progress("waits")
        assert rig.cache.counters["prefetch_rate_limited"] == 1
