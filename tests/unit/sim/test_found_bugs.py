"""What the simulation has found, each in as few calls as it takes."""

from __future__ import annotations

import pytest
from sim_builders import key_of, rank, serve

from hicache.radix import CopyKind
from hicache.sim.checking import check_ids
from hicache.types import WritePolicy


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_BEHIND, WritePolicy.WRITE_BACK])
def test_close_begins_no_further_writes(policy: WritePolicy) -> None:
    """The step that took the last results wanted to write on a stream that was closed already."""
    system, scheduler = rank(write_policy=policy, write_watermark=1.0)
    serve(scheduler, key_of(1, 2))
    system.cache.check_hicache_events()
    serve(scheduler, key_of(3, 4))
    assert system.cache.num_in_flight == 1
    assert system.cache.close(timeout_seconds=1.0)
    assert system.cache.num_in_flight == 0


def test_a_write_below_one_without_room_is_given_up_with_it() -> None:
    """Its copy went on, published nothing, and was begun again in every step."""
    system, scheduler = rank(write_policy=WritePolicy.WRITE_BACK, num_host_pages=2)
    serve(scheduler, key_of(1, 2, 3))
    serve(scheduler, key_of(1, 4))
    outcome = system.cache.evict(3)
    assert (outcome.num_freed, outcome.num_pending) == (3, 0)
    assert system.cache.num_in_flight == 0


def test_writes_ahead_end_when_the_host_has_no_room_for_them() -> None:
    system, scheduler = rank(
        write_policy=WritePolicy.WRITE_BACK, num_host_pages=2, write_watermark=1.0
    )
    serve(scheduler, key_of(1, 2, 3))
    serve(scheduler, key_of(1, 4))
    system.cache.check_hicache_events()
    assert system.cache.num_in_flight == 0


def test_writes_ahead_do_not_undo_each_other() -> None:
    """On a small host, the copy of one victim made room for that of the next, for ever."""
    system, scheduler = rank(
        write_policy=WritePolicy.WRITE_BACK, num_host_pages=3, write_watermark=1.0
    )
    serve(scheduler, key_of(1, 2))
    serve(scheduler, key_of(3, 4))
    system.cache.check_hicache_events()
    assert system.cache.num_in_flight == 1
    system.run_all()
    assert system.cache.num_in_flight == 1
    system.run_all()
    assert system.cache.num_in_flight == 0


def test_a_queued_write_ends_with_the_one_above_that_failed() -> None:
    """The next write of its pages was merged into one job with it, and every step raised."""
    system, scheduler = rank(write_policy=WritePolicy.WRITE_BEHIND, write_watermark=1.0)
    serve(scheduler, key_of(1))
    system.cache.check_hicache_events()
    serve(scheduler, key_of(1, 2))
    scheduler.back_up(key_of(1, 2))
    assert len(system.cache.controller.writes) == 2
    system.breaking.add(CopyKind.WRITE)
    system.run_all()
    assert len(system.cache.controller.writes) == 1
    system.run_all()
    assert system.cache.match_prefix(key_of(1, 2)).last_device_node.backed


def test_a_reserved_write_is_not_used_ahead_of_one_above_it_that_began_later() -> None:
    """Its copy went well, but ended before its parent had a host copy, so it published nothing."""
    system, scheduler = rank()
    serve(scheduler, key_of(1))
    system.breaking.add(CopyKind.WRITE)
    system.run_all()
    for request_id, key in (("a", key_of(1, 2)), ("b", key_of(1, 3))):
        scheduler.submit(request_id, key, prefetch=False)
        scheduler.admit(scheduler.requests[-1], mem_quota=None)
    scheduler.begin_pass([(request, 1) for request in scheduler.requests])
    assert len(scheduler.reserving) == 2
    scheduler.go_on(4)
    assert check_ids(system, scheduler) == []
    while system.cache.num_in_flight:
        system.run_all()
    assert system.cache.match_prefix(key_of(1, 2)).last_device_node.backed
    assert system.cache.match_prefix(key_of(1, 3)).last_device_node.backed
