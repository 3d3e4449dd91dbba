"""What happens to all ranks at once, or to one as a whole."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from hicache.sim.action import Action
from hicache.sim.coverage import Fault, Meeting, Operation, State
from hicache.sim.options import CALL_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from hicache.sim.choices import Choices
    from hicache.sim.coverage import Coverage
    from hicache.sim.ranks import Rank, Ranks

__all__ = ["GroupActions"]

_PASSING_SECONDS = tuple(share * CALL_TIMEOUT_SECONDS for share in (0.2, 1.1, 1.1, 2.0))
_PAUSE_SECONDS = 2.0
_MIN_AGREEMENTS = 20
"""Before the first rank is lost, so that there is something to be lost with it."""


class GroupActions:
    """Time that passes, pages that another replica stores, ranks that stand still or are lost.

    Args:
        ranks: what it happens to.
        choices: what decisions are made of.
        coverage: is told of ranks that are late or lost.
        loses_ranks: whether any is lost in this episode.
    """

    def __init__(
        self, ranks: Ranks, choices: Choices, coverage: Coverage, *, loses_ranks: bool
    ) -> None:
        self._ranks = ranks
        self._choices = choices
        self._coverage = coverage
        self._loses_ranks = loses_ranks

    def table(self) -> dict[str, Action]:
        """Return the actions by name."""
        table = {
            "pass_time": Action(2, self._is_time_awaited, self._pass_time, self._of_time),
            "fill_store": Action(0.7, lambda: True, self._fill_store),
        }
        if len(self._ranks.all) > 1:
            table |= {
                "fill_one_store": Action(0.3, lambda: True, self._fill_one_store),
                "pause_rank": Action(0.5, lambda: True, self._pause_rank, self._of_pause),
                "kill_rank": Action(0.15, self._can_lose, self._kill_rank, self._of_loss, 2),
                "cut_off": Action(0.1, self._can_lose, self._cut_off, self._of_loss, 2),
            }
        return table

    def _is_time_awaited(self) -> bool:
        return any(self._awaits_time(rank) for rank in self._ranks.live)

    def _awaits_time(self, rank: Rank) -> bool:
        executor = rank.system.executor
        num_running = len(executor.under_way) - executor.num_abandoned
        return num_running > 0 or bool(rank.scheduler.moving)

    def _of_time(self) -> set[Meeting]:
        return set(chain.from_iterable(rank.prospects.of_time() for rank in self._ranks.live))

    def _pass_time(self) -> str:
        seconds = self._choices.dice.choice(_PASSING_SECONDS)
        self._ranks.pass_time(seconds)
        return f"{seconds} s"

    def _fill_store(self) -> str:
        """Store the pages of a key in all shards, as another replica might do."""
        key = self._choices.dice.choice(self._choices.keys)
        for rank in self._ranks.live:
            rank.system.store.fill(key)
        return f"{len(key)} tokens"

    def _fill_one_store(self) -> str:
        """Store them in one shard, where another replica has not come further."""
        dice = self._choices.dice
        key, rank = dice.choice(self._choices.keys), dice.choice(self._ranks.live)
        rank.system.store.fill(key)
        return f"{len(key)} tokens on rank {rank.number}"

    def _pause_rank(self) -> str:
        """Let one rank come late to the agreement of a step: the others wait for it."""
        rank = self._choices.dice.choice(self._ranks.live)
        self._coverage.note(Operation.STEP, State.RUNNING, Fault.DELAY)
        text = self._ranks.take_results(late=rank.number, seconds=_PAUSE_SECONDS)
        return f"rank {rank.number} is late; {text}"

    def _of_pause(self) -> set[Meeting]:
        return {Meeting(Operation.STEP, State.RUNNING, Fault.DELAY)}

    def _can_lose(self) -> bool:
        group = self._ranks.group
        is_old = group.num_agreements > _MIN_AGREEMENTS
        return self._loses_ranks and is_old and len(group.live) > 1

    def _kill_rank(self) -> str:
        rank = self._choices.dice.choice(self._ranks.live)
        self._note_loss()
        self._ranks.group.kill(rank.number)
        return f"rank {rank.number} is gone"

    def _cut_off(self) -> str:
        """Let a rank come so late to the next agreement that all give up, itself too."""
        self._note_loss()
        self._ranks.group.cut()
        return "the next agreement fails"

    def _note_loss(self) -> None:
        for meeting in self._of_loss():
            self._coverage.note(*meeting)

    def _of_loss(self) -> set[Meeting]:
        """Return what the loss of a rank meets, if it is the first."""
        group = self._ranks.group
        if group.is_broken or len(group.live) < len(self._ranks.all):
            return set()
        movements = chain.from_iterable(
            rank.scheduler.progress.of_all() for rank in self._ranks.live
        )
        return {Meeting(*one, Fault.LOST) for one in movements}
