"""How the life of a simulated rank ends, and what has to be true of each end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.errors import InvariantViolation

if TYPE_CHECKING:
    from hicache.sim.scheduler import Scheduler
    from hicache.sim.system import System

__all__ = ["close", "close_again", "empty", "settle"]

_MAX_ROUNDS = 100
_MANY_PAGES = 10**6
_ALL_STAGES = 10**6
_CLOSE_SECONDS = 1.0


def settle(system: System, scheduler: Scheduler) -> str:
    """Let all end without further faults: what is under way, then what requests wait for.

    Raises:
        InvariantViolation: something has not ended after many rounds.
    """
    for rounds in range(_MAX_ROUNDS):
        system.run_all()
        if system.cache.ranks_lost:
            scheduler.go_on_alone()
        scheduler.go_on(_ALL_STAGES)
        scheduler.start_loads()
        for request in scheduler.computable:
            scheduler.compute(request, _MANY_PAGES)
        for request in scheduler.waiting:
            scheduler.admit(request, mem_quota=None)
        if system.cache.ranks_lost and not scheduler.running:
            _give_up_what_does_not_fit(system, scheduler)
        if not scheduler.requests and not system.cache.num_in_flight:
            return f"{rounds} rounds"
    left = f"{len(scheduler.requests)} request(s), {system.cache.num_in_flight} in flight"
    raise InvariantViolation([f"without further faults, {left} after many rounds"])


def _give_up_what_does_not_fit(system: System, scheduler: Scheduler) -> None:
    """Abort requests that need pages which went with the rank that was lost.

    What loads had taken then, and what was withheld because of another rank, is gone until the end.
    """
    system.cache.evict(_MANY_PAGES)
    num_free = system.cache.device_allocator.num_available
    for request in scheduler.waiting:
        if request.num_pages > num_free:
            scheduler.abort(request)


def empty(system: System, _scheduler: Scheduler) -> str:
    """Evict everything, when nothing is in use any more.

    Raises:
        InvariantViolation: a page has not become free.
    """
    controller = system.cache.controller
    allocators = (controller.device_allocator, controller.host_allocator)
    num_pages = [system.device_allocator.num_pages, system.host_allocator.num_pages]
    for _ in range(_MAX_ROUNDS):
        system.cache.evict(_MANY_PAGES)
        system.cache.evict_host(_MANY_PAGES)
        system.run_all()
        free = [len(pages) for pages in system.free_pages]
        can_be_had = [one.num_available == one.num_pages for one in allocators]
        if system.cache.ranks_lost:
            # Those of loads that were in flight then come back when the cache is closed.
            held = sum(len(pages) for pages in system.cache.held_pages()[0])
            free, can_be_had = [free[0] + held, free[1]], [True]
        if free == num_pages and all(can_be_had):
            return "all pages are free"
    raise InvariantViolation([f"with nothing in use, only {free} pages became free"])


def close(system: System, scheduler: Scheduler) -> str:
    """Close as far as no call is under way, which is not waited for.

    Raises:
        InvariantViolation: the cache does not tell the truth about that.
    """
    is_busy = bool(system.executor.under_way)
    system.is_closed = system.cache.close(_CLOSE_SECONDS)
    scheduler.forget_reservations()
    if system.is_closed is is_busy:
        raise InvariantViolation([f"close says {system.is_closed}, calls under way {is_busy}"])
    return "with calls under way" if is_busy else "idle"


def close_again(system: System, _scheduler: Scheduler) -> str:
    """Let all calls return and close wholly.

    Raises:
        InvariantViolation: something is left in flight.
    """
    system.let_go()
    system.is_closed = system.cache.close(_CLOSE_SECONDS)
    if not system.is_closed or system.cache.num_in_flight:
        raise InvariantViolation([f"{system.cache.num_in_flight} in flight after close"])
    held = [len(pages) for pages in system.cache.held_pages()[0]]
    if sum(held):
        raise InvariantViolation([f"{sum(held)} device pages are held after close"])
    return "idle"
