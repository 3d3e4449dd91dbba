"""What the simulation of several ranks has found, each in as few calls as it takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sim_builders import group, key_of, serve

from hicache.radix import CopyKind
from hicache.sim.comparing import differences
from hicache.sim.executor import CallPlan

if TYPE_CHECKING:
    from hicache.sim.ranks import Rank, Ranks

KEYS = [key_of(number, number + 10) for number in range(4)]


def hold_on_host(ranks: Ranks) -> None:
    """Bring all keys to the host alone."""

    def do(rank: Rank) -> None:
        for number, key in enumerate(KEYS):
            serve(rank.scheduler, key, f"before-{number}")
        for _ in range(3):
            rank.system.run_all()
        rank.system.cache.evict(99)

    ranks.each(do)


def begin_load(rank: Rank, *, number: int) -> str:
    scheduler = rank.scheduler
    scheduler.submit(f"r{number}", KEYS[number], prefetch=False)
    scheduler.admit(scheduler.request(f"r{number}"), mem_quota=None)
    return scheduler.start_loads()


def run_loads(rank: Rank) -> None:
    while rank.system.device.streams[CopyKind.LOAD.value].run_one():
        pass


def test_a_close_with_a_call_that_hangs_on_one_rank_is_no_disagreement() -> None:
    """The other rank noted that its store was closed, and all believed that they had diverged."""
    with group(2) as ranks:
        ranks.alike(lambda rank: rank.scheduler.submit("r", KEYS[0], prefetch=True))
        executor = ranks.all[1].system.executor
        executor.begin(executor.queued[0], CallPlan(pause_at=0))
        assert ranks.each(lambda rank: rank.system.cache.close(1.0)) == [True, False]
        counters = [rank.system.cache.counters for rank in ranks.all]
        assert [one["ranks_diverged"] for one in counters] == [0, 0]


def test_a_slot_is_free_for_the_next_load_on_all_ranks_or_on_none() -> None:
    """That of a load that had ended on one rank, and that nobody waited for, was free there."""
    with group(2, num_load_slots=3, num_device_pages=16, num_host_pages=16) as ranks:
        hold_on_host(ranks)
        for number in range(2):
            ranks.alike(partial(begin_load, number=number))
            for rank in ranks.all:
                run_loads(rank)
            ranks.take_results()
        ranks.alike(partial(begin_load, number=2))
        ranks.alike(lambda rank: rank.scheduler.abort(rank.scheduler.request("r2")))
        run_loads(ranks.all[0])
        assert ranks.alike(partial(begin_load, number=3)) == "no slot is free"
        ranks.take_results()
        assert differences(ranks.all) == []


def test_a_load_that_ends_otherwise_on_another_rank_leaves_equal_trees_when_a_rank_is_lost() -> (
    None
):
    """Each rank that was left took it as it ended there, well or not, or not at all."""
    with group(3) as ranks:
        hold_on_host(ranks)
        ranks.alike(partial(begin_load, number=0))
        run_loads(ranks.all[0])
        ranks.all[1].system.breaking.add(CopyKind.LOAD)
        run_loads(ranks.all[1])
        ranks.group.cut()
        ranks.take_results()
        assert differences(ranks.all) == []


def test_pages_of_a_load_whose_rank_is_lost_are_free_when_the_cache_is_closed() -> None:
    with group(2) as ranks:
        hold_on_host(ranks)
        ranks.alike(partial(begin_load, number=0))
        ranks.group.kill(1)
        ranks.take_results()
        left = ranks.first
        assert left.system.cache.ranks_lost
        ranks.alike(lambda rank: rank.scheduler.abort(rank.scheduler.request("r0")))
        assert ranks.each(lambda rank: rank.system.cache.close(1.0)) == [True]
        assert len(left.system.free_pages[0]) == left.system.options.num_device_pages
