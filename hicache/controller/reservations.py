"""Writes that begin before the forward pass that computes what they copy."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from hicache.controller.operations import CacheOperation, HiCacheAck
from hicache.controller.records import WriteJob
from hicache.errors import OwnershipError
from hicache.types import NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.controller.copy_queue import CopyQueue
    from hicache.controller.mover import Mover
    from hicache.radix import Ticket
    from hicache.types import IntArray, OperationId, RequestId

__all__ = ["WriteReservations"]


class WriteReservations:
    """At most one write for each request, of pages that will belong to a node after the pass.

    Args:
        writes: where the copies in flight are kept, in order of their submission.
        alloc_host: gives host pages for a copy of device pages; None when too few are free.
        mover: carries them out.
        max_writes_in_flight: beyond these nothing is reserved.
    """

    def __init__(
        self,
        writes: CopyQueue,
        *,
        alloc_host: Callable[[IntArray], IntArray | None],
        mover: Mover,
        max_writes_in_flight: int,
    ) -> None:
        self._writes = writes
        self._alloc_host = alloc_host
        self._mover = mover
        self._max_writes_in_flight = max_writes_in_flight
        self._open: dict[RequestId, HiCacheAck] = {}

    def __len__(self) -> int:
        return len(self._open)

    def reserve(
        self,
        request_id: RequestId,
        device_pages: IntArray,
        *,
        operation_id: OperationId,
        generation: int,
    ) -> bool:
        """Begin to copy pages that the next forward pass fills, each layer when it ends.

        The node of these pages does not exist yet, so the reservation is the request's. `use` or
        `abandon` ends it, soon after the pass, as writes are acknowledged in order. No layer may
        end between the reservation and the pass.

        Returns:
            False, and nothing has happened, when the host pool has too few free pages or too many
            writes are in flight.

        Raises:
            OwnershipError: the request has a reservation already.
        """
        if request_id in self._open:
            raise OwnershipError(
                f"request {request_id!r} has reserved a write already; use or abandon that first"
            )
        if len(self._writes.acks) >= self._max_writes_in_flight:
            return False
        host_pages = self._alloc_host(device_pages)
        if host_pages is None:
            return False
        operation = CacheOperation(None, device_pages.copy(), host_pages)
        self._mover.submit_write(
            WriteJob(
                operation_id=operation_id,
                generation=generation,
                device_pages=operation.device_pages,
                host_pages=host_pages,
                node_ids=(NodeId(-1),),
                by_layer=True,
            )
        )
        ack = self._open[request_id] = HiCacheAck(operation_id, (operation,), reserved=True)
        self._writes.acks.append(ack)
        return True

    def use(
        self,
        request_id: RequestId,
        device_pages: IntArray,
        *,
        ticket: Ticket,
        above: Ticket | None,
    ) -> bool:
        """Let the write that was reserved for exactly `device_pages` be that of `ticket`.

        Layers that have not ended so far are copied at once: the pages are complete.

        Args:
            request_id: whose reservation.
            device_pages: what `ticket` is to write.
            ticket: of a node.
            above: of the write in flight of the pages before these, if there is one.

        Returns:
            False when the request has reserved nothing, other pages, or before `above` was begun,
            without which nothing of it could be published: that write is abandoned.
        """
        ack = self._open.get(request_id)
        if ack is None:
            return False
        (operation,) = ack.operations
        if not np.array_equal(operation.device_pages, device_pages) or (
            above is not None and not self._began_before(ack, above)
        ):
            self.abandon(request_id)
            return False
        operation.ticket = ticket
        ack.reserved = False
        del self._open[request_id]
        self._mover.finish_write(ack.operation_id, wanted=True)
        return True

    def abandon(self, request_id: RequestId) -> None:
        """Copy no more for a request; no effect when it has reserved nothing.

        The host pages come back with the write's end.
        """
        ack = self._open.pop(request_id, None)
        if ack is not None:
            ack.reserved = False
            self._mover.finish_write(ack.operation_id, wanted=False)

    def abandon_all(self) -> None:
        """Copy no more for any request."""
        for request_id in list(self._open):
            self.abandon(request_id)

    def _began_before(self, ack: HiCacheAck, write: Ticket) -> bool:
        """Whether `write` ends before `ack` does, as writes are acknowledged in order."""
        earlier = takewhile(lambda one: one is not ack, self._writes.acks)
        return any(one.ticket is write for before in earlier for one in before.operations)
