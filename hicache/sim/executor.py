"""Storage work on a simulated clock: a call begins, stands still and returns when it is told to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from hicache.sim.coverage import Coverage, Fault, Operation, State
from hicache.sim.pausing import Pausable

if TYPE_CHECKING:
    from hicache.clock import Clock
    from hicache.controller import Work
    from hicache.controller.records import StorageJob
    from hicache.testing.faulty_storage import Fault as StorageFault

__all__ = ["CallPlan", "SimulatedExecutor", "StorageCall"]


class CallPlan(NamedTuple):
    """What happens to one backend call.

    Attributes:
        fault: how the backend breaks its contract.
        pause_at: where the call stands still: 0 is at its entry, n before it looks for the n-th
            page of its batch; None when it returns at once.
        hangs: whether it goes on only after it was given up.
    """

    fault: StorageFault | None = None
    pause_at: int | None = None
    hangs: bool = False


@dataclasses.dataclass(eq=False)
class StorageCall:
    """A storage job in the executor, with the call that it is in.

    Attributes:
        work: set when the job is submitted.
        since: when the call under way began.
    """

    operation: Operation
    job: StorageJob
    work: Work | None = None
    state: State = State.QUEUED
    plan: CallPlan = dataclasses.field(default_factory=CallPlan)
    since: float = 0.0
    thread: Pausable | None = None


class SimulatedExecutor:
    """An `Executor` in which nothing runs before `begin` and `resume` say so.

    Args:
        num_workers: calls in progress at a time.
        max_abandoned: calls that were given up and are made up for by a further worker, as in
            `hicache.controller.ThreadExecutor`.
        clock: what `call_timeout_seconds` is measured on.
        call_timeout_seconds: a call under way for longer is overdue.
        coverage: is told what happens to calls.

    Attributes:
        queued: jobs of which no call is under way.
        under_way: jobs in a call, given up or not.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        max_abandoned: int,
        clock: Clock,
        call_timeout_seconds: float,
        coverage: Coverage,
    ) -> None:
        self._num_workers = num_workers
        self._max_abandoned = max_abandoned
        self._clock = clock
        self._call_timeout_seconds = call_timeout_seconds
        self._coverage = coverage
        self._closing = False
        self._expected: StorageCall | None = None
        self._current: StorageCall | None = None
        self._points_to_pause: int | None = None
        self.queued: list[StorageCall] = []
        self.under_way: list[StorageCall] = []

    @property
    def num_abandoned(self) -> int:
        """See `Executor.num_abandoned`."""
        return len(self.hanging)

    @property
    def can_begin(self) -> bool:
        """Whether a worker is idle and a job waits for one."""
        num_running = len(self.under_way) - self.num_abandoned
        return bool(self.queued) and num_running < self._num_usable_workers

    @property
    def hanging(self) -> list[StorageCall]:
        """Calls that were given up."""
        return [call for call in self.under_way if call.state is State.HANGING]

    @property
    def delayed(self) -> list[StorageCall]:
        """Calls that stand still, were not given up, and can return before they are."""
        running = [call for call in self.under_way if call.state is State.RUNNING]
        return [call for call in running if not call.plan.hangs]

    @property
    def current_fault(self) -> StorageFault | None:
        """How the call that runs at this moment is to break the contract."""
        return None if self._current is None else self._current.plan.fault

    def open(self) -> SimulatedExecutor:
        """Take work, also when `close` was called, and return this executor."""
        assert not self.under_way
        self._closing = False
        return self

    def expect(self, call: StorageCall) -> None:
        """Say which job the next `submit` brings."""
        self._expected = call

    def submit(self, work: Work) -> None:
        """See `Executor.submit`."""
        call, self._expected = self._expected, None
        assert call is not None, "a job was submitted that nobody has announced"
        call.work = work
        if self._closing or not self._num_usable_workers:
            self._refuse(call)
        else:
            self.queued.append(call)

    def poll(self) -> None:
        """See `Executor.poll`."""
        now = self._clock.now()
        for call in self.under_way:
            if call.state is State.RUNNING and now - call.since > self._call_timeout_seconds:
                self._note(call, Fault.HANG)
                call.state = State.HANGING
                assert call.work is not None
                call.work.overdue()
        if not self._num_usable_workers:
            self._refuse_queued()

    def close(self, timeout_seconds: float) -> bool:
        """See `Executor.close`; does not wait, because no call returns by itself."""
        self._closing = True
        self._refuse_queued()
        return not self.under_way

    def begin(self, call: StorageCall, plan: CallPlan) -> None:
        """Let a queued job make its next call; it returns before this does, or stands still."""
        self.queued.remove(call)
        self.under_way.append(call)
        call.state, call.plan, call.since = State.RUNNING, plan, self._clock.now()
        if plan.fault is not None:
            self._note(call, Fault[plan.fault.name])
        self._points_to_pause = plan.pause_at
        if plan.pause_at is None:
            self._run(call)
            return
        call.thread = Pausable(lambda: self._run(call))
        call.thread.resume()

    def resume(self, call: StorageCall) -> None:
        """Let a call that stands still return."""
        self._note(call, Fault.LATE if call.state is State.HANGING else Fault.DELAY)
        assert call.thread is not None
        self._current = call
        call.thread.resume()

    def reach_point(self) -> None:
        """Note that the call that runs now is at a place where it can stand still."""
        call = self._current
        if call is None or self._points_to_pause is None:
            return
        self._points_to_pause -= 1
        if self._points_to_pause < 0:
            self._points_to_pause = self._current = None
            assert call.thread is not None
            call.thread.pause()

    def _run(self, call: StorageCall) -> None:
        assert call.work is not None
        self._current = call
        more = call.work.step()
        self._current = self._points_to_pause = None
        self.under_way.remove(call)
        was_given_up = call.state is State.HANGING
        call.state = State.QUEUED if more else State.ENDED
        if more and (was_given_up or self._closing):
            self._refuse(call)
        elif more:
            self.queued.append(call)

    @property
    def _num_usable_workers(self) -> int:
        return self._num_workers - max(0, self.num_abandoned - self._max_abandoned)

    def _refuse_queued(self) -> None:
        queued, self.queued = self.queued, []
        for call in queued:
            self._refuse(call)

    def _refuse(self, call: StorageCall) -> None:
        assert call.work is not None
        if not self._closing:
            self._note(call, Fault.REFUSE)
        call.state = State.ENDED
        call.work.refuse("no simulated storage worker is left")

    def _note(self, call: StorageCall, fault: Fault) -> None:
        self._coverage.note(call.operation, call.state, fault)
