"""What happens to the copies of one rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache.radix import CopyKind
from hicache.sim.action import Action
from hicache.sim.coverage import Fault, Operation, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.sim.choices import Choices
    from hicache.sim.coverage import Coverage, Meeting
    from hicache.sim.ranks import Rank

__all__ = ["copy_actions"]

_WEIGHTS = {CopyKind.WRITE: 12.0, CopyKind.LOAD: 6.0}
_NUM_PIECES = (1, 2, 3, 6, 9, 14, 30)


def copy_actions(
    rank: Rank, choices: Choices, coverage: Coverage, *, fault_rate: float
) -> dict[str, Action]:
    """Return them by name; the higher `fault_rate`, the more often copies break."""
    table: dict[str, Action] = {}
    for kind, weight in _WEIGHTS.items():
        copies, name = _Copies(rank, kind, choices, coverage), kind.value
        table |= {
            f"run_{name}": Action(weight, copies.can_run, copies.run, copies.of_end),
            f"break_{name}": Action(
                5 * fault_rate, copies.can_run, copies.break_one, copies.meets(Fault.RAISE)
            ),
            f"stall_{name}": Action(0.15, copies.can_run, copies.stall, copies.meets(Fault.DELAY)),
            f"resume_{name}": Action(2, copies.is_stalled, copies.go_on),
        }
    return table


class _Copies:
    """The copies in one direction."""

    def __init__(self, rank: Rank, kind: CopyKind, choices: Choices, coverage: Coverage) -> None:
        self._system = rank.system
        self._prospects = rank.prospects
        self._kind = kind
        self._operation = Operation(kind.value)
        self._choices = choices
        self._coverage = coverage

    def can_run(self) -> bool:
        return self._system.device.can_run(self._kind.value)

    def is_stalled(self) -> bool:
        return self._kind.value in self._system.device.stalled

    def of_end(self) -> set[Meeting]:
        return self._prospects.of_end(self._operation)

    def meets(self, fault: Fault) -> Callable[[], set[Meeting]]:
        return partial(self._prospects.of_copy, self._operation, fault)

    def run(self) -> str:
        """Run some pieces of work of the stream."""
        stream = self._system.device.streams[self._kind.value]
        count = sum(stream.run_one() for _ in range(self._choices.dice.choice(_NUM_PIECES)))
        return f"{count} pieces, {stream.pending} left"

    def break_one(self) -> str:
        """Run some pieces; the first copy of a layer among them, if there is one, breaks."""
        breaking = self._system.breaking
        breaking.add(self._kind)
        text = self.run()
        breaking.discard(self._kind)
        return text

    def stall(self) -> str:
        self._system.device.stalled.add(self._kind.value)
        if (self._operation, State.RUNNING) in self._system.mover.states():
            self._coverage.note(self._operation, State.RUNNING, Fault.DELAY)
        return "its stream stands still"

    def go_on(self) -> str:
        self._system.device.stalled.discard(self._kind.value)
        return "its stream goes on"
