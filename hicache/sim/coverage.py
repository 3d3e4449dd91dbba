"""Which fault has met which operation in which state, and which of these pairs a run must see."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DECLARED", "DECLARED_OF_RANKS", "Coverage", "Fault", "Meeting", "Operation", "State"]


class Operation(str, Enum):
    """What moves pages, or asks about them."""

    WRITE = "write"
    RESERVED = "reserved"
    """A write that has begun before the pass that computes its pages; until it is a node's."""
    LOAD = "load"
    QUERY = "query"
    PREFETCH = "prefetch"
    PERSIST = "persist"
    ATTACH = "attach"
    DETACH = "detach"
    CLEAR = "clear"
    STEP = "step"
    """Of a scheduler, in which its ranks agree."""


class State(str, Enum):
    """How far an operation is."""

    START = "start"
    """Asked for, but not begun."""
    QUEUED = "queued"
    """Nothing of it runs now: no job, no layer or no call carries it yet."""
    RUNNING = "running"
    """On a stream, or in a call of the backend."""
    HANGING = "hanging"
    """In a call that was given up and has not returned."""
    ENDED = "ended"
    """Its result is there and nobody has taken it yet."""


class Fault(str, Enum):
    """What goes wrong, or comes between."""

    ABORT = "abort"
    """A request is aborted: its own query, prefetch, load or reserved write; any write or persist.
    """
    RESET = "reset"
    RAISE = "raise"
    """The copy of a layer, or the backend, raises."""
    DELAY = "delay"
    """The stream stands still, or the call returns late but before it is given up."""
    TIMEOUT = "timeout"
    """The backend notices its deadline in the middle of a call."""
    HANG = "hang"
    """The call is given up."""
    LATE = "late"
    """A call that was given up returns after all."""
    REFUSE = "refuse"
    """Every worker hangs."""
    SHORT = "short"
    LONG = "long"
    WRONG_TYPE = "wrong_type"
    HOLE = "hole"
    MISSING = "missing"
    CORRUPT = "corrupt"
    TRUNCATED = "truncated"
    NO_SPACE = "no_space"
    """The store is full."""
    NO_MEMORY = "no_memory"
    """The pool, the budget or the queue has no room."""
    GIVE_UP = "give_up"
    """No insertion follows, as when the pass fails, or one whose node needs no write."""
    OTHER_PAGES = "other_pages"
    """The node of the insertion has other pages to be written."""
    CATCH_UP = "catch_up"
    """It becomes a node's while layers are missing."""
    EARLY = "early"
    """It becomes a node's when its result was taken already."""
    BUSY = "busy"
    """Something is in flight, which the store cannot be changed under."""
    LOST = "lost"
    """A rank is killed."""
    ELSEWHERE = "elsewhere"
    """None of the pages is this rank's, where ranks share them."""
    OWNERS = "owners"
    """There is room, but not on the ranks that have to have the pages."""


class Meeting(NamedTuple):
    """A fault that has met an operation in a state."""

    operation: Operation
    state: State
    fault: Fault


def _meetings(
    operations: tuple[Operation, ...], states: tuple[State, ...], *faults: Fault
) -> list[Meeting]:
    return [Meeting(*one) for one in product(operations, states, faults)]


_COPIES = (Operation.WRITE, Operation.LOAD)
_CALLS = (Operation.QUERY, Operation.PREFETCH, Operation.PERSIST)
_MOVES = (Operation.PREFETCH, Operation.PERSIST)
_RUNNING = (State.RUNNING,)
_RESERVED = (Operation.RESERVED,)

DECLARED: tuple[Meeting, ...] = (
    *_meetings(
        (*_COPIES, *_CALLS),
        (State.QUEUED, State.RUNNING, State.ENDED),
        Fault.ABORT,
        Fault.RESET,
    ),
    *_meetings(_CALLS, (State.HANGING,), Fault.ABORT, Fault.RESET, Fault.LATE),
    *_meetings((*_COPIES, *_CALLS), _RUNNING, Fault.RAISE, Fault.DELAY),
    *_meetings(_CALLS, _RUNNING, Fault.HANG, Fault.SHORT, Fault.LONG, Fault.WRONG_TYPE, Fault.HOLE),
    *_meetings(_CALLS, (State.QUEUED,), Fault.REFUSE),
    *_meetings(_MOVES, _RUNNING, Fault.TIMEOUT),
    *_meetings((Operation.QUERY,), _RUNNING, Fault.MISSING),
    *_meetings((Operation.PREFETCH,), _RUNNING, Fault.MISSING, Fault.CORRUPT, Fault.TRUNCATED),
    *_meetings((Operation.PERSIST,), _RUNNING, Fault.NO_SPACE),
    *_meetings((*_COPIES, *_CALLS, *_RESERVED), (State.START,), Fault.NO_MEMORY),
    *_meetings(
        _RESERVED,
        (State.QUEUED, State.RUNNING, State.ENDED),
        Fault.ABORT,
        Fault.RESET,
        Fault.GIVE_UP,
    ),
    *_meetings(_RESERVED, _RUNNING, Fault.RAISE, Fault.OTHER_PAGES),
    *_meetings(_RESERVED, (State.QUEUED, State.RUNNING), Fault.CATCH_UP),
    *_meetings(_RESERVED, (State.ENDED,), Fault.EARLY),
    *_meetings((Operation.ATTACH,), (State.START,), Fault.RAISE, Fault.HANG, Fault.BUSY),
    *_meetings((Operation.DETACH,), (State.START,), Fault.HANG, Fault.LATE, Fault.BUSY),
    *_meetings((Operation.CLEAR,), (State.START,), Fault.HANG, Fault.BUSY),
)
"""Every meeting that a run of `hicache.sim.simulation.COVERING_STEPS` steps has to see."""


DECLARED_OF_RANKS: tuple[Meeting, ...] = (
    *DECLARED,
    *_meetings((*_COPIES, Operation.QUERY, Operation.PERSIST), _RUNNING, Fault.LOST),
    *_meetings((Operation.STEP,), _RUNNING, Fault.DELAY, Fault.NO_MEMORY),
    *_meetings((*_COPIES, *_MOVES, *_RESERVED), _RUNNING, Fault.ELSEWHERE),
    *_meetings(_COPIES, (State.START,), Fault.OWNERS),
)
"""Likewise with more than one rank."""


class Coverage:
    """Counts meetings, and what was done.

    Args:
        num_ranks: decides what has to be met.

    Attributes:
        declared: meetings that have to be.
        counts: by meeting, declared or not.
        unmet: declared meetings that never were.
        actions: how often each was carried out, by name.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.declared = DECLARED if num_ranks == 1 else DECLARED_OF_RANKS
        self.counts: Counter[Meeting] = Counter()
        self.unmet = set(self.declared)
        self.actions: Counter[str] = Counter()

    @classmethod
    def total(cls, coverages: Sequence[Coverage]) -> Coverage:
        """Return the counts of several runs of equally many ranks together."""
        total = cls(coverages[0].num_ranks)
        for one in coverages:
            total.counts.update(one.counts)
            total.actions.update(one.actions)
            total.unmet &= one.unmet
        return total

    def note(self, operation: Operation, state: State, fault: Fault) -> None:
        """Count one meeting."""
        meeting = Meeting(operation, state, fault)
        self.counts[meeting] += 1
        self.unmet.discard(meeting)

    def table(self) -> str:
        """Return the counts for people: a line per operation and state; undeclared ones too."""
        lines = []
        for operation, state in product(Operation, State):
            cells = [
                f"{fault.value} {self.counts[meeting]}"
                for fault in Fault
                if (meeting := Meeting(operation, state, fault)) in self.declared
                or self.counts[meeting]
            ]
            if cells:
                lines.append(f"{operation.value:<9} {state.value:<8} {'  '.join(cells)}")
        return "\n".join(lines)
