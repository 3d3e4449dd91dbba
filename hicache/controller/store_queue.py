"""Movements between host and storage that have not ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller.operations import PrefetchOperation, StorageOperation
from hicache.controller.records import PersistJob, Phase, PrefetchJob, QueryJob
from hicache.radix import CopyKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.controller.agreement import Finished
    from hicache.controller.mover import Mover
    from hicache.controller.records import StorageResult
    from hicache.radix import RadixKey, RadixNode, Ticket
    from hicache.types import IntArray, OperationId, PageHash, RequestId

__all__ = ["StoreQueue"]


class StoreQueue:
    """The prefetches and the persists of one rank, oldest first.

    Args:
        mover: carries them out.
        new_id: gives the next operation id.

    Attributes:
        prefetches: asked for, under way, or closed with memory that a call still uses.
        persists: under way.
        num_prefetch_pages: host pages that open prefetches own now; a read that hangs leaves the
            others room.
    """

    def __init__(self, mover: Mover, new_id: Callable[[], OperationId]) -> None:
        self._mover = mover
        self._new_id = new_id
        self._generation = 0
        self.prefetches: dict[OperationId, PrefetchOperation] = {}
        self.persists: dict[OperationId, StorageOperation] = {}
        self.num_prefetch_pages = 0

    def __len__(self) -> int:
        return len(self.prefetches) + len(self.persists)

    @property
    def num_spent(self) -> int:
        """Operations that only wait for a storage call to return, here or on another rank."""
        num_prefetches = sum(one.spent for one in self.prefetches.values())
        return num_prefetches + sum(one.spent for one in self.persists.values())

    def num_pages_beside(self, operation: PrefetchOperation, num_pages: int) -> int:
        """Return how many pages other prefetches read while `operation` reads `num_pages`.

        As many of each as of this one, where they go on in turn; by what has arrived everywhere.
        """
        return sum(
            min(num_pages, len(one.host_pages) - one.num_arrived)
            for one in self.prefetches.values()
            if one.host_pages is not None and not (one.closed or one.terminated or one is operation)
        )

    def prefetch(
        self,
        request_id: RequestId,
        *,
        key: RadixKey,
        anchor: RadixNode,
        ticket: Ticket,
        hashes: Sequence[PageHash],
        parent_hash: bytes,
    ) -> PrefetchOperation:
        """Ask storage for pages below `anchor`; `start_prefetch` reads what it has."""
        operation = PrefetchOperation(
            self._new_id(), request_id, ticket, anchor, key, tuple(hashes), parent_hash
        )
        self.prefetches[operation.operation_id] = operation
        self._mover.submit_storage(
            QueryJob(
                operation_id=operation.operation_id,
                generation=self._generation,
                hashes=operation.hashes,
            )
        )
        return operation

    def start_prefetch(self, operation: PrefetchOperation, host_pages: IntArray) -> None:
        """Read the first `len(host_pages)` pages; the operation owns `host_pages` from now on."""
        operation.host_pages = host_pages
        operation.phase = Phase.RUNNING
        self.num_prefetch_pages += len(host_pages)
        self._mover.submit_storage(
            PrefetchJob(
                operation_id=operation.operation_id,
                generation=self._generation,
                hashes=operation.hashes[: len(host_pages)],
                parent_hash=operation.parent_hash,
                host_pages=host_pages,
            )
        )

    def terminate_prefetch(self, operation: PrefetchOperation) -> None:
        """Mark that the prefetch is to end with what it has."""
        operation.terminated = True
        self._mover.end(operation.operation_id)

    def close_prefetch(self, operation: PrefetchOperation, untaken: IntArray) -> None:
        """Note that all host pages but `untaken` have gone into the tree; these it still owns."""
        assert operation.host_pages is not None
        self.num_prefetch_pages -= len(operation.host_pages)
        operation.closed, operation.host_pages = True, untaken

    def reset(self, generation: int) -> None:
        """End every prefetch with what it has; what follows belongs to `generation`."""
        self._generation = generation
        for operation in self.prefetches.values():
            self.terminate_prefetch(operation)

    def forget_prefetch(self, operation: PrefetchOperation) -> None:
        """Drop an operation that owns nothing any more."""
        del self.prefetches[operation.operation_id]

    def persist(
        self,
        host_pages: IntArray,
        *,
        ticket: Ticket,
        hashes: Sequence[PageHash],
        parent_hash: bytes,
        max_operations: int,
    ) -> StorageOperation | None:
        """Persist `host_pages`, which stay protected by the ticket until storage has let go.

        Returns:
            The operation, or None when `max_operations` are under way already.
        """
        if len(self.persists) >= max_operations:
            return None
        operation = StorageOperation(self._new_id(), ticket, hashes=tuple(hashes))
        self.persists[operation.operation_id] = operation
        self._mover.submit_storage(
            PersistJob(
                operation_id=operation.operation_id,
                generation=self._generation,
                hashes=operation.hashes,
                parent_hash=parent_hash,
                host_pages=host_pages,
            )
        )
        return operation

    def take(self, result: StorageResult) -> CopyKind:
        """Keep what a result says and return whose it is; one of a forgotten operation is old."""
        persist = self.persists.get(result.operation_id)
        if persist is not None:
            persist.take(result)
            return CopyKind.PERSIST
        prefetch = self.prefetches.get(result.operation_id)
        if prefetch is not None:
            prefetch.take(result)
        return CopyKind.PREFETCH

    def drop(self, finished: Finished) -> None:
        """Forget what has ended everywhere; closed prefetches when they are released."""
        for persist, _ in finished.persists:
            del self.persists[persist.operation_id]
        for prefetch in finished.released:
            del self.prefetches[prefetch.operation_id]

    def drop_all(self) -> tuple[list[PrefetchOperation], list[StorageOperation]]:
        """Forget everything and return it: the caller ends it, whatever the store still does."""
        self.reset(self._generation)
        dropped = list(self.prefetches.values()), list(self.persists.values())
        self.prefetches, self.persists, self.num_prefetch_pages = {}, {}, 0
        return dropped
