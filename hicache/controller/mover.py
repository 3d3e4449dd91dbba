"""The moving side: streams, pools and storage of one rank; carries out jobs and reports results."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicache.controller.records import CopyResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.clock import Clock
    from hicache.config import StorageConfig
    from hicache.controller.records import LoadJob, Result, StorageJob, WriteJob
    from hicache.controller.storage_tier import StorageTier
    from hicache.device import Device, Event, Stream
    from hicache.pools import HostKVPool
    from hicache.transfer import LayerDoneCounter, LayerLoadingEvent, TransferEngine, TransferPlan
    from hicache.types import OperationId

__all__ = ["LocalMover", "Mover", "PoolPair"]


class PoolPair(NamedTuple):
    """A device pool and the host pool that backs it, joined by what copies between them.

    The first pair of a mover is the model's KV; side pools (draft KV, indexer pages) follow. One
    page id names a page in all of them, and they move as one operation.
    """

    name: str
    engine: TransferEngine
    host_pool: HostKVPool


class Mover(Protocol):
    """Carries out jobs; every job ends in exactly one result whose phase is ended.

    One thread calls; no method but `close`, `attach_storage` and `detach_storage` blocks.
    """

    def submit_write(self, job: WriteJob) -> None:
        """Start a write after the work that the compute stream has now."""

    def submit_load(self, job: LoadJob) -> int:
        """Start a load and return its producer index; -1 when every slot is busy: try again."""

    def submit_storage(self, job: StorageJob) -> None:
        """Queue storage work."""

    def end(self, operation_id: OperationId) -> None:
        """Let a storage operation end before its next backend call."""

    def poll(self) -> list[Result]:
        """Return what has ended or progressed since the last call."""

    def attach_storage(self, config: StorageConfig) -> None:
        """Open a store; any error leaves everything as before."""

    def detach_storage(self, timeout_seconds: float) -> bool:
        """Close the store; False when a call in it still runs, and then it stays open."""

    def clear_storage(self) -> int:
        """Remove every page of this namespace from the store and return how many; blocks."""

    def close(self, timeout_seconds: float) -> bool:
        """Drain streams, stop workers, close the store; False when something still runs."""


class _Copy(NamedTuple):
    job: WriteJob | LoadJob
    num_bytes: int
    load: LayerLoadingEvent | None
    finished: Event
    stamps: list[float]

    @property
    def error(self) -> BaseException | None:
        return self.finished.error if self.load is None else self.load.error


class LocalMover:
    """A mover in the process of the model.

    Args:
        device: where streams and events come from.
        pairs: pools by page id, the model's KV first. The mover closes the host pools.
        counter: the slots of the loads; the device pool waits on it.
        storage: the store's side; closed with the mover.
        clock: for measuring how long copies take.
    """

    def __init__(
        self,
        *,
        device: Device,
        pairs: Sequence[PoolPair],
        counter: LayerDoneCounter,
        storage: StorageTier,
        clock: Clock,
    ) -> None:
        self._device = device
        self._pairs = tuple(pairs)
        self._counter = counter
        self._storage = storage
        self._clock = clock
        self._num_layers = max(pair.engine.num_layers for pair in pairs)
        self._write_stream = device.create_stream("write")
        self._load_stream = device.create_stream("load")
        self._writes: deque[_Copy] = deque()
        self._loads: deque[_Copy] = deque()

    def submit_write(self, job: WriteJob) -> None:
        """See `Mover.submit_write`."""
        stream, finished = self._write_stream, self._device.create_event()
        plans, stamps = self._plans(job), list[float]()
        self._start(stream, self._device.create_event(), stamps)
        stream.enqueue(partial(self._write_layers, plans))
        stream.enqueue(partial(self._stamp, stamps))
        stream.record(finished)
        self._writes.append(_Copy(job, self._num_bytes(plans), None, finished, stamps))

    def submit_load(self, job: LoadJob) -> int:
        """See `Mover.submit_load`."""
        plans, stamps = self._plans(job), list[float]()
        index = self._counter.update_producer()
        if index is None:
            return -1
        stream, load = self._load_stream, self._counter.event(index)
        self._start(stream, load.start_event, stamps)
        for layer in range(self._num_layers):
            for pair, plan in zip(self._pairs, plans, strict=True):
                if layer < pair.engine.num_layers:
                    stream.enqueue(partial(pair.engine.load_layer, plan, layer))
            load.complete(layer, stream)
        finished = self._device.create_event()
        stream.enqueue(partial(self._stamp, stamps))
        stream.record(finished)
        self._loads.append(_Copy(job, self._num_bytes(plans), load, finished, stamps))
        return index

    def submit_storage(self, job: StorageJob) -> None:
        """See `Mover.submit_storage`."""
        self._storage.submit(job)

    def end(self, operation_id: OperationId) -> None:
        """See `Mover.end`."""
        self._storage.end(operation_id)

    def poll(self) -> list[Result]:
        """See `Mover.poll`."""
        results: list[Result] = []
        for copies in (self._writes, self._loads):
            while copies and copies[0].finished.query():
                results.append(self._result(copies.popleft()))
        return results + self._storage.poll()

    def attach_storage(self, config: StorageConfig) -> None:
        """See `Mover.attach_storage`."""
        self._storage.attach(config)

    def detach_storage(self, timeout_seconds: float) -> bool:
        """See `Mover.detach_storage`."""
        return self._storage.detach(timeout_seconds)

    def clear_storage(self) -> int:
        """See `Mover.clear_storage`."""
        return self._storage.clear()

    def close(self, timeout_seconds: float) -> bool:
        """See `Mover.close`.

        Host memory that a hung call may still write to stays mapped.
        """
        end = self._clock.now() + timeout_seconds
        stopped = True
        for stream in (self._write_stream, self._load_stream):
            stopped &= stream.close(max(0.0, end - self._clock.now()))
        stopped &= self._storage.detach(max(0.0, end - self._clock.now()))
        if stopped:
            for pair in self._pairs:
                pair.host_pool.close()
        return stopped

    def _plans(self, job: WriteJob | LoadJob) -> list[TransferPlan]:
        return [pair.engine.plan(job.device_pages, job.host_pages) for pair in self._pairs]

    def _num_bytes(self, plans: Sequence[TransferPlan]) -> int:
        return sum(
            pair.engine.layer_bytes(plan) * pair.engine.num_layers
            for pair, plan in zip(self._pairs, plans, strict=True)
        )

    def _write_layers(self, plans: Sequence[TransferPlan]) -> None:
        """Copy all layers; one piece of work, as nobody waits for a single one."""
        for layer in range(self._num_layers):
            for pair, plan in zip(self._pairs, plans, strict=True):
                if layer < pair.engine.num_layers:
                    pair.engine.write_layer(plan, layer)

    def _start(self, stream: Stream, started: Event, stamps: list[float]) -> None:
        """Let `stream` wait for what the model has enqueued, which may still use the pages.

        After the start event, so that a wait in vain fails the copy that follows it.
        """
        compute, used = self._device.compute_stream(), self._device.create_event()
        compute.record(used)
        stream.record(started)
        stream.wait(used)
        stream.enqueue(partial(self._stamp, stamps))

    def _stamp(self, stamps: list[float]) -> None:
        stamps.append(self._clock.now())

    def _result(self, copy: _Copy) -> CopyResult:
        error = copy.error
        seconds = copy.stamps[-1] - copy.stamps[0]
        if self._device.torch_device.type == "cuda":
            # There the stamps tell when work was launched; what is left is an upper bound.
            seconds = self._clock.now() - copy.stamps[0]
        return CopyResult(
            operation_id=copy.job.operation_id,
            generation=copy.job.generation,
            good=error is None,
            num_bytes=copy.num_bytes if error is None else 0,
            seconds=seconds,
            error="" if error is None else f"{type(error).__name__}: {error}",
        )
