"""The moving side: streams, pools and storage of one rank; carries out jobs and reports results."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hicache.controller.layer_writes import LayerWrites
from hicache.controller.running_copy import RunningCopy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.clock import Clock
    from hicache.config import StorageConfig
    from hicache.controller.records import LoadJob, Result, StorageJob, StorageReport, WriteJob
    from hicache.controller.storage_tier import StorageTier
    from hicache.device import Device, Event, Stream
    from hicache.pools import CpLayouts, HostKVPool
    from hicache.transfer import LayerDoneCounter, TransferEngine, TransferPlan
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

    One thread calls; no method but `close` and those that open, close and clear a store blocks, and
    those do for a bounded time, whatever the backend does.
    """

    def submit_write(self, job: WriteJob) -> None:
        """Start a write after the work that the compute stream has now.

        One `by_layer` copies the layers that forward passes end from now on, until all are copied
        or `finish_write` is called.
        """

    def finish_write(self, operation_id: OperationId, *, wanted: bool) -> None:
        """End a write `by_layer`: copy at once what is missing, or, not wanted, copy no more.

        No effect when all layers were copied by themselves.
        """

    def submit_load(self, job: LoadJob) -> int:
        """Start a load and return its producer index; -1 when every slot is busy: try again."""

    def submit_storage(self, job: StorageJob) -> None:
        """Queue storage work."""

    def end(self, operation_id: OperationId) -> None:
        """Let a storage operation end before its next backend call."""

    def poll(self) -> list[Result]:
        """Return what has ended or progressed since the last call."""

    def attach_storage(self, config: StorageConfig) -> int:
        """Open a store and return how many pages one call moves; any error changes nothing."""

    def detach_storage(self, timeout_seconds: float) -> bool:
        """Stop the store's workers and close it; True when there is none.

        False when a call still runs after `timeout_seconds`: the store stays open for it and takes
        no new work, and a later call completes what this one has begun.
        """

    def discard_storage(self) -> None:
        """Undo `attach_storage`, of a store that was given no work.

        Should closing it hang, it is left to itself, for some seconds' wait.
        """

    def clear_storage(self) -> int:
        """Remove every page of this namespace from the store and return how many; blocks."""

    def storage_report(self) -> StorageReport:
        """Return how the store does; at once, also when its calls hang."""

    def close(self, timeout_seconds: float) -> bool:
        """Drain streams, stop workers, close the store; False when something still runs."""


class LocalMover:
    """A mover in the process of the model.

    One thread calls, but `on_layer_end`, which the model's thread may call.

    Args:
        device: where streams and events come from.
        pairs: pools by page id, the model's KV first. The mover closes the host pools.
        counter: the slots of the loads; the device pool waits on it.
        storage: the store's side; closed with the mover.
        cp: where pages are that context-parallel ranks share; by default this rank has all. Jobs
            name logical pages then, and this rank copies those that it owns: none is a copy too.
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
        cp: CpLayouts | None = None,
    ) -> None:
        self._device = device
        self._cp = cp
        self._pairs = tuple(pairs)
        self._counter = counter
        self._storage = storage
        self._clock = clock
        # On CUDA, stamps tell when work was launched.
        self._launched_only = device.torch_device.type == "cuda"
        self._num_layers = max(pair.engine.num_layers for pair in pairs)
        self._write_stream = device.create_stream("write")
        self._load_stream = device.create_stream("load")
        self._writes: deque[RunningCopy] = deque()
        self._loads: deque[RunningCopy] = deque()
        self._layer_writes = LayerWrites(
            device, self._write_stream, [pair.engine for pair in pairs]
        )
        # The write stream's: a scheduler's thread and the model's may both have work for it.
        self._write_lock = threading.Lock()

    def submit_write(self, job: WriteJob) -> None:
        """See `Mover.submit_write`."""
        plans, stream = self._plans(job), self._write_stream
        copy = self._new_copy(job, plans)
        with self._write_lock:
            if job.by_layer:
                self._layer_writes.begin(copy, plans)
            else:
                self._start(stream, self._device.create_event())
                stream.enqueue(copy.stamp)
                stream.enqueue(partial(self._write_layers, plans))
                stream.enqueue(copy.stamp)
                stream.record(copy.finished)
        self._writes.append(copy)

    def finish_write(self, operation_id: OperationId, *, wanted: bool) -> None:
        """See `Mover.finish_write`."""
        with self._write_lock:
            self._layer_writes.finish(operation_id, wanted=wanted)

    def on_layer_end(self, layer: int, source: int = 0) -> None:
        """Copy `layer` for the writes that wait for it; what a device pool calls.

        To be called when the model has stored, or enqueued to store, all that the pass stores in
        this layer. Cheap when no write waits.

        Args:
            layer: of the pool.
            source: which pool: the model's KV is 0, side pools follow.
        """
        if not self._layer_writes:
            return
        with self._write_lock:
            self._layer_writes.layer_ended(layer, source)

    def submit_load(self, job: LoadJob) -> int:
        """See `Mover.submit_load`."""
        plans = self._plans(job)
        index = self._counter.update_producer(job.busy_slots)
        if index is None:
            return -1
        stream, load = self._load_stream, self._counter.event(index)
        copy = self._new_copy(job, plans)
        self._start(stream, load.start_event)
        stream.enqueue(copy.stamp)
        for layer in range(self._num_layers):
            for pair, plan in zip(self._pairs, plans, strict=True):
                if layer < pair.engine.num_layers:
                    stream.enqueue(partial(pair.engine.load_layer, plan, layer))
            load.complete(layer, stream)
        stream.enqueue(copy.stamp)
        stream.record(copy.finished)
        copy.checked = load.layer_events
        self._loads.append(copy)
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
            while copies and copies[0].done:
                results.append(copies.popleft().result(launched_only=self._launched_only))
        results += self._storage.poll()
        return results

    def attach_storage(self, config: StorageConfig) -> int:
        """See `Mover.attach_storage`."""
        return self._storage.attach(config)

    def detach_storage(self, timeout_seconds: float) -> bool:
        """See `Mover.detach_storage`."""
        return self._storage.detach(timeout_seconds)

    def discard_storage(self) -> None:
        """See `Mover.discard_storage`."""
        self._storage.discard()

    def clear_storage(self) -> int:
        """See `Mover.clear_storage`."""
        return self._storage.clear()

    def storage_report(self) -> StorageReport:
        """See `Mover.storage_report`."""
        return self._storage.report()

    def close(self, timeout_seconds: float) -> bool:
        """See `Mover.close`.

        Host memory that a hung call may still write to stays mapped.
        """
        end = self._clock.now() + timeout_seconds
        with self._write_lock:
            self._layer_writes.abandon_all()
        stopped = True
        for stream in (self._write_stream, self._load_stream):
            stopped &= stream.close(max(0.0, end - self._clock.now()))
        stopped &= self._storage.close(max(0.0, end - self._clock.now()))
        if stopped:
            for pair in self._pairs:
                pair.host_pool.close()
        return stopped

    def _plans(self, job: WriteJob | LoadJob) -> list[TransferPlan]:
        pages = (job.device_pages, job.host_pages)
        device_pages, host_pages = pages if self._cp is None else self._cp.owned_pairs(*pages)
        return [pair.engine.plan(device_pages, host_pages) for pair in self._pairs]

    def _new_copy(self, job: WriteJob | LoadJob, plans: Sequence[TransferPlan]) -> RunningCopy:
        num_bytes = sum(
            pair.engine.layer_bytes(plan) * pair.engine.num_layers
            for pair, plan in zip(self._pairs, plans, strict=True)
        )
        finished = self._device.create_event()
        return RunningCopy(job, num_bytes=num_bytes, finished=finished, now=self._clock.now)

    def _write_layers(self, plans: Sequence[TransferPlan]) -> None:
        """Copy all layers; one piece of work, as nobody waits for a single one."""
        for layer in range(self._num_layers):
            for pair, plan in zip(self._pairs, plans, strict=True):
                if layer < pair.engine.num_layers:
                    pair.engine.write_layer(plan, layer)

    def _start(self, stream: Stream, started: Event) -> None:
        """Let `stream` wait for what the model has enqueued, which may still use the pages.

        After the start event, so that a wait in vain fails the copy that follows it.
        """
        compute, used = self._device.compute_stream(), self._device.create_event()
        compute.record(used)
        stream.record(started)
        stream.wait(used)
