"""What is particular to a simulated device: nothing runs until a test says so."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from hicache.device.recording import RecordedEvent
from hicache.device.simulated import SimulatedDevice, SimulatedStream
from hicache.errors import ConfigError, TransferError

NO_TIME = 0.0


def recorded(stream: SimulatedStream) -> RecordedEvent:
    event = RecordedEvent()
    stream.record(event)
    return event


def enqueue_names(stream: SimulatedStream, log: list[str], count: int) -> None:
    for number in range(count):
        stream.enqueue(partial(log.append, f"{stream.name}{number}"))


def test_nothing_runs_before_a_step_and_query_runs_nothing() -> None:
    device, log = SimulatedDevice(), list[str]()
    stream = device.create_stream("a")
    enqueue_names(stream, log, 2)
    event = recorded(stream)
    assert not event.query()
    assert (log, stream.pending, device.pending) == ([], 3, 3)
    assert device.step("a")
    assert (log, device.pending) == (["a0"], 2)
    assert stream.run_one()
    assert stream.run_one()
    assert event.query()
    assert not device.step("a")
    assert not device.step()


def test_synchronize_runs_what_the_event_needs_and_nothing_else() -> None:
    device, log = SimulatedDevice(), list[str]()
    a, b, c = (device.create_stream(name) for name in "abc")
    for stream in (a, b, c):
        enqueue_names(stream, log, 1)
    b.wait(recorded(a))
    enqueue_names(a, log, 1)
    b.enqueue(lambda: log.append("b after a"))
    event = recorded(b)
    enqueue_names(b, log, 1)
    event.synchronize(NO_TIME)
    assert log == ["b0", "a0", "b after a"]
    assert (a.pending, b.pending, c.pending) == (1, 1, 1)


def test_the_compute_stream_runs_what_it_waits_for() -> None:
    device, log = SimulatedDevice(), list[str]()
    stream = device.create_stream("a")
    enqueue_names(stream, log, 2)
    event = recorded(stream)
    enqueue_names(stream, log, 1)
    device.compute_stream().wait(event)
    assert log == ["a0", "a1"]


def test_a_stream_that_waits_is_not_stepped_until_the_other_got_there() -> None:
    device, log = SimulatedDevice(), list[str]()
    a, b = device.create_stream("a"), device.create_stream("b")
    enqueue_names(a, log, 1)
    b.wait(recorded(a))
    enqueue_names(b, log, 1)
    assert not b.runnable
    assert not device.step("b")
    while device.step(rng=random.Random(0)):
        pass
    assert log == ["a0", "b0"]


def test_streams_that_wait_for_each_other_are_named_and_stay_usable() -> None:
    device, log = SimulatedDevice(), list[str]()
    a, b = device.create_stream("a"), device.create_stream("b")
    needed = RecordedEvent()
    a.enqueue(lambda: needed.synchronize(NO_TIME))
    failed = recorded(a)
    b.wait(failed)
    b.record(needed)
    enqueue_names(b, log, 1)
    assert device.step("a")
    assert device.step("a")
    assert isinstance(failed.error, TransferError)
    assert "a -> b -> a" in str(failed.error)
    while device.step():
        pass
    assert log == ["b0"]


def test_work_that_waits_for_its_own_stream_fails() -> None:
    device = SimulatedDevice()
    stream, later = device.create_stream("a"), RecordedEvent()
    stream.enqueue(lambda: later.synchronize(NO_TIME))
    stream.record(later)
    later.synchronize(NO_TIME)
    assert "a -> a" in str(later.error)


def test_work_that_steps_the_device_runs_other_streams_but_not_its_own() -> None:
    device, log = SimulatedDevice(), list[str]()
    a, b = device.create_stream("a"), device.create_stream("b")
    stepped: list[bool] = []
    a.enqueue(lambda: stepped.extend([device.step("a"), device.step(), device.step()]))
    enqueue_names(a, log, 1)
    enqueue_names(b, log, 1)
    assert device.step("a")
    assert stepped == [False, True, False]
    assert log == ["b0"]


def interleaving(seed: int) -> tuple[str, ...]:
    device, log, rng = SimulatedDevice(), list[str](), random.Random(seed)
    for name in "ab":
        enqueue_names(device.create_stream(name), log, 2)
    while device.step(rng=rng):
        pass
    return tuple(log)


def test_seeds_reach_every_interleaving_and_the_same_seed_the_same() -> None:
    possible = {
        order
        for order in itertools.permutations(["a0", "a1", "b0", "b1"])
        if order.index("a0") < order.index("a1") and order.index("b0") < order.index("b1")
    }
    assert {interleaving(seed) for seed in range(100)} == possible
    assert all(interleaving(seed) == interleaving(seed) for seed in range(10))


def test_two_open_streams_cannot_share_a_name() -> None:
    device = SimulatedDevice()
    stream = device.create_stream("a")
    with pytest.raises(ConfigError, match="'a' is open"):
        device.create_stream("a")
    assert stream.close(NO_TIME)
    device.create_stream("a").enqueue(lambda: None)
    assert device.pending == 1


def test_stepping_an_unknown_stream_names_those_there_are() -> None:
    device = SimulatedDevice()
    device.create_stream("load")
    with pytest.raises(ConfigError, match="there are load"):
        device.step("laod")
