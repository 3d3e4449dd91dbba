"""The deciding side's handle on all movements of one rank."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import xxhash

from hicache.controller.agreed_numbers import AgreedNumbers
from hicache.controller.agreement import Finished, OperationWindow
from hicache.controller.copy_queue import CopyQueue
from hicache.controller.cost_model import CostModel
from hicache.controller.operations import CacheOperation
from hicache.controller.rank_meeting import Call, RankMeeting
from hicache.controller.records import LoadJob, WriteJob
from hicache.controller.reservations import WriteReservations
from hicache.controller.result_intake import ResultIntake
from hicache.controller.storage_attachment import StorageAttachment, StoragePolicies
from hicache.controller.store_queue import StoreQueue
from hicache.pools import alloc_like
from hicache.radix import CopyKind
from hicache.types import OperationId

if TYPE_CHECKING:
    from hicache.config import HiCacheConfig, StorageConfig
    from hicache.controller.mover import Mover
    from hicache.controller.storage_attachment import AttachmentState, StorageStatus
    from hicache.pools import Allocator
    from hicache.radix import Ticket
    from hicache.ranks import RankGroup
    from hicache.types import IntArray, RequestId

__all__ = ["HiCacheController"]

_MAX_WRITES_IN_FLIGHT = 64
_MAX_MERGED_WRITES = 16
"""Jobs on the write stream, and copies in each, which a step publishes at once; others wait."""

_NOTHING: Final = Finished()


class HiCacheController:
    """Queues copies, merges them into jobs for the moving side, and collects what has ended.

    Belongs to the scheduler's thread, decides nothing about the tree and never blocks but in
    `attach_storage_backend`, `detach_storage_backend`, `clear_storage_backend` and `close`.

    Args:
        config: policies and bounds; the same on every rank.
        device_allocator: free list of the device pool; it may be the engine's.
        host_allocator: free list of the host pools.
        mover: the moving side.
        ranks: with whom outcomes are agreed.

    Attributes:
        config: policies and bounds in force; attaching a store may change policies.
        device_allocator, host_allocator: what is allocated from, also by the scheduler: with
            several ranks an `AgreedAllocator` around the one that was given.
        num_device_page_ids: pages of this rank's device pool, which may have more than others.
        writes, loads: copies that have not ended.
        store_queue: prefetches and persists that have not ended.
        reservations: writes begun before a forward pass.
        costs: what reading, loading and computing have taken lately.
        meeting: where the ranks agree.
        stats: per movement.

    Raises:
        RanksDivergedError: ranks have other options, on all of them.
        RanksLostError: a rank does not construct its own.
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
        self.generation = 0
        self.num_device_page_ids = device_allocator.num_pages
        self.costs = CostModel(page_size=config.page_size)
        self.meeting = RankMeeting(ranks)
        self._numbers = AgreedNumbers(
            self.meeting,
            device_allocator=device_allocator,
            host_allocator=host_allocator,
            costs=self.costs,
        )
        self.device_allocator = self._numbers.device_allocator
        self.host_allocator = self._numbers.host_allocator
        self.writes = CopyQueue()
        self.loads = CopyQueue()
        self.store_queue = StoreQueue(mover, self._new_id)
        self._intake = ResultIntake(
            writes=self.writes, loads=self.loads, store_queue=self.store_queue, costs=self.costs
        )
        self.stats = self._intake.stats
        self.reservations = WriteReservations(
            self.writes,
            alloc_host=self._alloc_host,
            mover=mover,
            max_writes_in_flight=_MAX_WRITES_IN_FLIGHT,
        )
        self._mover = mover
        self._next_operation_id = 0
        self._attachment = StorageAttachment(mover, self.meeting)
        self._numbers.construct(self.meeting, config)
        if config.storage is not None:
            try:
                self.attach_storage_backend(config.storage)
            except BaseException:
                self._numbers.close()
                raise

    # -- L1 <-> L2 ---------------------------------------------------------------------------

    def write(
        self, device_pages: IntArray, *, ticket: Ticket | None = None, priority: int | None = None
    ) -> CacheOperation | None:
        """Queue the copy of `device_pages` to host pages allocated here.

        Returns:
            The operation, which owns its `host_pages` until it has ended, or None when the host
            pool has too few free pages: evict some and try once more.
        """
        host_pages = self._alloc_host(device_pages)
        if host_pages is None:
            return None
        operation = CacheOperation(ticket, device_pages, host_pages, priority)
        self.writes.queued.append(operation)
        return operation

    def start_writing(self) -> None:
        """Merge what is queued into jobs on the write stream, as far as there is room for them."""
        while self.writes.queued and len(self.writes.acks) < _MAX_WRITES_IN_FLIGHT:
            job, ack = self.writes.merged(
                WriteJob, self._new_id(), self.generation, most=_MAX_MERGED_WRITES
            )
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
            device_pages = alloc_like(self.device_allocator, host_pages, self.host_allocator)
            if device_pages is None:
                return None
        operation = CacheOperation(ticket, device_pages, host_pages, priority)
        self.loads.queued.append(operation)
        return operation

    @property
    def can_start_loading(self) -> bool:
        """Whether a load queued now can start now; one slot is left to the batch that runs."""
        return len(self.loads.acks) < max(1, self.config.num_load_slots - 1)

    @property
    def num_load_pages(self) -> int:
        """Pages of loads that have not ended, queued ones included."""
        return sum(len(one.host_pages) for one in self.loads.operations())

    def start_loading(self) -> int:
        """Merge what is queued into one job on the load stream.

        Returns:
            The producer index that consumers wait on; -1 when nothing was queued, or when every
            slot is busy and the loads stay queued (`loads.queued` tells).
        """
        if not self.loads.queued:
            return -1
        job, ack = self.loads.merged(LoadJob, self._new_id(), self.generation)
        if not self.meeting.alone:
            in_flight = tuple(one.producer for one in self.loads.acks)
            job = job._replace(busy_slots=in_flight)
        ack.producer = self._mover.submit_load(job)
        if ack.producer >= 0:
            self.loads.sent(ack)
        return ack.producer

    def reserve_write(self, request_id: RequestId, device_pages: IntArray) -> bool:
        """See `WriteReservations.reserve`, whose other methods end what this begins."""
        return self.reservations.reserve(
            request_id,
            device_pages,
            operation_id=self._new_id(),
            generation=self.generation,
        )

    # -- L2 <-> L3 ---------------------------------------------------------------------------

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
        """See `StoreQueue.num_prefetch_pages`."""
        return self.store_queue.num_prefetch_pages

    # -- progress ----------------------------------------------------------------------------

    def collect(self, now: float = 0.0, *, tree_digest: int = 0) -> Finished:
        """Return the operations that have ended on every rank, in order of submission.

        To be called exactly once per scheduler step, on every rank. Never blocks on a copy or on
        storage, but for the slowest rank. What it returns is in flight until `take` takes it; a
        query until its read is begun. A closed prefetch may still own memory: it comes again, in
        `released`, when it does not.

        Args:
            now: this rank's time in seconds; `now` of the controller is what all go by.
            tree_digest: of what this rank's tree has gone through; equal on all ranks.

        Raises:
            RanksLostError: a rank has not come; its share of what is in flight is unknown.
            RanksDivergedError: the ranks are not equal.
        """
        self.take_results()
        store, numbers = self.store_queue, self._numbers
        writes, loads = self.writes.acks, self.loads.acks
        if self.meeting.alone and not (writes or loads or store.prefetches or store.persists):
            numbers.now = now
            return _NOTHING
        window = OperationWindow(
            writes=writes, loads=loads, prefetches=store.prefetches, persists=store.persists
        )
        if self.meeting.alone:
            numbers.now, finished = now, window.finished_alone()
        else:
            agreed = self.meeting.agree(
                Call.STEP,
                [*window.values(), *numbers.values(now)],
                equal={"what their trees hold": tree_digest, "what is in flight": self._digest()},
            )
            numbers.take(agreed[OperationWindow.LENGTH :])
            finished = window.finished(agreed)
        return finished

    def take(self, finished: Finished) -> None:
        """Forget copies, persists and released prefetches that were collected: they are over."""
        if finished.writes:
            self.writes.drop(finished.writes)
        if finished.loads:
            self.loads.drop(finished.loads)
        self.store_queue.drop(finished)

    def take_results(self) -> None:
        """Keep what the moving side has brought, without an agreement on it."""
        self._intake.take(self._mover.poll())

    @property
    def now(self) -> float:
        """Time in seconds that every rank goes by, as of the last step."""
        return self._numbers.now

    @property
    def is_off(self) -> bool:
        """Whether nothing moves any more, because ranks are lost or have diverged."""
        return self.meeting.ended is not None

    @property
    def in_flight(self) -> dict[CopyKind, int]:
        """Operations of each kind that have not ended, queued ones included."""
        return {
            CopyKind.WRITE: len(self.writes),
            CopyKind.LOAD: len(self.loads),
            CopyKind.PREFETCH: len(self.store_queue.prefetches),
            CopyKind.PERSIST: len(self.store_queue.persists),
        }

    @property
    def num_in_flight(self) -> int:
        """Operations that have not ended, queued ones included."""
        return sum(self.in_flight.values())

    @property
    def num_spent(self) -> int:
        """Of these, those that only wait for a storage call to return, here or on another rank."""
        return self.store_queue.num_spent

    def owned_pages(self) -> tuple[list[IntArray], list[IntArray]]:
        """Return the device pages and the host pages that operations own, for checks."""
        host = [one.host_pages for one in self.writes.operations()]
        prefetches = self.store_queue.prefetches.values()
        host += [one.host_pages for one in prefetches if one.host_pages is not None]
        return [one.device_pages for one in self.loads.operations()], host

    # -- life cycle --------------------------------------------------------------------------

    @property
    def storage(self) -> StorageConfig | None:
        """The configuration of the store that takes work; None also while it is detaching."""
        return self._attachment.open_config

    @property
    def storage_batch_pages(self) -> int:
        """See `StorageAttachment.batch_pages`."""
        return self._attachment.batch_pages

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
        self.config = self._attachment.attach(
            storage, config=self.config, policies=policies, num_in_flight=self.num_in_flight
        )

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
        self.store_queue.reset(self.generation)

    def drop_queued(self) -> list[CacheOperation]:
        """Forget the copies that no job carries yet; the caller ends them."""
        return self.writes.drop_queued() + self.loads.drop_queued()

    def switch_off(self) -> None:
        """Begin nothing any more; the caller ends what is in flight."""
        self.reservations.abandon_all()
        self._attachment.refuse_work()

    def close(self, timeout_seconds: float) -> bool:
        """Stop the moving side; False when a call of it still runs."""
        self.reservations.abandon_all()
        # On every rank, also on one whose calls have all returned.
        self._attachment.refuse_work()
        stopped = self._mover.close(timeout_seconds)
        if stopped:
            self._attachment.closed()
        return stopped

    def closed(self) -> None:
        """Give the free pages back to those who own the free lists, when everything has ended."""
        self._numbers.close()

    def _alloc_host(self, device_pages: IntArray) -> IntArray | None:
        """Give host pages for a copy of `device_pages`, or None."""
        return alloc_like(self.host_allocator, device_pages, self.device_allocator)

    def _new_id(self) -> OperationId:
        operation_id = OperationId(self._next_operation_id)
        self._next_operation_id += 1
        return operation_id

    def _digest(self) -> int:
        """Return a number for what is in flight, of which every rank has the same."""
        queues = (self.writes.queued, self.writes.acks, self.loads.queued, self.loads.acks)
        sizes = [len(queue) for queue in queues]
        store, takes_work = self.store_queue, int(self.storage is not None)
        sizes += [len(store.prefetches), len(store.persists), takes_work, self._next_operation_id]
        return xxhash.xxh3_64_intdigest(struct.pack("<8q", *sizes)) >> 1
