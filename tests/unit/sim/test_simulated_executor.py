"""The simulated executor keeps the contract of executors, one call at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hicache.clock import ManualClock
from hicache.sim.coverage import Coverage, Fault, Meeting, Operation, State
from hicache.sim.executor import CallPlan, SimulatedExecutor, StorageCall
from hicache.testing.faulty_storage import Fault as StorageFault

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_SECONDS = 1.5
QUERY, RUNNING, HANGING, ENDED = Operation.QUERY, State.RUNNING, State.HANGING, State.ENDED


class Desk:
    """An executor and what its works report.

    Attributes:
        log: what the works did, in order.
        faults: that works saw when they entered and when they went on.
    """

    def __init__(self, *, num_workers: int = 2, max_abandoned: int = 0) -> None:
        self.clock, self.coverage = ManualClock(), Coverage()
        self.executor = SimulatedExecutor(
            num_workers=num_workers,
            max_abandoned=max_abandoned,
            clock=self.clock,
            call_timeout_seconds=TIMEOUT_SECONDS,
            coverage=self.coverage,
        )
        self.log: list[str] = []
        self.faults: list[StorageFault | None] = []

    def submit(self, name: str, *, num_steps: int = 1) -> StorageCall:
        job: Any = name
        call = StorageCall(QUERY, job)
        self.executor.expect(call)
        self.executor.submit(_Work(self, name, num_steps))
        return call

    def hang(self, name: str) -> StorageCall:
        """Begin a call and let it be given up."""
        call = self.submit(name)
        self.executor.begin(call, CallPlan(pause_at=0, hangs=True))
        self.clock.advance(2 * TIMEOUT_SECONDS)
        self.executor.poll()
        return call

    def count(self, state: State, fault: Fault) -> int:
        return self.coverage.counts[Meeting(QUERY, state, fault)]


class _Work:
    def __init__(self, desk: Desk, name: str, num_steps: int) -> None:
        self._desk = desk
        self._name = name
        self._left = num_steps
        self._is_overdue = False

    def step(self) -> bool:
        self._desk.log.append(f"{self._name} enters")
        self._desk.faults.append(self._desk.executor.current_fault)
        self._desk.executor.reach_point()
        self._desk.faults.append(self._desk.executor.current_fault)
        self._desk.log.append(f"{self._name} returns")
        self._left -= 1
        return self._left > 0 and not self._is_overdue

    def overdue(self) -> None:
        self._is_overdue = True
        self._desk.log.append(f"{self._name} overdue")

    def refuse(self, reason: str) -> None:
        self._desk.log.append(f"{self._name} refused")


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    for call in list(desk.executor.under_way):
        desk.executor.resume(call)


def test_nothing_runs_before_it_is_begun_and_any_job_may_be_first(desk: Desk) -> None:
    first, second = desk.submit("a"), desk.submit("b")
    assert desk.log == []
    desk.executor.begin(second, CallPlan())
    assert desk.log == ["b enters", "b returns"]
    assert (first.state, second.state) == (State.QUEUED, ENDED)


def test_a_job_goes_on_call_by_call(desk: Desk) -> None:
    call = desk.submit("a", num_steps=2)
    desk.executor.begin(call, CallPlan())
    assert (call.state, desk.executor.queued) == (State.QUEUED, [call])
    desk.executor.begin(call, CallPlan())
    assert (call.state, desk.executor.queued) == (ENDED, [])


def test_a_call_stands_still_while_another_goes_by(desk: Desk) -> None:
    slow, quick = desk.submit("slow"), desk.submit("quick")
    desk.executor.begin(slow, CallPlan(pause_at=0))
    desk.executor.begin(quick, CallPlan())
    assert desk.log == ["slow enters", "quick enters", "quick returns"]
    assert desk.executor.delayed == [slow]
    desk.executor.resume(slow)
    assert (desk.log[-1], slow.state) == ("slow returns", ENDED)
    assert desk.count(RUNNING, Fault.DELAY) == 1


def test_a_call_is_overdue_after_its_time_and_not_before(desk: Desk) -> None:
    call = desk.submit("a", num_steps=2)
    desk.executor.begin(call, CallPlan(pause_at=0))
    desk.clock.advance(TIMEOUT_SECONDS)
    desk.executor.poll()
    assert call.state is RUNNING
    desk.clock.advance(0.1)
    desk.executor.poll()
    desk.executor.poll()
    assert (call.state, desk.log[1:]) == (HANGING, ["a overdue"])
    assert desk.executor.num_abandoned == 1
    desk.executor.resume(call)
    assert (call.state, desk.executor.queued, desk.executor.under_way) == (ENDED, [], [])
    assert desk.count(RUNNING, Fault.HANG) == desk.count(HANGING, Fault.LATE) == 1


def test_without_a_worker_left_jobs_are_refused_and_a_return_makes_one() -> None:
    desk = Desk(num_workers=1)
    hung = desk.submit("hung")
    desk.submit("queued")
    desk.executor.begin(hung, CallPlan(pause_at=0, hangs=True))
    assert not desk.executor.can_begin
    desk.clock.advance(2 * TIMEOUT_SECONDS)
    desk.executor.poll()
    desk.submit("late")
    assert desk.log[2:] == ["queued refused", "late refused"]
    assert desk.count(State.QUEUED, Fault.REFUSE) == 2
    desk.executor.resume(hung)
    desk.submit("next")
    assert desk.executor.can_begin


def test_as_many_hung_calls_as_may_be_abandoned_take_no_worker() -> None:
    desk = Desk(num_workers=1, max_abandoned=1)
    first = desk.hang("first")
    assert desk.submit("next").state is State.QUEUED
    desk.executor.begin(desk.executor.queued[0], CallPlan())
    second = desk.hang("second")
    assert desk.submit("refused").state is ENDED
    for call in (first, second):
        desk.executor.resume(call)


def test_close_refuses_what_waits_and_does_not_wait_for_what_runs(desk: Desk) -> None:
    running = desk.submit("running", num_steps=2)
    desk.submit("queued")
    desk.executor.begin(running, CallPlan(pause_at=0))
    assert not desk.executor.close(1.0)
    desk.executor.resume(running)
    assert desk.executor.close(1.0)
    desk.submit("late")
    assert desk.log == [
        "running enters",
        "queued refused",
        "running returns",
        "running refused",
        "late refused",
    ]


def test_the_backend_learns_the_fault_of_the_call_that_runs(desk: Desk) -> None:
    broken, sound = desk.submit("broken"), desk.submit("sound")
    assert desk.executor.current_fault is None
    desk.executor.begin(broken, CallPlan(StorageFault.SHORT, pause_at=0))
    desk.executor.begin(sound, CallPlan())
    desk.executor.resume(broken)
    assert desk.faults == [StorageFault.SHORT, None, None, StorageFault.SHORT]
    assert desk.count(RUNNING, Fault.SHORT) == 1
