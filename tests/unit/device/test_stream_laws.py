"""The laws of streams and events, one suite for every device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import pytest
import torch

from hicache.device import Device, Event, SimulatedDevice, Stream, create_device
from hicache.errors import ClosedError, TransferError

DEADLINE_SECONDS = 30.0
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MakeStream: TypeAlias = Callable[[str], Stream]


@pytest.fixture(
    params=["cpu", "simulated", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
)
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "simulated":
        return SimulatedDevice()
    return create_device(request.param, wait_timeout_seconds=DEADLINE_SECONDS)


@pytest.fixture
def make_stream(device: Device) -> Iterator[MakeStream]:
    streams: list[Stream] = []

    def make(name: str) -> Stream:
        streams.append(device.create_stream(name))
        return streams[-1]

    yield make
    still_running = [stream.name for stream in streams if not stream.close(DEADLINE_SECONDS)]
    assert not still_running


def recorded(device: Device, stream: Stream) -> Event:
    event = device.create_event()
    stream.record(event)
    return event


def failing(message: str) -> Callable[[], None]:
    def work() -> None:
        raise ValueError(message)

    return work


def test_a_stream_runs_its_work_in_the_order_of_enqueue(
    device: Device, make_stream: MakeStream
) -> None:
    stream, ran = make_stream("a"), list[int]()
    for number in range(500):
        stream.enqueue(partial(ran.append, number))
    recorded(device, stream).synchronize(DEADLINE_SECONDS)
    assert ran == list(range(500))


def test_an_event_that_was_never_recorded_is_not_done_and_cannot_be_waited_for(
    device: Device, make_stream: MakeStream
) -> None:
    event = device.create_event()
    assert not event.query()
    assert event.error is None
    with pytest.raises(TransferError, match="before it was recorded"):
        event.synchronize(DEADLINE_SECONDS)
    for stream in (make_stream("a"), device.compute_stream()):
        with pytest.raises(TransferError, match="before it was recorded"):
            stream.wait(event)


def test_an_event_carries_the_first_error_since_the_previous_record_and_work_goes_on(
    device: Device, make_stream: MakeStream
) -> None:
    stream, ran = make_stream("a"), list[str]()
    clean = recorded(device, stream)
    stream.enqueue(failing("first"))
    stream.enqueue(failing("second"))
    stream.enqueue(lambda: ran.append("after the failures"))
    failed = recorded(device, stream)
    clean_again = recorded(device, stream)
    clean_again.synchronize(DEADLINE_SECONDS)
    failed.synchronize(DEADLINE_SECONDS)
    assert ran == ["after the failures"]
    assert isinstance(failed.error, ValueError)
    assert str(failed.error) == "first"
    assert clean.error is None
    assert clean_again.error is None


def test_recording_again_replaces_what_an_event_says(
    device: Device, make_stream: MakeStream
) -> None:
    stream, event = make_stream("a"), device.create_event()
    stream.enqueue(failing("of the first recording"))
    stream.record(event)
    event.synchronize(DEADLINE_SECONDS)
    assert event.error is not None
    ran: list[str] = []
    stream.enqueue(lambda: ran.append("second"))
    stream.record(event)
    event.synchronize(DEADLINE_SECONDS)
    assert ran == ["second"]
    assert event.query()
    assert event.error is None


def test_waiting_for_a_stream_that_failed_does_not_fail(
    device: Device, make_stream: MakeStream
) -> None:
    source, target = make_stream("source"), make_stream("target")
    source.enqueue(failing("of the source"))
    failed = recorded(device, source)
    target.wait(failed)
    device.compute_stream().wait(failed)
    after = recorded(device, target)
    after.synchronize(DEADLINE_SECONDS)
    assert after.error is None


def test_close_runs_what_is_queued_refuses_more_and_is_idempotent(
    device: Device, make_stream: MakeStream
) -> None:
    stream, ran = make_stream("a"), list[int]()
    event = recorded(device, stream)
    for number in range(50):
        stream.enqueue(partial(ran.append, number))
    assert stream.close(DEADLINE_SECONDS)
    assert ran == list(range(50))
    assert stream.close(DEADLINE_SECONDS)
    with pytest.raises(ClosedError, match="'a'"):
        stream.enqueue(lambda: None)
    with pytest.raises(ClosedError):
        stream.record(event)
    with pytest.raises(ClosedError):
        stream.wait(event)
    assert event.query(), "a refused record leaves the event as it was"


def test_the_compute_stream_runs_in_the_calling_thread_at_once(
    device: Device, make_stream: MakeStream
) -> None:
    compute, ran = device.compute_stream(), list[str]()
    compute.enqueue(lambda: ran.append("now"))
    assert ran == ["now"]
    compute.enqueue(failing("kept"))
    assert compute.close(DEADLINE_SECONDS)
    failed = device.create_event()
    compute.record(failed)
    failed.synchronize(DEADLINE_SECONDS)
    assert str(failed.error) == "kept"
    follower = make_stream("a")
    follower.wait(failed)
    recorded(device, follower).synchronize(DEADLINE_SECONDS)


class PartialOrder:
    """The oracle: which work must have ended before which, as sets of work numbers in bit masks."""

    def __init__(self, num_streams: int, num_events: int) -> None:
        self.before_next = [0] * num_streams  # by stream: what precedes its next piece of work
        self.before_event = [0] * num_events
        self.recorded = [False] * num_events
        self.before_work: list[int] = []
        self.first_failure: list[int | None] = [None] * num_streams
        self.event_failure: list[int | None] = [None] * num_events

    def enqueue(self, stream: int, *, fails: bool) -> int:
        work = len(self.before_work)
        self.before_work.append(self.before_next[stream])
        self.before_next[stream] |= 1 << work
        if fails and self.first_failure[stream] is None:
            self.first_failure[stream] = work
        return work

    def record(self, stream: int, event: int) -> None:
        self.before_event[event] = self.before_next[stream]
        self.recorded[event] = True
        self.event_failure[event] = self.first_failure[stream]
        self.first_failure[stream] = None

    def wait(self, stream: int, event: int) -> None:
        self.before_next[stream] |= self.before_event[event]


class RandomProgram:
    """Random calls on several streams, the last of which is the compute stream, and the oracle."""

    def __init__(self, device: Device, streams: list[Stream], seed: int) -> None:
        self.device = device
        self.rng = random.Random(seed)
        self.streams = streams
        self.events = [device.create_event() for _ in range(6)]
        self.order = PartialOrder(len(streams), len(self.events))
        self.started: list[tuple[int, int]] = []  # (work, mask of what had ended)
        self.ended_by: list[int] = []

    def ended(self) -> int:
        return sum(1 << work for work in tuple(self.ended_by))

    def enqueue(self, stream: int) -> None:
        fails = self.rng.random() < 0.15
        pause = self.rng.choice([0.0, 0.0, 0.0, 1e-4])
        work = self.order.enqueue(stream, fails=fails)

        def run() -> None:
            self.started.append((work, self.ended()))
            if pause:
                time.sleep(pause)
            self.ended_by.append(work)
            if fails:
                raise ValueError(work)

        self.streams[stream].enqueue(run)

    def wait(self, stream: int, event: int) -> None:
        self.streams[stream].wait(self.events[event])
        self.order.wait(stream, event)
        if stream == len(self.streams) - 1 and self.device.torch_device.type == "cpu":
            self.check_passed(event)

    def check_passed(self, event: int) -> None:
        missing = self.order.before_event[event] & ~self.ended()
        assert not missing, f"waiting for event {event} passed before {missing:b}"

    def one_call(self) -> None:
        stream = self.rng.randrange(len(self.streams))
        event = self.rng.randrange(len(self.events))
        kind = self.rng.choices(["enqueue", "record", "wait", "synchronize"], [55, 20, 22, 3])[0]
        if kind == "enqueue":
            self.enqueue(stream)
        elif kind == "record":
            self.streams[stream].record(self.events[event])
            self.order.record(stream, event)
        elif not self.order.recorded[event]:
            assert not self.events[event].query()
        elif kind == "wait":
            self.wait(stream, event)
        else:
            self.events[event].synchronize(DEADLINE_SECONDS)
            self.check_passed(event)
        if isinstance(self.device, SimulatedDevice):
            for _ in range(self.rng.randrange(3)):
                self.device.step(rng=self.rng)

    def check(self) -> None:
        order = self.order
        assert sorted(work for work, _ in self.started) == list(range(len(order.before_work)))
        for work, ended in self.started:
            missing = order.before_work[work] & ~ended
            assert not missing, f"work {work} started before {missing:b} had ended"
        for number, event in enumerate(self.events):
            if order.recorded[number]:
                event.synchronize(DEADLINE_SECONDS)
            assert event.query() == order.recorded[number]
            failure = order.event_failure[number]
            assert (event.error is None) == (failure is None)
            if event.error is not None:
                assert event.error.args == (failure,)


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_keep_the_partial_order_and_report_every_error(
    device: Device, make_stream: MakeStream, seed: int
) -> None:
    streams = [make_stream(name) for name in "abc"]
    program = RandomProgram(device, [*streams, device.compute_stream()], seed)
    for _ in range(150):
        program.one_call()
    for stream in streams:
        assert stream.close(DEADLINE_SECONDS)
    program.check()
