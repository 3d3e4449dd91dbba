"""Several ranks in one process: one of them runs at a time, and they wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from hicache.errors import InvariantViolation, RanksLostError
from hicache.sim.pausing import Pausable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["RankMember", "SimulatedRankGroup"]

T = TypeVar("T")


class SimulatedRankGroup:
    """Lets ranks agree whose threads run in turns, so that everything follows from the seed.

    `run` gives each rank something to do, always in a thread of that rank's own, because a cache
    belongs to one thread. A rank runs until it is done or has to agree with the others; when all
    that live have come to that point each gets the minimum, and they go on in order of rank.

    One rank alone needs no thread: it runs in the caller's, and agrees with itself.

    Args:
        size: number of ranks.
        wait_for_lost: called when ranks give up another one: lets the time pass that this takes.

    Attributes:
        num_agreements: that all ranks have taken part in, or that have failed.
    """

    def __init__(self, size: int, *, wait_for_lost: Callable[[], object]) -> None:
        self._wait_for_lost = wait_for_lost
        self._threads = {rank: _RankThread() for rank in range(size)} if size > 1 else {}
        self._arrived: dict[int, _Arrival] = {}
        self._minimum: Sequence[int] = ()
        self._killed: set[int] = set()
        self._is_cut = False
        self._is_broken = False
        self._error: Exception | None = None
        self._faults: list[str] = []
        self.members = [RankMember(self, rank, size) for rank in range(size)]
        self.num_agreements = 0

    @property
    def live(self) -> list[int]:
        """The ranks that were not killed, in order."""
        return [member.rank for member in self.members if member.rank not in self._killed]

    @property
    def is_broken(self) -> bool:
        """Whether ranks have waited in vain: from then on no agreement succeeds."""
        return self._is_broken

    @property
    def misses_a_rank(self) -> bool:
        """Whether a rank was killed that the others still wait for."""
        return bool(self._killed) and not self._is_broken

    def kill(self, rank: int) -> None:
        """Let a rank do nothing any more; the others learn of it when they next agree."""
        self._killed.add(rank)

    def cut(self) -> None:
        """Let the next agreement fail on all ranks, as when one of them comes too late for it."""
        self._is_cut = True

    def run(self, tasks: Mapping[int, Callable[[], T]]) -> dict[int, T]:
        """Run one task for each rank and return what they return.

        Args:
            tasks: by rank, in order; of every rank that lives, if one of them agrees.

        Raises:
            InvariantViolation: one rank waits for another that has ended, or agrees on something
                else, or on another number of values.
            Exception: what a task has raised, that of the lowest rank.
        """
        if not self._threads:
            return {rank: task() for rank, task in tasks.items()}
        self._arrived.clear()
        runs = {rank: _Run(task) for rank, task in tasks.items()}
        for rank, run in runs.items():
            self._threads[rank].begin(run)
        while self._arrived:
            self._meet()
            waiting, self._arrived = sorted(self._arrived), {}
            for rank in waiting:
                self._threads[rank].resume()
        if self._faults:
            # Whatever has been made of them by the code under test.
            raise InvariantViolation(self._faults)
        for run in runs.values():
            if run.error is not None:
                raise run.error
        return {rank: run.result for rank, run in runs.items()}

    def meet(self, rank: int, values: Sequence[int], *, of_engine: bool) -> Sequence[int]:
        """Wait for the other ranks and return the minimum; for the thread of `rank`, in `run`.

        Args:
            rank: who calls.
            values: what it brings.
            of_engine: whether the engine does that for itself, which is nobody's business but its
                own: it goes on among those that live, and each alone when the cache does so.

        Raises:
            RanksLostError: a rank was given up, and it is not the engine that asks.
        """
        if self._is_broken and not of_engine:
            raise RanksLostError("a rank was given up")
        if self._is_broken or not self._threads:
            self.num_agreements += not of_engine
            return values
        self._arrived[rank] = _Arrival(of_engine, list(values))
        self._threads[rank].pause()
        if self._error is not None:
            raise self._error
        return self._minimum

    def close(self) -> None:
        """End the threads, of which none is in a task."""
        for thread in self._threads.values():
            thread.end()

    def _meet(self) -> None:
        """Take the minimum of what has arrived, or say why there is none."""
        self._error = None
        fault = self._disagreement()
        arrivals = list(self._arrived.values())
        of_engine = arrivals[0].of_engine
        self.num_agreements += not of_engine
        if fault is not None:
            self._faults.append(fault)
            self._error = InvariantViolation([fault])
        elif (self._killed or self._is_cut) and not of_engine:
            self._is_broken = True
            self._wait_for_lost()
            self._error = RanksLostError("a rank has not answered in time")
        else:
            first, *others = (arrival.values for arrival in arrivals)
            is_equal = all(other == first for other in others)
            self._minimum = first if is_equal else list(map(min, first, *others))

    def _disagreement(self) -> str | None:
        """Return in what the ranks that have arrived do not fit each other or those that live."""
        here = min(self._arrived)
        for rank in self.live:
            if rank not in self._arrived:
                return f"rank {rank} goes on without the agreement that rank {here} waits for"
            if self._arrived[rank].of_engine is not self._arrived[here].of_engine:
                return f"ranks {here} and {rank} agree on different things"
            num_here, num_there = (len(self._arrived[one].values) for one in (here, rank))
            if num_here != num_there:
                return f"rank {here} agrees on {num_here} values and rank {rank} on {num_there}"
        return None


class RankMember:
    """One rank of a `SimulatedRankGroup`; see `RankGroup`.

    Attributes:
        rank: its number.
        size: of the group, whoever is lost.
    """

    def __init__(self, group: SimulatedRankGroup, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.size = size

    def agree(self, values: Sequence[int]) -> Sequence[int]:
        """See `RankGroup.agree`."""
        return self._group.meet(self.rank, values, of_engine=False)

    def everywhere(self, well: bool) -> bool:
        """Return whether something went well on all ranks, as an engine finds out.

        Never when a rank was killed and nobody has noticed yet.
        """
        well_here = well and not self._group.misses_a_rank
        return bool(self._group.meet(self.rank, [well_here], of_engine=True)[0])


class _Arrival(NamedTuple):
    """What a rank brings to where it waits for the others."""

    of_engine: bool
    values: Sequence[int]


class _Run(Generic[T]):
    """A task and what has become of it."""

    def __init__(self, task: Callable[[], T]) -> None:
        self._task = task
        self.done = False
        self.result: T
        self.error: BaseException | None = None

    def __call__(self) -> None:
        try:
            self.result = self._task()
        except BaseException as error:  # noqa: BLE001  # raised again by `run`
            self.error = error
        self.done = True


class _RankThread:
    """A thread that runs tasks one after the other, each only while somebody waits for it."""

    def __init__(self) -> None:
        self._pausable = Pausable(self._serve)
        self._task: Callable[[], object] | None = None

    def begin(self, task: Callable[[], object]) -> None:
        """Run `task` until it is done or pauses; the one before is done."""
        self._task = task
        self.resume()

    def resume(self) -> None:
        """Run on, to the next pause or to the end of the task."""
        self._pausable.resume()

    def pause(self) -> None:
        """Stand still; for the task alone."""
        self._pausable.pause()

    def end(self) -> None:
        """End the thread."""
        self._task = None
        self._pausable.resume()

    def _serve(self) -> None:
        while self._task is not None:
            self._task()
            self._pausable.pause()
