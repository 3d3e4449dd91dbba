"""The ranks of one engine replica: each does what the scheduler decides, with faults of its own."""

from __future__ import annotations

import dataclasses
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hicache.clock import ManualClock
from hicache.errors import InvariantViolation
from hicache.pools.agreed_allocator import AgreedAllocator
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.faults import WatchedStore
from hicache.sim.prospects import Prospects
from hicache.sim.rank_group import SimulatedRankGroup
from hicache.sim.scheduler import Scheduler
from hicache.sim.stamps import Stamps
from hicache.sim.system import System

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from hicache.sim.coverage import Coverage
    from hicache.sim.options import SystemOptions
    from hicache.sim.rank_group import RankMember

__all__ = ["AGREEMENT_TIMEOUT_SECONDS", "Rank", "Ranks"]

AGREEMENT_TIMEOUT_SECONDS = 30.0
"""How long a rank waits for another one before it gives it up."""

_CLOCK_RATES = (1.0, 0.8, 1.3)
_MAX_CLOCK_SKEW_SECONDS = 1000.0

T = TypeVar("T")


class Rank(NamedTuple):
    """One rank: its parts, and its side of the scheduler."""

    number: int
    system: System
    scheduler: Scheduler
    prospects: Prospects


class Ranks:
    """Ranks with equal trees over different shards of the KV, each with a store of its own.

    Or over different pages of it, with one store for all: see `SystemOptions.shares_pages`.

    Args:
        options: sizes and policies.
        num_ranks: how many.
        coverage: is told what happens.
        habits: decides in what the ranks differ.

    Attributes:
        group: through which they agree.
        all: every rank, lost or not.
    """

    def __init__(
        self, options: SystemOptions, *, num_ranks: int, coverage: Coverage, habits: random.Random
    ) -> None:
        self.group = SimulatedRankGroup(
            num_ranks, wait_for_lost=partial(self.pass_time, AGREEMENT_TIMEOUT_SECONDS)
        )
        self._coverage = coverage
        self._clocks = [_RankClock(0.0, 1.0)] if num_ranks == 1 else _clocks(num_ranks, habits)
        self.all: list[Rank] = []
        self._shared_store: WatchedStore | None = None
        if options.shares_pages:
            self._shared_store = WatchedStore(Stamps(options.geometries, options.layout))
        built = self.group.run(
            {
                member.rank: partial(
                    self._build, member, _own_options(options, member, habits), coverage
                )
                for member in self.group.members
            }
        )
        self.all = list(built.values())

    @property
    def live(self) -> list[Rank]:
        """The ranks that were not killed."""
        return [self.all[number] for number in self.group.live]

    @property
    def first(self) -> Rank:
        """One of those that live; what all have in common is looked up there."""
        return self.all[self.group.live[0]]

    def each(self, do: Callable[[Rank], T]) -> list[T]:
        """Let each rank that lives do the same, and return what comes of it in order of rank."""
        tasks = {rank.number: partial(_do, rank, do) for rank in self.live}
        return list(self.group.run(tasks).values())

    def alike(self, do: Callable[[Rank], str]) -> str:
        """Let each rank that lives do the same and tell the same.

        Raises:
            InvariantViolation: they tell different things.
        """
        told = self.each(do)
        if len(set(told)) > 1:
            raise InvariantViolation([f"ranks do different things: {', '.join(map(repr, told))}"])
        return told[0]

    def take_results(self, *, late: int | None = None, seconds: float = 0.0) -> str:
        """Take the step that all agree in.

        Args:
            late: a rank that lets the others wait.
            seconds: for how long.

        Raises:
            InvariantViolation: it took another number of agreements than one.
        """

        def step(rank: Rank) -> str:
            if rank.number == late:
                self.pass_time(seconds)
            rank.system.cache.check_hicache_events()
            return f"{rank.system.cache.num_in_flight} in flight"

        before, was_broken = self.group.num_agreements, self.group.is_broken
        text = self.alike(step)
        if any(_has_more_than_others(rank) for rank in self.live):
            self._coverage.note(Operation.STEP, State.RUNNING, Fault.NO_MEMORY)
        num_agreements = self.group.num_agreements - before
        if len(self.all) > 1 and not was_broken and num_agreements != 1:
            raise InvariantViolation([f"a step took {num_agreements} agreements"])
        return text

    def pass_time(self, seconds: float) -> None:
        """Let time pass, by each rank's own clock."""
        for clock in self._clocks:
            clock.advance(seconds)

    def close(self) -> None:
        """End the threads of the ranks."""
        self.group.close()

    def _build(self, member: RankMember, options: SystemOptions, coverage: Coverage) -> Rank:
        number = member.rank
        system = System(
            options,
            coverage,
            ranks=member,
            number=number,
            clock=self._clocks[number],
            store=self._shared_store,
        )
        scheduler = Scheduler(system, coverage, everywhere=member.everywhere)
        return Rank(number, system, scheduler, Prospects(system, scheduler))


def _do(rank: Rank, do: Callable[[Rank], T]) -> T:
    result = do(rank)
    if rank.system.cache.ranks_lost:
        rank.scheduler.go_on_alone()
    return result


class _RankClock(ManualClock):
    """A clock that shows another time than others, and goes faster or slower."""

    def __init__(self, start_seconds: float, rate: float) -> None:
        super().__init__(start_seconds)
        self._rate = rate

    def advance(self, seconds: float) -> None:
        """See `ManualClock.advance`."""
        super().advance(seconds * self._rate)


def _has_more_than_others(rank: Rank) -> bool:
    """Whether the rank has free pages that it must not give, because another rank lacks them."""
    controller = rank.system.cache.controller
    return any(
        isinstance(one, AgreedAllocator) and one.num_available < len(one.free_pages())
        for one in (controller.device_allocator, controller.host_allocator)
    )


def _clocks(num_ranks: int, habits: random.Random) -> list[_RankClock]:
    return [
        _RankClock(habits.uniform(0.0, _MAX_CLOCK_SKEW_SECONDS), habits.choice(_CLOCK_RATES))
        for _ in range(num_ranks)
    ]


def _own_options(
    options: SystemOptions, member: RankMember, habits: random.Random
) -> SystemOptions:
    """Return the options of one rank: what is no decision of the scheduler may differ."""
    if options.shares_pages:
        options = dataclasses.replace(
            options,
            num_device_pages=ceil(options.num_device_pages / member.size),
            num_host_pages=ceil(options.num_host_pages / member.size),
        )
    if member.rank == 0:
        return options
    if not options.shares_pages:
        options = dataclasses.replace(
            options,
            num_device_pages=options.num_device_pages + habits.choice([0, 0, 1, -1]),
            num_host_pages=options.num_host_pages + habits.choice([0, 0, 1, -1]),
            num_withheld=(habits.choice([0, 0, 1, 3]), habits.choice([0, 0, 1, 3])),
        )
    return dataclasses.replace(
        options,
        max_abandoned=habits.choice([options.max_abandoned, 0, 8]),
        max_store_pages=habits.choice([options.max_store_pages, 6]),
    )
