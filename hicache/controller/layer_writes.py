"""Writes that copy each layer as soon as a forward pass has ended it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.controller.running_copy import RunningCopy
    from hicache.device import Device, Event, Stream
    from hicache.transfer import TransferEngine, TransferPlan
    from hicache.types import OperationId

__all__ = ["LayerWrites"]


class _OpenWrite:
    """A write and the layers that it has not submitted, by the pool that they are in."""

    def __init__(
        self, copy: RunningCopy, plans: Sequence[TransferPlan], engines: Sequence[TransferEngine]
    ) -> None:
        self.copy = copy
        self.plans = plans
        self.missing = {
            (source, layer)
            for source, engine in enumerate(engines)
            for layer in range(engine.num_layers)
        }


class LayerWrites:
    """The writes that wait for layers.

    Without a lock of its own: the mover's guards it together with the stream. Nothing waits on the
    host; a layer's copy waits on the stream for what the model has enqueued so far.

    Args:
        device: makes the events and has the compute stream.
        stream: on which writes are copied.
        engines: of the pools by source: the model's KV is 0, side pools follow.
    """

    def __init__(self, device: Device, stream: Stream, engines: Sequence[TransferEngine]) -> None:
        self._device = device
        self._stream = stream
        self._engines = engines
        self._open: dict[OperationId, _OpenWrite] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, copy: RunningCopy, plans: Sequence[TransferPlan]) -> None:
        """Copy the layers that end from now on; `copy` finishes behind the last one."""
        self._open[copy.job.operation_id] = _OpenWrite(copy, plans, self._engines)

    def layer_ended(self, layer: int, source: int) -> None:
        """Submit `layer` of the pool `source` for every write that has not submitted it."""
        waiting = [one for one in self._open.values() if (source, layer) in one.missing]
        if not waiting:
            return
        used = self._mark()
        for write in waiting:
            self._submit(write, source, layer, used)

    def finish(self, operation_id: OperationId, *, wanted: bool) -> None:
        """End a write: submit all layers that are missing, or copy no more of them.

        No effect when all layers were submitted.
        """
        write = self._open.get(operation_id)
        if write is None:
            return
        if not wanted:
            write.copy.abandoned = True
            self._close(write)
            return
        used = self._mark()
        for source, layer in sorted(write.missing):
            self._submit(write, source, layer, used)

    def abandon_all(self) -> None:
        """Copy no more layers of any write."""
        for operation_id in list(self._open):
            self.finish(operation_id, wanted=False)

    def _mark(self) -> Event:
        """Return the place in the compute stream that the model has come to."""
        used = self._device.create_event()
        self._device.compute_stream().record(used)
        return used

    def _submit(self, write: _OpenWrite, source: int, layer: int, used: Event) -> None:
        """Queue one layer, with an event of its own.

        Writes take turns on the stream, and what goes wrong must be found at the write that it
        belongs to.
        """
        copy, stream = write.copy, self._stream
        stream.wait(used)
        stream.enqueue(copy.stamp)
        stream.enqueue(partial(self._engines[source].write_layer, write.plans[source], layer))
        stream.enqueue(copy.stamp)
        copied = self._device.create_event()
        stream.record(copied)
        copy.checked.append(copied)
        write.missing.remove((source, layer))
        if not write.missing:
            self._close(write)

    def _close(self, write: _OpenWrite) -> None:
        del self._open[write.copy.job.operation_id]
        self._stream.record(write.copy.finished)
