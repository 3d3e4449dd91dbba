"""Copies in one direction between device and host: queued, merged into jobs, acknowledged."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hicache.controller.operations import CacheOperation, HiCacheAck
from hicache.controller.records import LoadJob, WriteJob
from hicache.types import NodeId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.controller.records import CopyResult
    from hicache.types import OperationId

__all__ = ["CopyQueue"]

_JobT = TypeVar("_JobT", WriteJob, LoadJob)


class CopyQueue:
    """The writes, or the loads, that have not ended.

    Attributes:
        queued: copies that no job carries yet.
        acks: jobs in flight, oldest first; a stream ends them in this order.
    """

    def __init__(self) -> None:
        self.queued: list[CacheOperation] = []
        self.acks: deque[HiCacheAck] = deque()

    def __len__(self) -> int:
        return len(self.queued) + len(self.acks)

    def merged(
        self,
        job_class: type[_JobT],
        operation_id: OperationId,
        generation: int,
        *,
        most: int | None = None,
    ) -> tuple[_JobT, HiCacheAck]:
        """Return one job for what is queued, smallest priority first, and its ack.

        It carries everything, or the first `most` copies.
        """
        operations = tuple(
            sorted(self.queued, key=lambda one: (one.priority is None, one.priority or 0))[:most]
        )
        job = job_class(
            operation_id=operation_id,
            generation=generation,
            device_pages=np.concatenate([one.device_pages for one in operations]),
            host_pages=np.concatenate([one.host_pages for one in operations]),
            node_ids=tuple(
                NodeId(-1) if one.ticket is None else one.ticket.node_id for one in operations
            ),
        )
        return job, HiCacheAck(operation_id, operations)

    def sent(self, ack: HiCacheAck) -> None:
        """Note that the job of `ack` has been submitted: its copies are queued no longer."""
        carried = set(map(id, ack.operations))
        self.queued = [one for one in self.queued if id(one) not in carried]
        self.acks.append(ack)

    def take(self, result: CopyResult) -> bool:
        """Keep the result of a job of this queue; False when it is none of its jobs'."""
        for ack in self.acks:
            if ack.operation_id == result.operation_id:
                ack.num_good = int(result.good)
                return True
        return False

    def drop(self, finished: Sequence[tuple[HiCacheAck, int]]) -> None:
        """Forget jobs that have ended everywhere, the oldest ones."""
        for ack, _ in finished:
            assert self.acks[0] is ack
            self.acks.popleft()

    def drop_queued(self) -> list[CacheOperation]:
        """Forget what no job carries yet and return it."""
        queued, self.queued = self.queued, []
        return queued

    def drop_acks(self) -> list[HiCacheAck]:
        """Forget every job in flight and return them: the caller ends them, whatever they do."""
        acks, self.acks = list(self.acks), deque()
        return acks

    def operations(self) -> list[CacheOperation]:
        """Return every copy that has not ended."""
        return [one for ack in self.acks for one in ack.operations] + self.queued
