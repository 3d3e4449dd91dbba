"""How far every movement of a simulated rank is, seen from between its two sides."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hicache.controller.records import CopyResult, PersistJob, Phase, QueryJob, QueryResult
from hicache.sim.coverage import Fault, Operation, State
from hicache.sim.executor import StorageCall
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hicache.config import StorageConfig
    from hicache.controller import LocalMover
    from hicache.controller.records import (
        LoadJob,
        PagesResult,
        Result,
        StorageJob,
        StorageReport,
        WriteJob,
    )
    from hicache.device import Event
    from hicache.pools import CpLayout
    from hicache.sim.coverage import Coverage
    from hicache.sim.executor import SimulatedExecutor
    from hicache.sim.streams import NamedStreams
    from hicache.types import IntArray, OperationId

__all__ = ["WatchedMover"]

_FAULT_OF = {
    PageOutcome.MISS: Fault.MISSING,
    PageOutcome.CORRUPT: Fault.CORRUPT,
    PageOutcome.TRUNCATED: Fault.TRUNCATED,
    PageOutcome.TIMEOUT: Fault.TIMEOUT,
    PageOutcome.NO_SPACE: Fault.NO_SPACE,
}


@dataclasses.dataclass(eq=False)
class _Copy:
    """A copy whose result nobody has taken.

    Attributes:
        ended: recorded behind all of it, when that has been submitted.
        missing: layers that are not submitted, each with the number of its pool.
        num_layers: how many it has waited for; 0 when it was submitted as a whole.
        abandoned: whether it was given up while layers were missing.
    """

    operation: Operation
    ended: Event
    missing: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    num_layers: int = 0
    abandoned: bool = False

    @property
    def state(self) -> State:
        if self.missing and len(self.missing) == self.num_layers:
            return State.QUEUED
        return State.RUNNING if self.missing or not self.ended.query() else State.ENDED


class WatchedMover:
    """Hands every job on to a `LocalMover` and every result back, and remembers what is between.

    Args:
        mover: does the work.
        device: where `mover` has its streams.
        executor: what the storage work of `mover` runs on.
        layers: of the pools, each with the number of its pool.
        coverage: is told what results say.
        host_layout: of host pages that ranks share.

    Attributes:
        violations: jobs that ended twice or never began, one sentence each.
        newest_query: of the query submitted last; whoever sets it to None learns of the next.
        newest_load: likewise for loads.
        newest_reservation: likewise for writes by layer.
        newest_finish: whether the write was wanted that was finished last.
    """

    def __init__(
        self,
        mover: LocalMover,
        *,
        device: NamedStreams,
        executor: SimulatedExecutor,
        layers: Collection[tuple[int, int]],
        coverage: Coverage,
        host_layout: CpLayout | None = None,
    ) -> None:
        self._mover = mover
        self._device = device
        self._executor = executor
        self._layers = layers
        self._coverage = coverage
        self._host_layout = host_layout
        self._copies: dict[OperationId, _Copy] = {}
        self._calls: dict[OperationId, StorageCall] = {}
        self._unfinished: set[OperationId] = set()
        self.violations: list[str] = []
        self.newest_query: OperationId | None = None
        self.newest_load: OperationId | None = None
        self.newest_reservation: OperationId | None = None
        self.newest_finish = True

    def state(self, operation_id: OperationId | None) -> tuple[Operation, State] | None:
        """Return how far a job is; None when its result was taken, or there is none."""
        if operation_id in self._calls:
            call = self._calls[operation_id]
            return call.operation, call.state
        if operation_id in self._copies:
            copy = self._copies[operation_id]
            return copy.operation, copy.state
        return None

    def states(self) -> Iterator[tuple[Operation, State]]:
        """Return how far each job is whose result nobody has taken."""
        for operation_id in [*self._copies, *self._calls]:
            state = self.state(operation_id)
            assert state is not None
            yield state

    def reading_jobs(self) -> list[StorageJob]:
        """Return the prefetches whose result nobody has taken."""
        calls = self._calls.values()
        return [call.job for call in calls if call.operation is Operation.PREFETCH]

    def submit_write(self, job: WriteJob) -> None:
        """See `Mover.submit_write`."""
        self._mover.submit_write(job)
        operation = Operation.RESERVED if job.by_layer else Operation.WRITE
        self._note_owner(operation, job.host_pages)
        if not job.by_layer:
            self._watch(job.operation_id, Operation.WRITE)
            return
        self._copies[job.operation_id] = _Copy(
            Operation.RESERVED,
            self._device.create_event(),
            missing=set(self._layers),
            num_layers=len(self._layers),
        )
        self._unfinished.add(job.operation_id)
        self.newest_reservation = job.operation_id

    def finish_write(self, operation_id: OperationId, *, wanted: bool) -> None:
        """See `Mover.finish_write`."""
        self.newest_finish = wanted
        self._mover.finish_write(operation_id, wanted=wanted)
        if operation_id not in self._unfinished:
            self.violations.append(f"write {operation_id} waits for no finish")
        self._unfinished.discard(operation_id)
        copy = self._copies.get(operation_id)
        if copy is None:
            if wanted:
                self._coverage.note(Operation.RESERVED, State.ENDED, Fault.EARLY)
            return
        if copy.missing:
            copy.abandoned = not wanted
            if wanted:
                self._coverage.note(copy.operation, copy.state, Fault.CATCH_UP)
            copy.missing.clear()
            self._record_end(copy)
        copy.operation = Operation.WRITE

    def on_layer_end(self, layer: int, source: int = 0) -> None:
        """See `LocalMover.on_layer_end`."""
        self._mover.on_layer_end(layer, source)
        for copy in self._copies.values():
            if (source, layer) in copy.missing:
                copy.missing.remove((source, layer))
                if not copy.missing:
                    self._record_end(copy)

    def submit_load(self, job: LoadJob) -> int:
        """See `Mover.submit_load`."""
        producer = self._mover.submit_load(job)
        if producer >= 0:
            self._watch(job.operation_id, Operation.LOAD)
            self._note_owner(Operation.LOAD, job.host_pages)
            self.newest_load = job.operation_id
        return producer

    def submit_storage(self, job: StorageJob) -> None:
        """See `Mover.submit_storage`."""
        if isinstance(job, QueryJob):
            operation = Operation.QUERY
            self.newest_query = job.operation_id
        else:
            operation = Operation.PERSIST if isinstance(job, PersistJob) else Operation.PREFETCH
            self._note_owner(operation, job.host_pages)
        if job.operation_id in self._calls:
            self.violations.append(f"a {operation.value} began before its query had ended")
        call = self._calls[job.operation_id] = StorageCall(operation, job)
        self._executor.expect(call)
        self._mover.submit_storage(job)

    def end(self, operation_id: OperationId) -> None:
        """See `Mover.end`."""
        self._mover.end(operation_id)

    def poll(self) -> list[Result]:
        """See `Mover.poll`."""
        results = self._mover.poll()
        for result in results:
            if isinstance(result, CopyResult):
                self._take_copy(result)
            else:
                self._take(result)
        return results

    def attach_storage(self, config: StorageConfig) -> int:
        """See `Mover.attach_storage`."""
        return self._mover.attach_storage(config)

    def detach_storage(self, timeout_seconds: float) -> bool:
        """See `Mover.detach_storage`."""
        return self._mover.detach_storage(timeout_seconds)

    def discard_storage(self) -> None:
        """See `Mover.discard_storage`."""
        self._mover.discard_storage()

    def clear_storage(self) -> int:
        """See `Mover.clear_storage`."""
        return self._mover.clear_storage()

    def storage_report(self) -> StorageReport:
        """See `Mover.storage_report`."""
        return self._mover.storage_report()

    def close(self, timeout_seconds: float) -> bool:
        """See `Mover.close`."""
        return self._mover.close(timeout_seconds)

    def _note_owner(self, operation: Operation, pages: IntArray) -> None:
        layout = self._host_layout
        if layout is not None and len(pages) and not layout.owned_by_this_rank(pages).any():
            self._coverage.note(operation, State.RUNNING, Fault.ELSEWHERE)

    def _watch(self, operation_id: OperationId, operation: Operation) -> None:
        copy = self._copies[operation_id] = _Copy(operation, self._device.create_event())
        self._device.streams[operation.value].record(copy.ended)

    def _record_end(self, write: _Copy) -> None:
        self._device.streams[Operation.WRITE.value].record(write.ended)

    def _take_copy(self, result: CopyResult) -> None:
        copy = self._copies.pop(result.operation_id, None)
        if copy is None or copy.missing or copy.abandoned is not result.abandoned:
            self.violations.append(f"there is no copy that could end with {result}")
            return
        if copy.num_layers and result.error:
            self._coverage.note(Operation.RESERVED, State.RUNNING, Fault.RAISE)

    def _take(self, result: QueryResult | PagesResult) -> None:
        call = self._calls.get(result.operation_id)
        if call is None:
            self.violations.append(f"there is no storage job that could end with {result}")
            return
        if result.phase is Phase.ENDED:
            del self._calls[result.operation_id]
        if isinstance(result, QueryResult):
            assert isinstance(call.job, QueryJob)
            is_short = not result.error and result.num_pages < len(call.job.hashes)
            faults = [Fault.MISSING] if is_short else []
        else:
            faults = [_FAULT_OF[one] for one, _ in result.outcomes if one in _FAULT_OF]
        for fault in faults:
            self._coverage.note(call.operation, State.RUNNING, fault)
