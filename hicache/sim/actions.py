"""All that can happen to simulated ranks in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.sim.call_actions import CallActions
from hicache.sim.choices import Choices
from hicache.sim.copy_actions import copy_actions
from hicache.sim.group_actions import GroupActions
from hicache.sim.memory_actions import memory_actions, memory_faults
from hicache.sim.request_actions import RequestActions
from hicache.sim.store_actions import StoreActions

if TYPE_CHECKING:
    import random

    from hicache.sim.action import Action
    from hicache.sim.coverage import Coverage
    from hicache.sim.ranks import Rank, Ranks

__all__ = ["Actions"]

_NUM_HABITS = 6
_LOSING_RATE = 0.3


class Actions:
    """What can happen; choices within an action follow from `dice`.

    A scheduler's decision is one action, that every rank carries out. A fault, or the end of a
    copy or call, is an action of each rank, whose name then ends with the rank's number.

    Args:
        ranks: to whom.
        coverage: is told of faults.
        habits: decides how often what happens in this episode.

    Attributes:
        choices: what decisions are made of, the dice among it.
        table: the actions by name.
    """

    def __init__(self, ranks: Ranks, coverage: Coverage, habits: random.Random) -> None:
        self._coverage = coverage
        self.choices = Choices(habits)
        self._fault_rate = habits.choice([0.1, 0.2, 0.4])
        self._pause_rate = habits.choice([0.2, 0.4, 0.7])
        for rank in ranks.all:
            for key in self.choices.stored_keys:
                rank.system.store.fill(key)
        loses_ranks = habits.random() < _LOSING_RATE
        self.table: dict[str, Action] = {
            **RequestActions(ranks, self.choices).table(),
            **memory_actions(ranks, self.choices),
            **StoreActions(ranks, self.choices, coverage).table(),
            **GroupActions(ranks, self.choices, coverage, loses_ranks=loses_ranks).table(),
        }
        for rank in ranks.all:
            suffix = f"@{rank.number}" if len(ranks.all) > 1 else ""
            for name, action in self._of_rank(rank).items():
                self.table[name + suffix] = action._replace(rank=rank)
        for name in habits.sample(sorted(self.table), _NUM_HABITS * len(ranks.all)):
            action = self.table[name]
            self.table[name] = action._replace(weight=action.weight * habits.choice([0.25, 3.0]))

    def _of_rank(self, rank: Rank) -> dict[str, Action]:
        choices, fault_rate = self.choices, self._fault_rate
        calls = CallActions(rank, choices, fault_rate=fault_rate, pause_rate=self._pause_rate)
        return {
            **memory_faults(rank, choices),
            **copy_actions(rank, choices, self._coverage, fault_rate=fault_rate),
            **calls.table(),
        }
