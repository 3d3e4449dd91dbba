"""A life of one simulated rank: decisions that can be recorded, repeated and left out."""

from __future__ import annotations

import contextlib
import random
import traceback
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import InvariantViolation
from hicache.sim.actions import Actions
from hicache.sim.checking import check_bytes, check_ids
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.ending import close, close_again, empty, settle
from hicache.sim.scheduler import Scheduler
from hicache.sim.system import System, SystemOptions
from hicache.sim.time_limit import NoProgress, time_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.sim.coverage import Coverage

__all__ = ["Decision", "Episode"]

_SOUGHT = 20.0
"""Added to the weight of what perhaps brings about a meeting that was not yet."""

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
    """A rank with options of its own, from its construction to its end.

    Everything follows from `seed` and the decisions: the same ones give the same episode.

    Args:
        seed: decides sizes, policies and how often what is done.
        coverage: is told what happens.

    Attributes:
        log: what each step did, in words.
        is_stuck: whether the last step would never have ended.
    """

    def __init__(self, seed: str, coverage: Coverage) -> None:
        self._rng = random.Random(seed)
        self._coverage = coverage
        self.options = SystemOptions.draw(self._rng)
        self._system = System(self.options, coverage)
        self._scheduler = Scheduler(self._system, coverage)
        self._actions = Actions(self._system, self._scheduler, coverage, self._rng)
        self._closes_early = self._rng.random() < 0.5
        self.log: list[str] = []
        self.is_stuck = False

    def next_step(self) -> tuple[Decision, list[str]]:
        """Choose a decision, carry it out and return it with the invariants that it broke.

        What the coverage has not met yet is chosen more often.
        """
        names, weights, unmet = [], [], self._coverage.unmet
        for name, action in self._actions.table.items():
            if action.is_possible():
                is_sought = unmet and not unmet.isdisjoint(action.meets())
                names.append(name)
                weights.append(action.weight + _SOUGHT if is_sought else action.weight)
        decision = Decision(self._rng.choices(names, weights)[0], self._rng.getrandbits(32))
        return decision, self.repeat(decision)

    def repeat(self, decision: Decision) -> list[str]:
        """Carry out a decision and return the invariants that it broke.

        Where it is not possible, because other decisions were left out, nothing happens.
        """
        action = self._actions.table[decision.action]
        if not action.is_possible():
            return []
        self._actions.dice = random.Random(decision.entropy)
        return self._checked(decision.action, action.do)

    def finish(self) -> list[str]:
        """End everything and return the invariants that this broke.

        When nothing goes wrong any more, whatever did before, every movement ends in a bounded
        number of steps, nobody waits for ever, and every page becomes free.
        """
        system, scheduler = self._system, self._scheduler
        ends = [partial(close, system, scheduler), partial(close_again, system)]
        if not self._closes_early:
            ends = [partial(settle, system, scheduler), partial(empty, system), *ends]
        for end in ends:
            violations = self._checked(end.func.__name__, end)
            if violations:
                return violations
        return []

    def abandon(self) -> None:
        """Give back threads and memory, whatever state the rank is in.

        Not those of a step that made no progress: it may still run, and would be waited for.
        """
        if not self.is_stuck:
            with contextlib.suppress(NoProgress), time_limit(_STEP_SECONDS):
                self._system.abandon()

    def _checked(self, name: str, do: Callable[[], str]) -> list[str]:
        counters = self._system.cache.counters
        before = [counters[counter] for counter in _NO_ROOM]
        try:
            with time_limit(_STEP_SECONDS):
                self.log.append(f"{name}: {do()}")
                violations = check_ids(self._system, self._scheduler)
                if not self._system.is_closed:
                    violations += check_bytes(self._system, self._scheduler)
        except InvariantViolation as error:
            self.is_stuck = isinstance(error, NoProgress)
            violations = error.violations
        except Exception as error:  # noqa: BLE001  # whatever the code under test raises is found
            place = traceback.extract_tb(error.__traceback__)[-1]
            violations = [f"{type(error).__name__} in {place.name}: {error}"]
        for (counter, operation), count in zip(_NO_ROOM.items(), before, strict=True):
            if counters[counter] > count:
                self._coverage.note(operation, State.START, Fault.NO_MEMORY)
        return [f"{name}: {violation}" for violation in violations]
