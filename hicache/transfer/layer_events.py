"""Events by layer: the model's layer waits for the copy of that layer and no other.

A producer (the controller) takes a slot of the `LayerDoneCounter`, copies layer by layer on its
stream and completes the slot's `LayerLoadingEvent` after each. The consumer (the model) names the
slots that its batch needs and waits, before it reads a layer, for that layer of each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hicache.device import Device, Event, Stream

__all__ = ["LayerDoneCounter", "LayerLoadingEvent"]


class LayerLoadingEvent:
    """The events of one load: one at its start and one after each layer.

    Used for a single load, so that whoever keeps an event of it keeps that load's answer.
    `complete` is for the producer alone; the rest for any thread.

    Args:
        device: makes the events and has the compute stream.
        num_layers: layers of the model, at least 1.

    Attributes:
        start_event: for the producer to record before the first copy.
    """

    def __init__(self, device: Device, num_layers: int) -> None:
        if num_layers < 1:
            raise ConfigError(f"num_layers must be at least 1, not {num_layers}")
        self._device = device
        self.start_event = device.create_event()
        self._layer_events = [device.create_event() for _ in range(num_layers)]
        self._last_recorded: Event | None = None

    @property
    def finish_event(self) -> Event:
        """The event of the last layer."""
        return self._layer_events[-1]

    @property
    def last_recorded(self) -> Event | None:
        """The event completed last so far; None before the first."""
        return self._last_recorded

    @property
    def layer_events(self) -> list[Event]:
        """The event of each layer."""
        return list(self._layer_events)

    @property
    def done(self) -> bool:
        """Whether the last layer's copy has ended, well or not."""
        return self.finish_event.query()

    @property
    def error(self) -> BaseException | None:
        """The error of the lowest layer that has one so far; final once `done`."""
        errors = (event.error for event in self._layer_events)
        return next((error for error in errors if error is not None), None)

    def complete(self, layer: int, stream: Stream) -> None:
        """Record on `stream` that all copies of `layer` are before this place.

        Layers are completed in ascending order on one stream. Raises as `Stream.record` does.
        """
        event = self._event(layer)
        stream.record(event)
        self._last_recorded = event

    def wait(self, layer: int) -> None:
        """Let the compute stream go on only when `layer` has arrived.

        On a CPU this blocks, on CUDA the device waits.

        Raises:
            TransferError: the copy of `layer` failed, was never recorded or came too late. Its
                bytes are not valid.
        """
        event = self._event(layer)
        self._device.compute_stream().wait(event)
        error = event.error
        if error is not None:
            raise TransferError(
                f"loading layer {layer} failed ({error!r}); its pages must be computed again"
            ) from error

    def _event(self, layer: int) -> Event:
        if not 0 <= layer < len(self._layer_events):
            raise ConfigError(f"no layer {layer}: the model has {len(self._layer_events)}")
        return self._layer_events[layer]


class LayerDoneCounter:
    """A ring of loads, so that producers run ahead of consumers.

    A slot is busy from `update_producer` until its load is done and no consumer names it. The
    scheduler's thread owns the ring; `wait_until` may be called from the model's thread.

    Args:
        device: see `LayerLoadingEvent`.
        num_layers: layers of the model.
        num_slots: loads that can be under way or waited for at the same time.
    """

    def __init__(self, device: Device, *, num_layers: int, num_slots: int = 5) -> None:
        if num_slots < 1:
            raise ConfigError(f"num_slots must be at least 1, not {num_slots}")
        self._device = device
        self._num_layers = num_layers
        self._loads = [LayerLoadingEvent(device, num_layers) for _ in range(num_slots)]
        # What must be done before the slot is free again; None when nothing must.
        self._busy_until: list[Event | None] = [None] * num_slots
        self._next = 0
        self._consumers: tuple[LayerLoadingEvent, ...] = ()

    def update_producer(self, busy: Collection[int] = ()) -> int | None:
        """Hand out the next free slot with a fresh `LayerLoadingEvent`.

        Args:
            busy: slots that are not free, however they look here.

        Returns:
            The producer index, or None when all slots are busy; the caller keeps its load queued.
        """
        num_slots = len(self._loads)
        for step in range(num_slots):
            index = (self._next + step) % num_slots
            if index not in busy and not self._busy(index):
                load = self._loads[index] = LayerLoadingEvent(self._device, self._num_layers)
                self._busy_until[index] = load.finish_event
                self._next = index + 1
                return index
        return None

    def event(self, producer_index: int) -> LayerLoadingEvent:
        """Return the load that the slot was handed out for last."""
        if not 0 <= producer_index < len(self._loads):
            raise ConfigError(
                f"no producer index {producer_index}: use what update_producer returned"
            )
        return self._loads[producer_index]

    def release(self, producer_index: int) -> None:
        """Take back a slot whose load will not be recorded any further.

        It is free once the layers recorded so far are done.
        """
        self._busy_until[producer_index] = self.event(producer_index).last_recorded

    def set_consumer(self, producer_index: int | Sequence[int]) -> None:
        """Name the loads to wait for, in place of those named before.

        Args:
            producer_index: one index or several; -1 stands for no load.
        """
        indices = (producer_index,) if isinstance(producer_index, int) else producer_index
        self._consumers = tuple(self.event(index) for index in indices if index != -1)

    def wait_until(self, layer: int) -> None:
        """Call `LayerLoadingEvent.wait` of every load named; cheap when there is none.

        Raises:
            TransferError: `layer` did not arrive, see `LayerLoadingEvent.wait`.
        """
        for load in self._consumers:
            load.wait(layer)

    def reset(self) -> None:
        """Forget the consumers and release every slot.

        A slot whose copies still run stays busy until they are done.
        """
        self._consumers = ()
        for index in range(len(self._loads)):
            self.release(index)

    def _busy(self, index: int) -> bool:
        until = self._busy_until[index]
        if until is not None and not until.query():
            return True
        load = self._loads[index]
        return any(load is consumer for consumer in self._consumers)
