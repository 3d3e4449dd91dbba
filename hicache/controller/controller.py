"""The deciding side's handle on all movements of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller.agreement import Finished, agree_on_finished
from hicache.controller.copy_queue import CopyQueue
from hicache.controller.cost_model import PrefetchCostModel
from hicache.controller.operations import CacheOperation, PrefetchOperation, StorageOperation
from hicache.controller.records import (
    CopyResult,
    LoadJob,
    PersistJob,
    Phase,
    PrefetchJob,
    QueryJob,
    WriteJob,
)
from hicache.controller.reservations import WriteReservations
from hicache.controller.stats import MovementStats
from hicache.controller.storage_attachment import StorageAttachment, StoragePolicies
from hicache.radix import CopyKind
from hicache.types import OperationId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.config import HiCacheConfig, StorageConfig
    from hicache.controller.mover import Mover
    from hicache.controller.records import Result
    from hicache.controller.storage_attachment import AttachmentState, StorageStatus
    from hicache.pools import Allocator
    from hicache.radix import RadixKey, RadixNode, Ticket
    from hicache.ranks import RankGroup
    from hicache.types import IntArray, PageHash, RequestId

__all__ = ["HiCacheController"]

_MAX_WRITES_IN_FLIGHT = 64
"""Jobs on the write stream; further writes wait and are merged into one job when there is room."""


class HiCacheController:
    """Queues copies, merges them into jobs for the moving side, and collects what has ended.

    Belongs to the scheduler's thread, decides nothing about the tree and never blocks but in
    `attach_storage_backend`, `detach_storage_backend`, `clear_storage_backend` and `close`.

    Args:
        config: policies and bounds.
        device_allocator: free list of the device pool; it may be the engine's.
        host_allocator: free list of the host pools.
        mover: the moving side.
        ranks: with whom outcomes are agreed.

    Attributes:
        config: policies and bounds in force; attaching a store may change policies.
        writes, loads: copies that have not ended.
        reservations: writes begun before a forward pass.
        costs: what reading and computing have taken lately.
        stats: per movement.
    """

    def __init__(
        self,
        config: HiCacheConfig,
        *,
        device_allocator: Allocator,
        host_allocator: Allocator,
        mover: Mover,
        ranks: RankGroup,
    ) -> None:
        self.config = config
        self.device_allocator = device_allocator
        self.host_allocator = host_allocator
        self.generation = 0
        self.writes = CopyQueue()
        self.loads = CopyQueue()
        estimates = config.prefetch.cost_estimate
        self.costs = PrefetchCostModel(page_size=config.page_size, enabled=estimates)
        self.stats = {kind: MovementStats() for kind in CopyKind}
        self.reservations = WriteReservations(
            self.writes,
            host_allocator=host_allocator,
            mover=mover,
            max_writes_in_flight=_MAX_WRITES_IN_FLIGHT,
        )
        self._mover = mover
        self._ranks = ranks
        self._prefetches: dict[OperationId, PrefetchOperation] = {}
        self._persists: dict[OperationId, StorageOperation] = {}
        self._next_operation_id = 0
        self._attachment = StorageAttachment(mover, ranks)
        if config.storage is not None:
            self.attach_storage_backend(config.storage)

    # -- L1 <-> L2 ---------------------------------------------------------------------------

    def write(
        self, device_pages: IntArray, *, ticket: Ticket | None = None, priority: int | None = None
    ) -> CacheOperation | None:
        """Queue the copy of `device_pages` to host pages allocated here.

        Returns:
            The operation, which owns its `host_pages` until it has ended, or None when the host
            pool has too few free pages: evict some and try once more.
        """
        host_pages = self.host_allocator.alloc(len(device_pages))
        if host_pages is None:
            return None
        operation = CacheOperation(ticket, device_pages, host_pages, priority)
        self.writes.queued.append(operation)
        return operation

    def start_writing(self) -> None:
        """Merge what is queued into one job on the write stream, if there is room for a job."""
        if not self.writes.queued or len(self.writes.acks) >= _MAX_WRITES_IN_FLIGHT:
            return
        job, ack = self.writes.merged(WriteJob, self._new_id(), self.generation)
        self._mover.submit_write(job)
        self.writes.sent(ack)

    def load(
        self,
        host_pages: IntArray,
        *,
        device_pages: IntArray | None = None,
        ticket: Ticket | None = None,
        priority: int | None = None,
    ) -> CacheOperation | None:
        """Queue the copy of `host_pages` to device pages: the caller's, or allocated here.

        Returns:
            The operation, which owns its `device_pages` until it has ended, or None when the
            device pool has too few free pages.
        """
        if device_pages is None:
            device_pages = self.device_allocator.alloc(len(host_pages))
            if device_pages is None:
                return None
        operation = CacheOperation(ticket, device_pages, host_pages, priority)
        self.loads.queued.append(operation)
        return operation

    @property
    def can_start_loading(self) -> bool:
        """Whether a load queued now can start now; one slot is left to the batch that runs."""
        return len(self.loads.acks) < max(1, self.config.num_load_slots - 1)

    def start_loading(self) -> int:
        """Merge what is queued into one job on the load stream.

        Returns:
            The producer index that consumers wait on; -1 when nothing was queued, or when every
            slot is busy and the loads stay queued (`loads.queued` tells).
        """
        if not self.loads.queued:
            return -1
        job, ack = self.loads.merged(LoadJob, self._new_id(), self.generation)
        producer = self._mover.submit_load(job)
        if producer >= 0:
            self.loads.sent(ack)
        return producer

    def reserve_write(self, request_id: RequestId, device_pages: IntArray) -> bool:
        """See `WriteReservations.reserve`, whose other methods end what this begins."""
        return self.reservations.reserve(
            request_id,
            device_pages,
            operation_id=self._new_id(),
            generation=self.generation,
        )

    # -- L2 <-> L3 ---------------------------------------------------------------------------

    def prefetch(
        self,
        request_id: RequestId,
        *,
        key: RadixKey,
        anchor: RadixNode,
        ticket: Ticket,
        hashes: Sequence[PageHash],
    ) -> PrefetchOperation:
        """Ask storage for pages below `anchor`; `start_prefetch` reads what it has."""
        operation = PrefetchOperation(
            self._new_id(), request_id, ticket, anchor, key, tuple(hashes)
        )
        self._prefetches[operation.operation_id] = operation
        self._mover.submit_storage(
            QueryJob(
                operation_id=operation.operation_id,
                generation=self.generation,
                hashes=operation.hashes,
            )
        )
        return operation

    def start_prefetch(self, operation: PrefetchOperation, host_pages: IntArray) -> None:
        """Read the first `len(host_pages)` pages; the operation owns `host_pages` from now on."""
        operation.host_pages = host_pages
        operation.phase = Phase.RUNNING
        self._mover.submit_storage(
            PrefetchJob(
                operation_id=operation.operation_id,
                generation=self.generation,
                hashes=operation.hashes[: len(host_pages)],
                host_pages=host_pages,
            )
        )

    def terminate_prefetch(self, operation: PrefetchOperation) -> None:
        """Mark that the prefetch is to end with what it has; `collect` ends it."""
        operation.terminated = True
        self._mover.end(operation.operation_id)

    def forget_prefetch(self, operation: PrefetchOperation) -> None:
        """Drop an operation that owns nothing any more."""
        del self._prefetches[operation.operation_id]

    def prefetch_rate_limited(self, num_pages: int = 0) -> bool:
        """Whether prefetches hold so many host pages that `num_pages` more are too many.

        One prefetch is always admitted, whatever the size of the host pool.
        """
        limit = self.config.prefetch.max_inflight_pages
        if limit is None:
            limit = max(1, self.host_allocator.num_pages // 2)
        held = self.num_prefetch_pages
        return held > 0 and held + num_pages > limit

    @property
    def num_prefetch_pages(self) -> int:
        """Host pages that open prefetches own now; a read that hangs leaves the others room."""
        owned = (one.host_pages for one in self._prefetches.values() if not one.closed)
        return sum(len(pages) for pages in owned if pages is not None)

    def write_storage(
        self,
        host_pages: IntArray,
        *,
        ticket: Ticket,
        hashes: Sequence[PageHash],
        parent_hash: bytes,
    ) -> StorageOperation | None:
        """Persist `host_pages`, which stay protected by the ticket until storage has let go.

        Returns:
            The operation, or None when too many are under way already.
        """
        storage = self.storage
        if storage is None or len(self._persists) >= storage.max_inflight_persist_operations:
            return None
        operation = StorageOperation(self._new_id(), ticket, hashes=tuple(hashes))
        self._persists[operation.operation_id] = operation
        self._mover.submit_storage(
            PersistJob(
                operation_id=operation.operation_id,
                generation=self.generation,
                hashes=operation.hashes,
                parent_hash=parent_hash,
                host_pages=host_pages,
            )
        )
        return operation

    # -- progress ----------------------------------------------------------------------------

    def collect(self) -> Finished:
        """Return the operations that have ended on every rank, in order of submission.

        To be called exactly once per scheduler step, on every rank. Never blocks on a copy or on
        storage. What it returns is not in flight any more, except that a closed prefetch may still
        own memory: it comes again, in `released`, when it does not.
        """
        for result in self._mover.poll():
            self._take(result)
        finished = agree_on_finished(
            self._ranks,
            writes=self.writes.acks,
            loads=self.loads.acks,
            prefetches=self._prefetches,
            persists=self._persists,
        )
        self.writes.drop(finished.writes)
        self.loads.drop(finished.loads)
        for persist, _ in finished.persists:
            del self._persists[persist.operation_id]
        for prefetch in finished.released:
            del self._prefetches[prefetch.operation_id]
        return finished

    @property
    def in_flight(self) -> dict[CopyKind, int]:
        """Operations of each kind that have not ended, queued ones included."""
        return {
            CopyKind.WRITE: len(self.writes),
            CopyKind.LOAD: len(self.loads),
            CopyKind.PREFETCH: len(self._prefetches),
            CopyKind.PERSIST: len(self._persists),
        }

    @property
    def num_in_flight(self) -> int:
        """Operations that have not ended, queued ones included."""
        return sum(self.in_flight.values())

    @property
    def num_spent(self) -> int:
        """Of these, those that only wait for a storage call to return, here or on another rank."""
        num_prefetches = sum(one.spent for one in self._prefetches.values())
        return num_prefetches + sum(one.spent for one in self._persists.values())

    def owned_pages(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return the device pages and the host pages that operations own, for checks."""
        host = [one.host_pages for one in self.writes.operations()]
        host += [one.host_pages for one in self._prefetches.values() if one.host_pages is not None]
        return [one.device_pages for one in self.loads.operations()], host

    # -- life cycle --------------------------------------------------------------------------

    @property
    def storage(self) -> StorageConfig | None:
        """The configuration of the store that takes work; None also while it is detaching."""
        return self._attachment.open_config

    @property
    def storage_state(self) -> AttachmentState:
        """Whether there is a store, and whether it takes work."""
        return self._attachment.state

    @property
    def storage_status(self) -> StorageStatus:
        """What there is to know about the store; asks the moving side."""
        policies = StoragePolicies.of(self.config)
        return self._attachment.status(policies, num_in_flight=self.num_in_flight)

    def attach_storage_backend(
        self, storage: StorageConfig, *, policies: StoragePolicies | None = None
    ) -> None:
        """Open a store and let `policies` be in force; the same path at start and later.

        When this very store is attached already, only the policies change. See
        `StorageAttachment.attach` for what is refused; then no policy changes either.
        """
        config = self.config if policies is None else policies.applied_to(self.config)
        self._attachment.attach(storage, num_in_flight=self.num_in_flight)
        self.config = config

    def detach_storage_backend(self, timeout_seconds: float = 10.0) -> None:
        """See `StorageAttachment.detach`; what waits only for a hung call is not in its way."""
        num_in_flight = self.num_in_flight - self.num_spent
        self._attachment.detach(timeout_seconds, num_in_flight=num_in_flight)

    def clear_storage_backend(self) -> int:
        """See `StorageAttachment.clear`."""
        return self._attachment.clear(num_in_flight=self.num_in_flight)

    def reset(self) -> None:
        """Begin a new generation; jobs in flight end as ever, with tickets that are void."""
        self.generation += 1
        self.reservations.abandon_all()
        for operation in self._prefetches.values():
            self.terminate_prefetch(operation)

    def drop_queued(self) -> list[CacheOperation]:
        """Forget the copies that no job carries yet; the caller ends them."""
        return self.writes.drop_queued() + self.loads.drop_queued()

    def close(self, timeout_seconds: float) -> bool:
        """Stop the moving side; False when a call of it still runs."""
        self.reservations.abandon_all()
        stopped = self._mover.close(timeout_seconds)
        if stopped:
            self._attachment.closed()
        return stopped

    def _new_id(self) -> OperationId:
        operation_id = OperationId(self._next_operation_id)
        self._next_operation_id += 1
        return operation_id

    def _take(self, result: Result) -> None:
        """Keep what a result says for `agree_on_finished`; one of a forgotten operation is old."""
        if isinstance(result, CopyResult):
            kind = CopyKind.WRITE if self.writes.take(result) else CopyKind.LOAD
            if kind is CopyKind.LOAD:
                self.loads.take(result)
        elif result.operation_id in self._persists:
            kind = CopyKind.PERSIST
            self._persists[result.operation_id].take(result)
        else:
            kind = CopyKind.PREFETCH
            prefetch = self._prefetches.get(result.operation_id)
            if prefetch is not None:
                prefetch.take(self.costs.weigh(result))
        self.stats[kind].note(result)
