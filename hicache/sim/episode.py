"""A life of simulated ranks: decisions that can be recorded, repeated and left out."""

from __future__ import annotations

import contextlib
import random
import traceback
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import InvariantViolation
from hicache.sim.actions import Actions
from hicache.sim.checking import check_bytes, check_ids
from hicache.sim.comparing import differences
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.ending import close, close_again, empty, settle
from hicache.sim.options import SystemOptions
from hicache.sim.ranks import Ranks
from hicache.sim.time_limit import NoProgress, time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.sim.action import Action
    from hicache.sim.coverage import Coverage
    from hicache.sim.ranks import Rank
    from hicache.sim.scheduler import Scheduler
    from hicache.sim.system import System

__all__ = ["Decision", "Episode"]

_STEPS_ALONE = 60

_STEP_SECONDS = 3.0
"""Of processor time; ten thousand times what a step takes."""

_NO_ROOM = {
    "unwritten_pages": Operation.WRITE,
    "load_back_no_memory": Operation.LOAD,
    "prefetch_rate_limited": Operation.QUERY,
    "prefetch_no_host_memory": Operation.PREFETCH,
    "persist_queue_full": Operation.PERSIST,
}
"""How `HiRadixCache.counters` calls it when an operation cannot begin."""


class Decision(NamedTuple):
    """One step: what is done, and the number that all further choices follow from."""

    action: str
    entropy: int


class Episode:
    """Ranks with options of their own, from their construction to their end.

    Everything follows from `seed`, the number of ranks and the decisions: the same ones give the
    same episode.

    Args:
        seed: decides sizes, policies and how often what is done.
        coverage: is told what happens; says how many ranks there are.
        seeks: whether what the coverage has not met yet is chosen more often.

    Attributes:
        log: what each step did, in words.
        is_stuck: whether the last step would never have ended.
    """

    def __init__(self, seed: str, coverage: Coverage, *, seeks: bool = False) -> None:
        self._seeks = seeks
        self._rng = random.Random(seed)
        self._coverage = coverage
        self.options = SystemOptions.draw(self._rng, num_ranks=coverage.num_ranks)
        self._ranks = Ranks(
            self.options, num_ranks=coverage.num_ranks, coverage=coverage, habits=self._rng
        )
        self._actions = Actions(self._ranks, coverage, self._rng)
        self._closes_early = self._rng.random() < 0.5
        self.log: list[str] = []
        self.is_stuck = False
        self._num_steps_alone = 0

    @property
    def is_spent(self) -> bool:
        """Whether not much happens any more, because a rank was lost some steps ago."""
        return self._num_steps_alone >= _STEPS_ALONE

    def next_step(self) -> tuple[Decision, list[str]]:
        """Choose a decision, carry it out and return it with the invariants that it broke."""
        is_alone = self._ranks.group.is_broken
        self._num_steps_alone += is_alone
        names, weights = [], []
        unmet = self._coverage.unmet if self._seeks and not is_alone else frozenset()
        for name, action in self._actions.table.items():
            if self._is_possible(action):
                is_sought = unmet and not unmet.isdisjoint(action.meets())
                names.append(name)
                weights.append(action.weight + (action.eagerness if is_sought else 0.0))
        decision = Decision(self._rng.choices(names, weights)[0], self._rng.getrandbits(32))
        return decision, self.repeat(decision)

    def repeat(self, decision: Decision) -> list[str]:
        """Carry out a decision and return the invariants that it broke.

        Where it is not possible, because other decisions were left out, nothing happens.
        """
        action = self._actions.table[decision.action]
        if not self._is_possible(action):
            return []
        self._coverage.actions[decision.action.partition("@")[0]] += 1
        self._actions.choices.dice = random.Random(decision.entropy)
        return self._checked(decision.action, action.do, of_rank=action.rank)

    def finish(self) -> list[str]:
        """End everything and return the invariants that this broke.

        When nothing goes wrong any more, whatever did before, every movement ends in a bounded
        number of steps, nobody waits for ever, and every page becomes free.
        """
        ends = [close, close_again] if self._closes_early else [settle, empty, close, close_again]
        for end in ends:
            # What a first close finds under way, and so leaves open, is each rank's own.
            violations = self._checked(
                end.__name__, partial(self._end, end), compares=end is not close
            )
            if violations:
                return violations
        return []

    def abandon(self) -> None:
        """Give back threads and memory, whatever state the ranks are in.

        Not those of a step that made no progress: it may still run, and would be waited for.
        """
        if not self.is_stuck:
            with contextlib.suppress(NoProgress), time_limit(_STEP_SECONDS):
                for rank in self._ranks.all:
                    rank.system.abandon()
                self._ranks.close()

    def _is_possible(self, action: Action) -> bool:
        is_lost = action.rank is not None and action.rank not in self._ranks.live
        return not is_lost and bool(action.is_possible())

    def _end(self, end: Callable[[System, Scheduler], str]) -> str:
        told = self._ranks.each(lambda rank: end(rank.system, rank.scheduler))
        return ", ".join(told)

    def _checked(
        self,
        name: str,
        do: Callable[[], str],
        *,
        of_rank: Rank | None = None,
        compares: bool = True,
    ) -> list[str]:
        """Do something to one rank or to all, and return what is wrong afterwards."""
        before = self._num_without_room()
        try:
            with time_limit(_STEP_SECONDS):
                self.log.append(f"{name}: {do()}")
                violations = self._violations([of_rank] if of_rank else self._ranks.live)
                if compares and of_rank is None:
                    violations += differences(self._ranks.live)
        except InvariantViolation as error:
            self.is_stuck = isinstance(error, NoProgress)
            violations = error.violations
        except Exception as error:  # noqa: BLE001  # whatever the code under test raises is found
            place = traceback.extract_tb(error.__traceback__)[-1]
            violations = [f"{type(error).__name__} in {place.name}: {error}"]
        for operation, count, now in zip(
            _NO_ROOM.values(), before, self._num_without_room(), strict=True
        ):
            if now > count:
                self._coverage.note(operation, State.START, Fault.NO_MEMORY)
        return [f"{name}: {violation}" for violation in violations]

    def _violations(self, ranks: Sequence[Rank]) -> list[str]:
        violations: list[str] = []
        for rank in ranks:
            found = check_ids(rank.system, rank.scheduler)
            if not rank.system.is_closed:
                found += check_bytes(rank.system, rank.scheduler)
            if len(self._ranks.all) > 1:
                found = [f"rank {rank.number}: {violation}" for violation in found]
            violations += found
        return violations

    def _num_without_room(self) -> list[int]:
        """Return how often each kind of operation could not begin."""
        counters = self._ranks.first.system.cache.counters
        return [counters[counter] for counter in _NO_ROOM]
