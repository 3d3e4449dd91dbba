"""Laws of the per-layer events and of the ring of loads."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from hicache.device import Device, SimulatedDevice, Stream, create_device
from hicache.errors import ConfigError, TransferError
from hicache.transfer.layer_events import LayerDoneCounter, LayerLoadingEvent

if TYPE_CHECKING:
    from collections.abc import Callable

GUARD_SECONDS = 30.0
NUM_LAYERS = 4


def fail() -> None:
    raise ValueError("the copy engine broke")


def record_load(
    load: LayerLoadingEvent, stream: Stream, copy: Callable[[int], None] = lambda layer: None
) -> None:
    stream.record(load.start_event)
    for layer in range(NUM_LAYERS):
        stream.enqueue(partial(copy, layer))
        load.complete(layer, stream)


def make_counter(num_slots: int = 3) -> tuple[SimulatedDevice, Stream, LayerDoneCounter]:
    device = SimulatedDevice()
    counter = LayerDoneCounter(device, num_layers=NUM_LAYERS, num_slots=num_slots)
    return device, device.create_stream("load"), counter


def run_all(device: SimulatedDevice) -> None:
    while device.step():
        pass


def test_waiting_for_a_layer_waits_for_it_and_not_for_later_ones() -> None:
    device, copied = SimulatedDevice(), list[int]()
    load = LayerLoadingEvent(device, NUM_LAYERS)
    record_load(load, device.create_stream("load"), copied.append)
    for layer in range(NUM_LAYERS):
        assert not load.done
        load.wait(layer)
        assert copied == list(range(layer + 1))
    assert load.done
    assert load.finish_event.query()
    assert load.start_event.query()


def test_only_the_layer_that_failed_raises_and_the_load_tells_its_first_error() -> None:
    device = SimulatedDevice()
    load = LayerLoadingEvent(device, NUM_LAYERS)

    def copy(layer: int) -> None:
        if layer in (1, 2):
            raise ValueError(f"of layer {layer}")

    record_load(load, device.create_stream("load"), copy)
    assert load.error is None
    load.wait(0)
    with pytest.raises(TransferError, match="layer 1 failed") as failure:
        load.wait(1)
    assert isinstance(failure.value.__cause__, ValueError)
    load.wait(3)
    assert load.done
    assert str(load.error) == "of layer 1"


def test_a_load_without_errors_has_none() -> None:
    device = SimulatedDevice()
    load = LayerLoadingEvent(device, NUM_LAYERS)
    record_load(load, device.create_stream("load"))
    run_all(device)
    assert load.error is None


def test_a_layer_whose_copy_was_never_recorded_is_an_error_not_a_pass() -> None:
    device = SimulatedDevice()
    load = LayerLoadingEvent(device, NUM_LAYERS)
    load.complete(0, device.create_stream("load"))
    load.wait(0)
    with pytest.raises(TransferError, match="before it was recorded"):
        load.wait(1)


def test_a_copy_that_comes_too_late_is_an_error_on_a_cpu() -> None:
    device, opened = create_device("cpu", wait_timeout_seconds=0.01), threading.Event()
    stream = device.create_stream("load")
    load = LayerLoadingEvent(device, NUM_LAYERS)
    stream.enqueue(lambda: assert_opened(opened))
    record_load(load, stream)
    with pytest.raises(TransferError, match="'load'"):
        load.wait(0)
    opened.set()
    assert stream.close(GUARD_SECONDS)
    load.wait(0)


def assert_opened(event: threading.Event) -> None:
    assert event.wait(GUARD_SECONDS)


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS])
def test_a_layer_outside_the_model_is_refused(layer: int) -> None:
    device = SimulatedDevice()
    load = LayerLoadingEvent(device, NUM_LAYERS)
    with pytest.raises(ConfigError, match=f"no layer {layer}"):
        load.wait(layer)
    with pytest.raises(ConfigError, match=f"no layer {layer}"):
        load.complete(layer, device.create_stream("load"))


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_layers"):
        LayerLoadingEvent(SimulatedDevice(), 0)
    with pytest.raises(ConfigError, match="num_slots"):
        LayerDoneCounter(SimulatedDevice(), num_layers=1, num_slots=0)


def test_slots_are_handed_out_in_a_ring_until_all_are_busy() -> None:
    device, stream, counter = make_counter(num_slots=3)
    assert [counter.update_producer() for _ in range(4)] == [0, 1, 2, None]
    for index in (1, 0):
        record_load(counter.event(index), stream)
    assert counter.update_producer() is None, "recorded is not done"
    run_all(device)
    assert [counter.update_producer() for _ in range(3)] == [0, 1, None]


def test_a_slot_that_is_said_to_be_busy_is_not_handed_out() -> None:
    _, _, counter = make_counter(num_slots=3)
    assert counter.update_producer({0, 2}) == 1
    assert counter.update_producer({0, 2}) is None
    assert counter.update_producer() == 2


def test_the_slot_handed_out_is_the_one_that_was_free_longest() -> None:
    device, stream, counter = make_counter(num_slots=3)
    for index in [0, 1, 2, 0, 1]:
        assert counter.update_producer() == index
        record_load(counter.event(index), stream)
        run_all(device)


def test_a_slot_that_a_consumer_names_is_busy_though_its_load_is_done() -> None:
    device, stream, counter = make_counter(num_slots=2)
    for index in (0, 1):
        assert counter.update_producer() == index
        record_load(counter.event(index), stream)
    run_all(device)
    counter.set_consumer([0, 1])
    assert counter.update_producer() is None
    counter.set_consumer(1)
    assert [counter.update_producer(), counter.update_producer()] == [0, None]
    counter.set_consumer(())
    assert counter.update_producer() == 1


def test_wait_until_waits_for_that_layer_of_every_load_named() -> None:
    device = SimulatedDevice()
    counter = LayerDoneCounter(device, num_layers=NUM_LAYERS, num_slots=3)
    copied: list[tuple[int, int]] = []

    def note(index: int, layer: int) -> None:
        copied.append((index, layer))

    for index in range(3):
        assert counter.update_producer() == index
        stream = device.create_stream(f"load {index}")
        record_load(counter.event(index), stream, partial(note, index))
    counter.set_consumer([0, -1, 2])
    counter.wait_until(1)
    assert sorted(copied) == [(0, 0), (0, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("nothing", [-1, (), [-1, -1]])
def test_without_consumers_nothing_is_waited_for(nothing: int | list[int]) -> None:
    device, stream, counter = make_counter()
    assert counter.update_producer() == 0
    record_load(counter.event(0), stream)
    counter.set_consumer(0)
    counter.set_consumer(nothing)
    pending = device.pending
    counter.wait_until(NUM_LAYERS - 1)
    assert device.pending == pending


def test_a_failed_load_raises_in_the_consumer_and_frees_its_slot() -> None:
    device, stream, counter = make_counter(num_slots=1)
    assert counter.update_producer() == 0
    record_load(counter.event(0), stream, lambda layer: fail())
    counter.set_consumer(0)
    with pytest.raises(TransferError, match="layer 0 failed"):
        counter.wait_until(0)
    run_all(device)
    counter.set_consumer(-1)
    assert counter.update_producer() == 0
    assert counter.event(0).error is None


def test_an_event_kept_from_a_load_is_not_changed_by_the_next_load_of_its_slot() -> None:
    device, stream, counter = make_counter(num_slots=1)
    assert counter.update_producer() == 0
    record_load(counter.event(0), stream)
    finish = counter.event(0).finish_event
    run_all(device)
    assert counter.update_producer() == 0
    record_load(counter.event(0), stream, lambda layer: fail())
    assert finish.query()
    assert finish.error is None
    assert not counter.event(0).done


def test_a_consumer_never_passes_on_the_events_of_the_load_before() -> None:
    device, stream, counter = make_counter(num_slots=1)
    assert counter.update_producer() == 0
    record_load(counter.event(0), stream)
    run_all(device)
    assert counter.update_producer() == 0
    counter.set_consumer(0)
    with pytest.raises(TransferError, match="before it was recorded"):
        counter.wait_until(0)


def test_a_released_slot_is_free_once_what_was_recorded_is_done() -> None:
    device, stream, counter = make_counter(num_slots=2)
    assert [counter.update_producer(), counter.update_producer()] == [0, 1]
    counter.event(0).complete(0, stream)
    counter.release(0)
    assert counter.update_producer() is None
    counter.release(1)
    assert counter.update_producer() == 1
    run_all(device)
    assert counter.update_producer() == 0


def test_reset_frees_all_slots_but_those_that_still_copy() -> None:
    device, stream, counter = make_counter(num_slots=4)
    assert [counter.update_producer() for _ in range(4)] == [0, 1, 2, 3]
    record_load(counter.event(0), stream)
    run_all(device)
    record_load(counter.event(1), stream)
    counter.event(2).complete(0, stream)
    counter.set_consumer([0, 1, 2])
    counter.reset()
    assert counter.update_producer() == 0
    assert [counter.update_producer(), counter.update_producer()] == [3, None]
    counter.wait_until(0)
    assert device.pending > 0, "reset forgets the consumers"
    run_all(device)
    assert [counter.update_producer(), counter.update_producer()] == [1, 2]


@pytest.mark.parametrize("index", [-2, 3])
def test_an_index_that_was_never_handed_out_is_refused(index: int) -> None:
    _, _, counter = make_counter(num_slots=3)
    for call in (counter.event, counter.set_consumer, counter.release):
        with pytest.raises(ConfigError, match=f"no producer index {index}"):
            call(index)


class RingProgram:
    """Random calls on a counter beside the oracle: what is busy, from the rules alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.num_slots = self.rng.randint(1, 5)
        self.device, self.stream, self.counter = make_counter(self.num_slots)
        self.handed_out: set[int] = set()  # their loads are not recorded yet
        self.copying: list[int] = []  # slot of each layer on the stream, in order
        self.consumers: set[int] = set()

    def produce(self) -> None:
        busy = self.handed_out | self.consumers | set(self.copying)
        index = self.counter.update_producer()
        assert (index is None) == (len(busy) == self.num_slots)
        if index is not None:
            assert index not in busy
            self.handed_out.add(index)

    def record(self) -> None:
        self.record_layers(NUM_LAYERS)

    def give_up(self) -> None:
        slot = self.record_layers(self.rng.randrange(NUM_LAYERS))
        if slot is not None:
            self.counter.release(slot)

    def record_layers(self, num_layers: int) -> int | None:
        if not self.handed_out:
            return None
        slot = self.rng.choice(sorted(self.handed_out))
        self.handed_out.remove(slot)
        for layer in range(num_layers):
            self.counter.event(slot).complete(layer, self.stream)
            self.copying.append(slot)
        return slot

    def step(self) -> None:
        if self.device.step():
            self.copying.pop(0)

    def consume(self) -> None:
        self.consumers = set(
            self.rng.sample(range(self.num_slots), self.rng.randint(0, self.num_slots))
        )
        self.counter.set_consumer([*self.consumers, -1])

    def reset(self) -> None:
        self.counter.reset()
        self.handed_out.clear()
        self.consumers.clear()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_of_the_ring_agrees_with_the_rules(seed: int) -> None:
    program = RingProgram(seed)
    calls = [program.produce, program.record, program.give_up, program.step, program.consume]
    for _ in range(600):
        call = program.rng.choices([*calls, program.reset], [6, 3, 1, 12, 2, 0.2])[0]
        call()


def test_on_a_cpu_a_model_reads_every_layer_of_its_own_load() -> None:
    device: Device = create_device("cpu", wait_timeout_seconds=GUARD_SECONDS)
    stream = device.create_stream("load")
    counter = LayerDoneCounter(device, num_layers=NUM_LAYERS, num_slots=2)
    pool = torch.zeros(2, NUM_LAYERS, 1 << 14, dtype=torch.int64)

    def copy(slot: int, stamp: int, layer: int) -> None:
        pool[slot, layer].fill_(stamp)

    for stamp in range(1, 200):
        index = counter.update_producer()
        assert index is not None
        record_load(counter.event(index), stream, partial(copy, index, stamp))
        counter.set_consumer(index)
        for layer in range(NUM_LAYERS):
            counter.wait_until(layer)
            assert bool((pool[index, layer] == stamp).all())
    assert stream.close(GUARD_SECONDS)
