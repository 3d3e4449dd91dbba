"""Which operations have ended, decided once per step and alike on every rank."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from hicache.controller.records import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from hicache.controller.operations import HiCacheAck, PrefetchOperation, StorageOperation
    from hicache.types import OperationId

__all__ = ["WINDOW", "Finished", "OperationWindow"]

WINDOW = 64
"""How many operations of each kind, oldest first, a step looks at. More than calls can hang, so
that those that hang never fill it."""

_NOT_YET = -1
_UNDER_WAY = 1 << 40
"""A prefetch under way with so many pages is that less than nothing: not yet, and how far."""


class Finished(NamedTuple):
    """Operations that ended on every rank, each with what is good on all of them.

    They come again in every step until one has taken them.

    Attributes:
        writes, loads: merged copies; 1 for good, 0 for failed.
        queries: prefetches whose query is answered, with the leading pages that storage has.
        prefetches: prefetches to be closed, with the leading pages that arrived.
        persists: with the leading pages that are stored.
        released: closed prefetches whose memory nobody uses any more.
        arriving: prefetches under way, with the leading pages that have arrived everywhere, where
            these are more than in the last step.
    """

    writes: Sequence[tuple[HiCacheAck, int]] = ()
    loads: Sequence[tuple[HiCacheAck, int]] = ()
    queries: Sequence[tuple[PrefetchOperation, int]] = ()
    prefetches: Sequence[tuple[PrefetchOperation, int]] = ()
    persists: Sequence[tuple[StorageOperation, int]] = ()
    released: Sequence[PrefetchOperation] = ()
    arriving: Sequence[tuple[PrefetchOperation, int]] = ()

    @property
    def num_ended(self) -> int:
        """Operations of all kinds that a step could take."""
        return sum(map(len, self)) - len(self.arriving)

    def oldest(self, most: int, *, all_writes: bool) -> Finished:
        """Return all loads, and `most` of writes, persists and released prefetches, in this order.

        Args:
            most: the oldest of each.
            all_writes: whether every write is returned, as device pages are waited for.
        """
        writes = self.writes if all_writes else self.writes[:most]
        num_left = max(0, most - len(writes))
        persists = self.persists[:num_left]
        released = self.released[: num_left - len(persists)]
        return Finished(writes, self.loads, persists=persists, released=released)


class OperationWindow:
    """The oldest operations of each kind, as a vector of fixed length.

    Every rank has the same operations in the same order. For each of the `WINDOW` oldest of a kind
    it says "not yet" or how much is good, and the minimum over the ranks decides: an operation
    has ended when no rank says "not yet". Operations may so end out of order, and one that hangs
    does not hold up the others. Of a prefetch, "not yet" tells how far it is.

    Args:
        writes, loads, prefetches, persists: in flight; not to be changed while the window is used.
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
        self._writes, self._loads = writes, loads
        self._prefetches, self._persists = prefetches, persists

    def values(self) -> list[int]:
        """Return what this rank says of them."""
        return [value for values in self._values_by_kind() for value in _padded(list(values))]

    def finished(self, agreed: Sequence[int]) -> Finished:
        """Return what has ended by the minimum of `values` over the ranks."""
        return self._finished(*(agreed[kind * WINDOW : (kind + 1) * WINDOW] for kind in range(4)))

    def finished_alone(self) -> Finished:
        """Return what `finished` says by this rank's own `values`: what one rank agrees on."""
        return self._finished(*self._values_by_kind())

    def _values_by_kind(self) -> Iterator[Iterable[int]]:
        """Return the values one by one, as of copies only the first ones may be asked for."""
        yield map(_copy_value, islice(self._writes, WINDOW))
        yield map(_copy_value, islice(self._loads, WINDOW))
        yield map(_prefetch_value, islice(self._prefetches.values(), WINDOW))
        yield map(_persist_value, islice(self._persists.values(), WINDOW))

    def _finished(
        self,
        writes: Iterable[int],
        loads: Iterable[int],
        prefetches: Iterable[int],
        persists: Iterable[int],
    ) -> Finished:
        queries: list[tuple[PrefetchOperation, int]] = []
        reads: list[tuple[PrefetchOperation, int]] = []
        released: list[PrefetchOperation] = []
        arriving: list[tuple[PrefetchOperation, int]] = []
        for operation, value in zip(self._prefetches.values(), prefetches, strict=False):
            if value < _NOT_YET:
                if value + _UNDER_WAY > operation.num_arrived:
                    arriving.append((operation, value + _UNDER_WAY))
            elif value < 0:
                continue
            elif operation.closed:
                released.append(operation)
            elif operation.host_pages is None:
                queries.append((operation, value))
            else:
                reads.append((operation, value))
        stored = zip(self._persists.values(), persists, strict=False)
        return Finished(
            _leading(self._writes, writes) if self._writes else (),
            _leading(self._loads, loads) if self._loads else (),
            queries,
            reads,
            [one for one in stored if one[1] >= 0] if self._persists else (),
            released,
            arriving,
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


def _leading(acks: Iterable[HiCacheAck], values: Iterable[int]) -> list[tuple[HiCacheAck, int]]:
    """Return those before the first one that has not ended: a stream ends its jobs in order."""
    ended: list[tuple[HiCacheAck, int]] = []
    for ack, value in zip(acks, values, strict=False):
        if value < 0:
            break
        ended.append((ack, value))
    return ended
