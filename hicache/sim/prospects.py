"""What could be met next: which meetings an action could bring about in the present state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.sim.coverage import DECLARED, Fault, Meeting, Operation, State
from hicache.sim.options import CALL_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.sim.executor import StorageCall
    from hicache.sim.scheduler import Scheduler
    from hicache.sim.system import System

__all__ = ["Prospects"]


class Prospects:
    """Tells an episode what to do when it looks for meetings that were not yet.

    Hopes, not promises: it errs on the side of too much.

    Args:
        system: the rank.
        scheduler: its requests.
    """

    def __init__(self, system: System, scheduler: Scheduler) -> None:
        self._system = system
        self._executor = system.executor
        self._mover = system.mover
        self._clock = system.clock
        self._scheduler = scheduler

    def of_abort(self) -> set[Meeting]:
        """Of aborting a request."""
        scheduler = self._scheduler
        return {
            Meeting(*one, Fault.ABORT)
            for request in scheduler.requests
            for one in scheduler.progress.met_by_abort(request)
        }

    def of_reset(self) -> set[Meeting]:
        """Of a reset."""
        return {Meeting(*one, Fault.RESET) for one in self._scheduler.progress.of_all()}

    def of_back_up(self) -> set[Meeting]:
        """Of a write that is queued and does not start at once."""
        if all(node.backed_or_in_flight for node in self._system.cache.tree.nodes()):
            return set()
        return _interruptions(Operation.WRITE, State.QUEUED)

    def of_end(self, operation: Operation) -> set[Meeting]:
        """Of the end of a copy."""
        meetings = _interruptions(operation, State.ENDED)
        if operation is Operation.WRITE and self._scheduler.reserving:
            meetings |= _ends_of_reserved(State.ENDED)
            meetings.add(Meeting(Operation.RESERVED, State.ENDED, Fault.EARLY))
        return meetings

    def of_copy(self, operation: Operation, fault: Fault) -> set[Meeting]:
        """Of a fault in a copy."""
        meetings = {Meeting(operation, State.RUNNING, fault)}
        if operation is Operation.WRITE and self._scheduler.reserving:
            meetings.add(Meeting(Operation.RESERVED, State.RUNNING, fault))
        return meetings

    def of_begin_pass(self) -> set[Meeting]:
        """Of a pass for which writes may be reserved."""
        if not self._system.writes_by_layer:
            return set()
        return {meeting for meeting in DECLARED if meeting.operation is Operation.RESERVED}

    def of_going_on(self) -> set[Meeting]:
        """Of the next layer, or of the insertion behind the last one."""
        forward, states = self._scheduler.forward, self._reserved_states()
        assert forward is not None
        if states and not forward.computed:
            return _ends_of_reserved(State.RUNNING) | _ends_of_reserved(State.ENDED)
        return {
            Meeting(Operation.RESERVED, state, fault)
            for state in states
            for fault in (Fault.OTHER_PAGES, Fault.CATCH_UP, Fault.EARLY)
        }

    def of_failing_pass(self) -> set[Meeting]:
        """Of a pass that fails."""
        states = self._reserved_states()
        return {Meeting(Operation.RESERVED, state, Fault.GIVE_UP) for state in states}

    def of_call(self, fault: Fault) -> set[Meeting]:
        """Of a fault in the next call."""
        return {Meeting(call.operation, State.RUNNING, fault) for call in self._executor.queued}

    def of_spoiling(self, fault: Fault) -> set[Meeting]:
        """Of losing or damaging a stored page."""
        reads = self._mover.reading_jobs()
        return {Meeting(Operation.PREFETCH, State.RUNNING, fault)} if reads else set()

    def of_hang(self) -> set[Meeting]:
        """Of a next call that does not return."""
        return self._hang(self._executor.queued)

    def of_time(self) -> set[Meeting]:
        """Of letting time pass."""
        early = [call for call in self._running() if not self._is_late(call)]
        timeouts = {Meeting(call.operation, State.RUNNING, Fault.TIMEOUT) for call in early}
        return timeouts | self._hang(early)

    def of_polling(self) -> set[Meeting]:
        """Of looking for calls that are past their deadline, and for results."""
        meetings = self._hang([call for call in self._running() if self._is_late(call)])
        if State.ENDED in self._reserved_states():
            meetings.add(Meeting(Operation.RESERVED, State.ENDED, Fault.EARLY))
        return meetings

    def of_return(self) -> set[Meeting]:
        """Of letting a call go on."""
        late = [call for call in self._executor.delayed if self._is_late(call)]
        return {Meeting(call.operation, State.RUNNING, Fault.TIMEOUT) for call in late}

    def _reserved_states(self) -> set[State]:
        if not self._scheduler.reserving:
            return set()
        movements = self._scheduler.progress.of_all()
        return {state for operation, state in movements if operation is Operation.RESERVED}

    def _hang(self, calls: Iterable[StorageCall]) -> set[Meeting]:
        """What can come of it when `calls` hang, also for what is queued behind them."""
        meetings: set[Meeting] = set()
        for call in calls:
            meetings |= _interruptions(call.operation, State.HANGING)
            meetings.add(Meeting(call.operation, State.HANGING, Fault.LATE))
            meetings.add(Meeting(call.operation, State.RUNNING, Fault.HANG))
        queued = self._executor.queued if meetings else ()
        return meetings | {Meeting(one.operation, State.QUEUED, Fault.REFUSE) for one in queued}

    def _running(self) -> list[StorageCall]:
        return [call for call in self._executor.under_way if call.state is State.RUNNING]

    def _is_late(self, call: StorageCall) -> bool:
        return self._clock.now() - call.since > CALL_TIMEOUT_SECONDS


def _ends_of_reserved(state: State) -> set[Meeting]:
    give_up = Meeting(Operation.RESERVED, state, Fault.GIVE_UP)
    return {*_interruptions(Operation.RESERVED, state), give_up}


def _interruptions(operation: Operation, state: State) -> set[Meeting]:
    return {Meeting(operation, state, fault) for fault in (Fault.ABORT, Fault.RESET)}
