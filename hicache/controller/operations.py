"""What the deciding side remembers of each movement that has not ended."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from hicache.controller.records import PagesResult, Phase

if TYPE_CHECKING:
    from hicache.controller.records import StorageResult
    from hicache.radix import RadixKey, RadixNode, Ticket
    from hicache.types import IntArray, OperationId, PageHash, RequestId

__all__ = ["CacheOperation", "HiCacheAck", "PrefetchOperation", "RequestWait", "StorageOperation"]


@dataclasses.dataclass(eq=False, slots=True)
class CacheOperation:
    """One write or load. Owns its target pages until it has ended.

    Attributes:
        ticket: to be given back to the tree when the copy has ended; None while, or because, the
            pages belong to no node.
        device_pages, host_pages: one of them is the source, the other the target.
        priority: a smaller number goes first; None is last.
    """

    ticket: Ticket | None
    device_pages: IntArray
    host_pages: IntArray
    priority: int | None = None


@dataclasses.dataclass(eq=False, slots=True)
class HiCacheAck:
    """Copies that were merged into one job and end together.

    The job's events stay with the moving side; its result comes back as `num_good`.

    Attributes:
        num_good: None until the job has ended; then 1 when it went well and 0 when it failed.
        reserved: nobody has said yet what its pages are for; until then it does not end.
        producer: of a load, the slot that it has.
    """

    operation_id: OperationId
    operations: tuple[CacheOperation, ...]
    num_good: int | None = None
    reserved: bool = False
    producer: int = -1


@dataclasses.dataclass(eq=False, slots=True)
class StorageOperation:
    """One persist: protects its host pages until storage has let go of them.

    Attributes:
        hashes: of its pages, in order.
        num_good: leading pages that are stored.
    """

    operation_id: OperationId
    ticket: Ticket
    num_good: int = 0
    phase: Phase = Phase.RUNNING
    hashes: tuple[PageHash, ...] = ()

    @property
    def spent(self) -> bool:
        """Whether it brings nothing more: its calls are over or given up."""
        return self.phase is not Phase.RUNNING

    def take(self, result: StorageResult) -> None:
        """Keep what a batch has brought."""
        assert isinstance(result, PagesResult)
        self.phase, self.num_good = result.phase, result.num_good


class RequestWait(NamedTuple):
    """The wait of a request that could run but for its prefetch.

    Attributes:
        since: when that began, in agreed seconds.
        num_arrived: pages that had arrived by then.
    """

    since: float
    num_arrived: int


@dataclasses.dataclass(eq=False, slots=True)
class PrefetchOperation:
    """One prefetch: a query, then reads into host pages allocated for exactly the hit.

    | state | `host_pages` | waits for |
    |---|---|---|
    | querying | None | the answer of storage |
    | reading | owned | its end, or `terminated` |
    | closed | what no node took, while `phase` is not ended | the release of the memory |

    Attributes:
        anchor: node below which the pages go.
        hashes: of all pages asked for, in order.
        parent_hash: what the first one is chained from.
        num_good: leading pages that have arrived and were verified; only ever grows.
        num_hits: pages that storage holds, once known.
        num_arrived: of these, those that every rank had in the last step.
        progressed_at: when the read began, or when that grew last; in agreed seconds.
        num_worth_reading: leading pages of the hit that are worth it, once judged.
        request_wait: since its request could run, and waits for nothing else; None before.
        is_probe: whether it is read a little although it is not worth waiting for, once asked.
        terminated: somebody wants it to end with what it has.
        closed: its pages were given to the tree.
    """

    operation_id: OperationId
    request_id: RequestId
    ticket: Ticket
    anchor: RadixNode
    key: RadixKey
    hashes: tuple[PageHash, ...]
    parent_hash: bytes
    host_pages: IntArray | None = None
    num_good: int = 0
    num_hits: int | None = None
    num_arrived: int = 0
    progressed_at: float = 0.0
    num_worth_reading: int | None = None
    request_wait: RequestWait | None = None
    is_probe: bool | None = None
    terminated: bool = False
    closed: bool = False
    phase: Phase = Phase.RUNNING
    """Of the call or calls under way: the query's first, the read's afterwards."""

    @property
    def spent(self) -> bool:
        """Whether it brings nothing more: its calls are over or given up, its pages taken."""
        return self.closed and self.phase is not Phase.RUNNING

    def take(self, result: StorageResult) -> None:
        """Keep what the query has answered, or what a batch has brought."""
        self.phase = result.phase
        if isinstance(result, PagesResult):
            self.num_good = result.num_good
        else:
            # The answer of a query that still runs would come in the middle of the read.
            self.num_hits = result.num_pages if result.phase is Phase.ENDED else 0
