"""Which operations have ended, decided once per step and alike on every rank."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hicache.controller.records import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hicache.controller.operations import HiCacheAck, PrefetchOperation, StorageOperation
    from hicache.types import OperationId

__all__ = ["WINDOW", "Finished", "OperationWindow"]

WINDOW = 64
"""How many operations of each kind, oldest first, a step looks at. More than calls can hang, so
that those that hang never fill it."""

_NOT_YET = -1
_UNDER_WAY = 1 << 40
"""A prefetch under way with so many pages is that less than nothing: not yet, and how far."""
_T = TypeVar("_T")


class Finished(NamedTuple):
    """Operations that ended on every rank, each with what is good on all of them.

    Attributes:
        writes, loads: merged copies; 1 for good, 0 for failed.
        queries: prefetches whose query is answered, with the leading pages that storage has.
        prefetches: prefetches to be closed, with the leading pages that arrived.
        persists: with the leading pages that are stored.
        released: closed prefetches whose memory nobody uses any more.
        arriving: prefetches under way, with the leading pages that have arrived everywhere.
    """

    writes: Sequence[tuple[HiCacheAck, int]] = ()
    loads: Sequence[tuple[HiCacheAck, int]] = ()
    queries: Sequence[tuple[PrefetchOperation, int]] = ()
    prefetches: Sequence[tuple[PrefetchOperation, int]] = ()
    persists: Sequence[tuple[StorageOperation, int]] = ()
    released: Sequence[PrefetchOperation] = ()
    arriving: Sequence[tuple[PrefetchOperation, int]] = ()


class OperationWindow:
    """The oldest operations of each kind, as a vector of fixed length.

    Every rank has the same operations in the same order. For each of the `WINDOW` oldest of a kind
    it says "not yet" or how much is good, and the minimum over the ranks decides: an operation
    has ended when no rank says "not yet". Operations may so end out of order, and one that hangs
    does not hold up the others. Of a prefetch, "not yet" tells how far it is.
    """

    LENGTH = 4 * WINDOW

    def __init__(
        self,
        *,
        writes: Collection[HiCacheAck],
        loads: Collection[HiCacheAck],
        prefetches: Mapping[OperationId, PrefetchOperation],
        persists: Mapping[OperationId, StorageOperation],
    ) -> None:
        self._writes, self._loads = list(islice(writes, WINDOW)), list(islice(loads, WINDOW))
        self._prefetches = list(islice(prefetches.values(), WINDOW))
        self._persists = list(islice(persists.values(), WINDOW))

    def values(self) -> list[int]:
        """Return what this rank says of them."""
        return (
            _padded([_copy_value(ack) for ack in self._writes])
            + _padded([_copy_value(ack) for ack in self._loads])
            + _padded([_prefetch_value(operation) for operation in self._prefetches])
            + _padded([_persist_value(operation) for operation in self._persists])
        )

    def finished(self, agreed: Sequence[int]) -> Finished:
        """Return what has ended by the minimum of `values` over the ranks."""
        progress = agreed[2 * WINDOW : 3 * WINDOW]
        prefetched = _agreed(self._prefetches, progress)
        return Finished(
            writes=_leading(_agreed(self._writes, agreed), self._writes),
            loads=_leading(_agreed(self._loads, agreed[WINDOW:]), self._loads),
            queries=[one for one in prefetched if one[0].host_pages is None and not one[0].closed],
            prefetches=[
                one for one in prefetched if one[0].host_pages is not None and not one[0].closed
            ],
            persists=_agreed(self._persists, agreed[3 * WINDOW :]),
            released=[operation for operation, _ in prefetched if operation.closed],
            arriving=[
                (operation, value + _UNDER_WAY)
                for operation, value in zip(self._prefetches, progress, strict=False)
                if value < _NOT_YET
            ],
        )


def _copy_value(ack: HiCacheAck) -> int:
    return _NOT_YET if ack.num_good is None or ack.reserved else ack.num_good


def _prefetch_value(operation: PrefetchOperation) -> int:
    if operation.closed:
        return 0 if operation.phase is Phase.ENDED else _NOT_YET
    if operation.phase is Phase.RUNNING and not operation.terminated:
        return operation.num_good - _UNDER_WAY
    if operation.host_pages is not None:
        return operation.num_good
    return 0 if operation.terminated else operation.num_hits or 0


def _persist_value(operation: StorageOperation) -> int:
    return operation.num_good if operation.phase is Phase.ENDED else _NOT_YET


def _padded(values: list[int]) -> list[int]:
    return values + [_NOT_YET] * (WINDOW - len(values))


def _agreed(window: Sequence[_T], agreed: Sequence[int]) -> list[tuple[_T, int]]:
    return [
        (operation, value) for operation, value in zip(window, agreed, strict=False) if value >= 0
    ]


def _leading(
    acks: list[tuple[HiCacheAck, int]], window: list[HiCacheAck]
) -> list[tuple[HiCacheAck, int]]:
    """Return those before the first one that has not ended: a stream ends its jobs in order."""
    count = 0
    while count < len(acks) and acks[count][0] is window[count]:
        count += 1
    return acks[:count]
