"""The executor: work goes on side by side, and a call that hangs costs only itself."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from controller_fakes import GUARD_SECONDS, ScriptedWork, until

from hicache.clock import ManualClock
from hicache.controller import ThreadExecutor
from hicache.testing.faulty_storage import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = 5.0


class Bench:
    """An executor on a clock that the test moves, and every gate that the test made."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log: list[str] = []
        self.executors: list[ThreadExecutor] = []
        self.gates: list[Gate] = []

    def executor(self, *, num_workers: int = 1, max_abandoned: int = 8) -> ThreadExecutor:
        executor = ThreadExecutor(
            num_workers=num_workers,
            clock=self.clock,
            call_timeout_seconds=TIMEOUT,
            max_abandoned=max_abandoned,
        )
        self.executors.append(executor)
        return executor

    def gate(self) -> Gate:
        self.gates.append(Gate())
        return self.gates[-1]

    def work(self, name: str, *, num_steps: int = 1, gate: Gate | None = None) -> ScriptedWork:
        return ScriptedWork(name, self.log, num_steps=num_steps, gate=gate)

    def hung(self, executor: ThreadExecutor, name: str, *, num_steps: int = 1) -> ScriptedWork:
        """Work in a call that is past its deadline, which was not noticed yet."""
        work = self.work(name, num_steps=num_steps, gate=self.gate())
        executor.submit(work)
        assert work.gate.entered.wait(GUARD_SECONDS)
        self.clock.advance(TIMEOUT * 2)
        return work


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for gate in bench.gates:
        gate.open()
    for executor in bench.executors:
        assert executor.close(GUARD_SECONDS)
        assert executor.num_abandoned == 0
    until(lambda: not storage_threads())


def storage_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache")]


def test_work_is_stepped_until_it_has_no_more(bench: Bench) -> None:
    work = bench.work("a", num_steps=3)
    bench.executor().submit(work)
    assert work.wait() == ["ended"]
    assert bench.log == ["a", "a", "a"]


def test_two_long_operations_progress_side_by_side_on_one_thread(bench: Bench) -> None:
    executor, gate = bench.executor(), bench.gate()
    first, second = bench.work("a", num_steps=4, gate=gate), bench.work("b", num_steps=4)
    executor.submit(first)
    executor.submit(second)
    gate.open()
    first.wait()
    second.wait()
    assert bench.log == ["a", "b"] * 4


def test_calls_run_at_the_same_time_on_as_many_threads_as_were_asked_for(bench: Bench) -> None:
    executor = bench.executor(num_workers=3)
    works = [bench.work(name, gate=bench.gate()) for name in "abc"]
    for work in works:
        executor.submit(work)
    for work in works:
        assert work.gate.entered.wait(GUARD_SECONDS)


def test_a_call_is_overdue_only_after_its_deadline(bench: Bench) -> None:
    executor = bench.executor()
    work = bench.work("a", gate=bench.gate())
    executor.submit(work)
    assert work.gate.entered.wait(GUARD_SECONDS)
    bench.clock.advance(TIMEOUT)
    executor.poll()
    assert (work.events, executor.num_abandoned) == ([], 0)
    bench.clock.advance(0.001)
    executor.poll()
    executor.poll()
    assert (work.events, executor.num_abandoned) == (["overdue"], 1)


def test_a_hung_call_is_replaced_by_a_thread_on_which_other_work_goes_on(bench: Bench) -> None:
    executor = bench.executor()
    hung, other = bench.hung(executor, "hung"), bench.work("other", num_steps=2)
    executor.submit(other)
    executor.poll()
    assert other.wait() == ["ended"]
    assert executor.num_abandoned == 1
    hung.gate.open()
    assert hung.wait() == ["overdue", "ended"]
    until(lambda: executor.num_abandoned == 0)
    until(lambda: len(storage_threads()) == 1)


def test_the_deadline_is_that_of_a_call_not_of_the_work(bench: Bench) -> None:
    executor, gate = bench.executor(), bench.gate()
    blocker, work = bench.work("blocker", gate=gate), bench.work("a", num_steps=2)
    executor.submit(blocker)
    executor.submit(work)
    assert gate.entered.wait(GUARD_SECONDS)
    bench.clock.advance(TIMEOUT)
    gate.open()
    assert work.wait() == ["ended"]
    executor.poll()
    assert work.events == ["ended"]


def test_calls_that_begin_apart_are_overdue_one_after_the_other(bench: Bench) -> None:
    executor = bench.executor(num_workers=3)
    for name in "abc":
        work = bench.work(name, gate=bench.gate())
        executor.submit(work)
        assert work.gate.entered.wait(GUARD_SECONDS)
        executor.poll()
        bench.clock.advance(1)
    for began in (0, 1, 2):
        bench.clock.advance(began + TIMEOUT - bench.clock.now())
        executor.poll()
        assert executor.num_abandoned == began
        bench.clock.advance(0.25)
        executor.poll()
        assert executor.num_abandoned == began + 1


def test_when_all_threads_hang_beyond_the_bound_work_is_refused_and_nothing_waits(
    bench: Bench,
) -> None:
    executor = bench.executor(num_workers=2, max_abandoned=1)
    hung = [bench.hung(executor, "first")]
    executor.poll()
    hung += [bench.hung(executor, "second")]
    executor.poll()
    hung += [bench.hung(executor, "third")]
    queued = bench.work("queued")
    executor.submit(queued)
    executor.poll()
    late = bench.work("late")
    executor.submit(late)
    assert (queued.events, late.events) == (["refused"], ["refused"])
    assert [work.events for work in hung] == [["overdue"]] * 3
    assert executor.num_abandoned == 3


def test_threads_that_come_back_take_work_again(bench: Bench) -> None:
    executor = bench.executor(num_workers=1, max_abandoned=0)
    hung = bench.hung(executor, "hung")
    executor.poll()
    refused = bench.work("refused")
    executor.submit(refused)
    assert refused.events == ["refused"]
    hung.gate.open()
    until(lambda: executor.num_abandoned == 0)
    work = bench.work("a", num_steps=2)
    executor.submit(work)
    assert work.wait() == ["ended"]
    assert len(storage_threads()) == 1


class _ReturnsWhileDeclaredOverdue(ScriptedWork):
    """Returns from its call, with more to do, just before it learns that it is overdue."""

    def step(self) -> bool:
        more = super().step()
        self.returned.set()
        return more

    def overdue(self) -> None:
        self.gate.open()
        assert self.returned.wait(GUARD_SECONDS)
        super().overdue()

    def __init__(self, bench: Bench) -> None:
        super().__init__("race", bench.log, num_steps=2, gate=bench.gate())
        self.returned = threading.Event()


def test_work_that_returns_while_it_is_declared_overdue_still_ends(bench: Bench) -> None:
    executor, work = bench.executor(), _ReturnsWhileDeclaredOverdue(bench)
    executor.submit(work)
    assert work.gate.entered.wait(GUARD_SECONDS)
    bench.clock.advance(TIMEOUT * 2)
    executor.poll()
    assert set(work.wait()) == {"overdue", "refused"}
    assert bench.log == ["race"]


def test_close_refuses_what_is_queued_and_lets_calls_return(bench: Bench) -> None:
    executor = bench.executor()
    running, queued = bench.work("a", num_steps=2, gate=bench.gate()), bench.work("b")
    executor.submit(running)
    assert running.gate.entered.wait(GUARD_SECONDS)
    executor.submit(queued)
    threading.Timer(0.02, running.gate.open).start()
    assert executor.close(GUARD_SECONDS)
    assert (running.events, queued.events) == (["refused"], ["refused"])
    after = bench.work("c")
    executor.submit(after)
    assert after.events == ["refused"]
    assert bench.log == ["a"]
    assert executor.close(GUARD_SECONDS)


def test_close_returns_in_time_when_a_call_hangs_and_completes_after_its_return(
    bench: Bench,
) -> None:
    executor = bench.executor(num_workers=2)
    declared = bench.hung(executor, "declared")
    executor.poll()
    hung = bench.hung(executor, "hung")
    assert not executor.close(0.02)
    executor.poll()
    assert (declared.events, hung.events) == (["overdue"], ["overdue"])
    assert executor.num_abandoned == 2
    declared.gate.open()
    hung.gate.open()
    assert executor.close(GUARD_SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a class for batch work")
def test_workers_leave_their_core_to_the_thread_that_wakes_them(bench: Bench) -> None:
    before = os.sched_getscheduler(0)
    executor = bench.executor(num_workers=2)
    work = bench.work("a")
    executor.submit(work)
    work.wait()
    workers = [one for one in threading.enumerate() if one.name.startswith("hicache")]
    assert len(workers) == 2
    until(
        lambda: {os.sched_getscheduler(one.native_id or 0) for one in workers} == {os.SCHED_BATCH}
    )
    assert os.sched_getscheduler(0) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a class for batch work")
def test_workers_work_where_the_system_refuses_another_class(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    work = bench.work("a", num_steps=2)
    bench.executor().submit(work)
    assert work.wait() == ["ended"]
