"""What is particular to a CPU's streams: threads, deadlines, bounds."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hicache.device.cpu import CpuDevice, CpuStream
from hicache.device.recording import RecordedEvent
from hicache.errors import CapacityError, ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

GUARD_SECONDS = 30.0


class Gate:
    """Work that holds its stream until it is opened."""

    def __init__(self, stream: CpuStream) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        stream.enqueue(self._hold)

    def _hold(self) -> None:
        self.entered.set()
        assert self.opened.wait(GUARD_SECONDS)

    def open(self) -> None:
        self.opened.set()


def recorded(stream: CpuStream) -> RecordedEvent:
    event = RecordedEvent()
    stream.record(event)
    return event


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    stream = CpuDevice().create_stream("a")
    yield stream
    assert stream.close(GUARD_SECONDS)


def test_enqueue_returns_before_the_work_runs(stream: CpuStream) -> None:
    gate, ran = Gate(stream), list[str]()
    stream.enqueue(lambda: ran.append("later"))
    event = recorded(stream)
    assert ran == []
    assert not event.query()
    gate.open()
    event.synchronize(GUARD_SECONDS)
    assert ran == ["later"]
    assert event.query()


def test_synchronize_gives_up_at_its_deadline_and_can_be_tried_again(stream: CpuStream) -> None:
    gate = Gate(stream)
    event = recorded(stream)
    with pytest.raises(TransferError, match=r"'a' did not reach an event within 0\.01 s"):
        event.synchronize(0.01)
    gate.open()
    event.synchronize(GUARD_SECONDS)


def test_a_stream_gives_up_a_wait_at_the_deadline_reports_it_once_and_goes_on(
    stream: CpuStream,
) -> None:
    waiter = CpuDevice(wait_timeout_seconds=0.01).create_stream("waiter")
    gate, ran = Gate(stream), list[str]()
    waiter.wait(recorded(stream))
    waiter.enqueue(lambda: ran.append("after the wait"))
    late, later = recorded(waiter), recorded(waiter)
    later.synchronize(GUARD_SECONDS)
    assert ran == ["after the wait"]
    assert isinstance(late.error, TransferError)
    assert later.error is None
    gate.open()
    assert waiter.close(GUARD_SECONDS)


def test_the_compute_stream_raises_when_a_wait_passes_the_deadline(stream: CpuStream) -> None:
    gate = Gate(stream)
    compute = CpuDevice(wait_timeout_seconds=0.01).compute_stream()
    event = recorded(stream)
    with pytest.raises(TransferError, match="'a'"):
        compute.wait(event)
    gate.open()
    event.synchronize(GUARD_SECONDS)
    compute.wait(event)


def test_who_waits_for_an_older_recording_passes_when_that_one_is_done(stream: CpuStream) -> None:
    first, event = Gate(stream), recorded(stream)
    passed = threading.Event()
    waiting = CpuDevice().create_stream("waiting")
    waiting.wait(event)
    waiting.enqueue(passed.set)
    second = Gate(stream)
    stream.record(event)
    first.open()
    assert passed.wait(GUARD_SECONDS)
    assert not event.query()
    second.open()
    event.synchronize(GUARD_SECONDS)
    assert waiting.close(GUARD_SECONDS)


def test_a_full_stream_refuses_every_kind_of_call_and_adds_nothing() -> None:
    stream = CpuDevice(max_pending=3).create_stream("a")
    gate, ran = Gate(stream), list[int]()
    assert gate.entered.wait(GUARD_SECONDS), "work that runs does not count as queued"
    for number in range(3):
        stream.enqueue(partial(ran.append, number))
    event, done = RecordedEvent(), RecordedEvent()
    CpuDevice().compute_stream().record(done)
    with pytest.raises(CapacityError, match="already holds 3"):
        stream.enqueue(lambda: ran.append(99))
    with pytest.raises(CapacityError):
        stream.record(event)
    with pytest.raises(CapacityError):
        stream.wait(done)
    with pytest.raises(TransferError, match="before it was recorded"):
        event.synchronize(GUARD_SECONDS)
    gate.open()
    assert stream.close(GUARD_SECONDS)
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_nothing_that_work_raises_ends_the_worker(
    stream: CpuStream, kind: type[BaseException]
) -> None:
    def work() -> None:
        raise kind

    stream.enqueue(work)
    event = recorded(stream)
    event.synchronize(GUARD_SECONDS)
    assert type(event.error) is kind


def test_work_that_hangs_neither_holds_close_nor_the_process() -> None:
    stream = CpuDevice().create_stream("hung")
    gate = Gate(stream)
    (worker,) = (thread for thread in threading.enumerate() if thread.name == "hicache-hung")
    assert worker.daemon
    assert not stream.close(0.01)
    assert not stream.close(0.01)
    gate.open()
    assert stream.close(GUARD_SECONDS)
    assert not worker.is_alive()


def test_an_idle_stream_does_not_keep_finished_work_alive(stream: CpuStream) -> None:
    class Owner:
        def work(self) -> None:
            pass

    owner = Owner()
    alive = weakref.ref(owner)
    stream.enqueue(owner.work)
    del owner
    give_up = time.monotonic() + GUARD_SECONDS
    while alive() is not None and time.monotonic() < give_up:
        time.sleep(0.001)
        gc.collect()
    assert alive() is None


def test_work_of_several_producers_all_runs(stream: CpuStream) -> None:
    ran: list[tuple[int, int]] = []

    def produce(producer: int) -> None:
        for number in range(500):
            stream.enqueue(partial(ran.append, (producer, number)))
            recorded(stream).synchronize(GUARD_SECONDS)

    producers = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for thread in producers:
        thread.start()
    for thread in producers:
        thread.join(GUARD_SECONDS)
    for producer in range(4):
        assert [number for who, number in ran if who == producer] == list(range(500))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_deadline_that_is_not_positive_and_finite_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="wait_timeout_seconds"):
        CpuDevice(wait_timeout_seconds=seconds)


def test_a_queue_bound_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_pending"):
        CpuDevice(max_pending=0)
