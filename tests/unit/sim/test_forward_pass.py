"""A pass that stands still: what its pages hold, and what becomes of the writes reserved for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from sim_builders import key_of, rank

from hicache.sim.checking import check_bytes, check_ids
from hicache.sim.options import GEOMETRY

if TYPE_CHECKING:
    from hicache.sim.scheduler import Scheduler
    from hicache.sim.system import System

KEYS = (key_of(1, 2), key_of(1, 3, 4))
NUM_LAYERS = GEOMETRY.num_layers


def in_pass(num_stages: int) -> tuple[System, Scheduler]:
    """Two requests in a pass that has done some stages."""
    system, scheduler = rank()
    for number, key in enumerate(KEYS):
        scheduler.submit(f"r{number}", key, prefetch=False)
        scheduler.admit(scheduler.requests[-1], mem_quota=None)
    scheduler.begin_pass([(request, 9) for request in scheduler.requests])
    scheduler.go_on(num_stages)
    return system, scheduler


def violations(system: System, scheduler: Scheduler) -> list[str]:
    return check_ids(system, scheduler) + check_bytes(system, scheduler)


@pytest.mark.parametrize("num_stages", range(NUM_LAYERS + len(KEYS) + 1))
def test_nothing_is_wrong_wherever_it_stands_still(num_stages: int) -> None:
    system, scheduler = in_pass(num_stages)
    num_inserted = max(0, num_stages - NUM_LAYERS)
    assert len(scheduler.reserving) == len(KEYS) - num_inserted
    assert (scheduler.forward is None) == (num_inserted == len(KEYS))
    system.cache.check_hicache_events()
    assert violations(system, scheduler) == []
    system.abandon()


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_layer_that_holds_other_bytes_is_found_computed_or_not(layer: int) -> None:
    system, scheduler = in_pass(1)
    page = int(scheduler.requests[1].pages[0])
    system.device_bytes.scribble(np.array([page]), layer)
    assert violations(system, scheduler) == [
        f"device page {page} is in the pass and holds other bytes in layer {layer}"
    ]
    system.abandon()


@pytest.mark.parametrize("num_stages", range(NUM_LAYERS + 2))
@pytest.mark.parametrize("how", ["fail_pass", "abort", "retract", "close"])
def test_whatever_ends_it_nothing_is_left(how: str, num_stages: int) -> None:
    system, scheduler = in_pass(num_stages)
    if how == "fail_pass":
        scheduler.fail_pass()
    elif how == "close":
        assert system.cache.close(1.0)
        scheduler.forget_reservations()
    else:
        for request in list(scheduler.requests):
            getattr(scheduler, how)(request)
    assert (scheduler.forward is None) == (how != "close")
    assert scheduler.reserving == []
    if how == "close":
        assert check_ids(system, scheduler) == []
        return
    assert violations(system, scheduler) == []
    # Once for the writes, once for what they let storage have.
    system.run_all()
    system.run_all()
    assert system.cache.num_in_flight == 0
    assert violations(system, scheduler) == []
    system.abandon()


def test_a_write_that_two_finish_is_found() -> None:
    system, _ = in_pass(NUM_LAYERS)
    reserved = system.mover.newest_reservation
    assert reserved is not None
    system.mover.finish_write(reserved, wanted=True)
    assert system.mover.violations == []
    system.mover.finish_write(reserved, wanted=True)
    assert system.mover.violations == [f"write {reserved} waits for no finish"]
    system.abandon()
