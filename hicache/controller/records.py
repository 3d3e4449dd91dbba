"""What the deciding side and the moving side tell each other.

Plain frozen records of integers, bytes, enums and page-id arrays: they pickle, and no tensor, event
or node is in them. So the two sides may be one process (a direct call), or the scheduler and the
worker of an engine. Jobs and results are named tuples, as a scheduler's step makes several: to make
a frozen dataclass takes three times as long.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache.storage.circuit_breaker import CircuitState
    from hicache.storage.instrumented import StorageSnapshot
    from hicache.storage.retrying import RetryCounts
    from hicache.storage.wrapper import StorageVerb
    from hicache.types import IntArray, NodeId, OperationId, PageHash, PageOutcome

__all__ = [
    "CopyResult",
    "Job",
    "LoadJob",
    "OutcomeRuns",
    "PagesResult",
    "PersistJob",
    "Phase",
    "PrefetchJob",
    "QueryJob",
    "QueryResult",
    "Result",
    "StorageJob",
    "StorageReport",
    "StorageResult",
    "WriteJob",
    "encode_outcomes",
    "leading_good",
]

OutcomeRuns: TypeAlias = "tuple[tuple[PageOutcome, int], ...]"
"""One outcome per page, run-length encoded, so that the scheduler's thread loops over no pages."""


class WriteJob(NamedTuple):
    """Copy all layers of device pages to host pages.

    Attributes:
        by_layer: copy each layer when the forward pass that fills the pages has ended it.
    """

    operation_id: OperationId
    generation: int
    device_pages: IntArray
    host_pages: IntArray
    node_ids: tuple[NodeId, ...]
    by_layer: bool = False


class LoadJob(NamedTuple):
    """Copy host pages to device pages, layer by layer.

    Attributes:
        busy_slots: producer indices of loads that have not ended on every rank. They are not free,
            even if all is done here: whether there is a slot has to be the same on all ranks.
    """

    operation_id: OperationId
    generation: int
    host_pages: IntArray
    device_pages: IntArray
    node_ids: tuple[NodeId, ...]
    busy_slots: tuple[int, ...] = ()


class QueryJob(NamedTuple):
    """Ask storage how many leading pages it holds."""

    operation_id: OperationId
    generation: int
    hashes: tuple[PageHash, ...]


class PrefetchJob(NamedTuple):
    """Read pages from storage into host pages; `parent_hash` as for `PersistJob`."""

    operation_id: OperationId
    generation: int
    hashes: tuple[PageHash, ...]
    parent_hash: bytes
    host_pages: IntArray


class PersistJob(NamedTuple):
    """Write host pages to storage; `parent_hash` is that of the page before the first one."""

    operation_id: OperationId
    generation: int
    hashes: tuple[PageHash, ...]
    parent_hash: bytes
    host_pages: IntArray


StorageJob: TypeAlias = QueryJob | PrefetchJob | PersistJob
Job: TypeAlias = WriteJob | LoadJob | StorageJob


class Phase(str, Enum):
    """How far a storage operation is."""

    RUNNING = "running"
    OVERDUE = "overdue"
    """A backend call is past its deadline: expect no more pages, but its memory is still in use."""
    ENDED = "ended"
    """Nothing of the operation runs any more."""


class CopyResult(NamedTuple):
    """A write or load that has ended; all of its pages arrived, or none counts.

    Attributes:
        num_pages, num_bytes: that arrived.
        abandoned: nobody wanted it any more; nothing went wrong.
        is_timed: whether `seconds` is what the copy took; otherwise it is an upper bound.
    """

    operation_id: OperationId
    generation: int
    good: bool
    num_pages: int
    num_bytes: int
    seconds: float
    error: str = ""
    abandoned: bool = False
    is_timed: bool = True

    @property
    def outcome(self) -> str:
        """In a word, for counters."""
        if self.abandoned:
            return "abandoned"
        return "ok" if self.good else "failed"


class QueryResult(NamedTuple):
    """The answer to a query: `num_pages` leading pages are stored."""

    operation_id: OperationId
    generation: int
    phase: Phase
    num_pages: int
    seconds: float
    error: str = ""


class PagesResult(NamedTuple):
    """One batch of a prefetch or persist.

    Attributes:
        num_good: leading pages of the whole operation that are good; only ever grows.
        outcomes: of this batch's pages.
        num_bytes: moved by this batch.
        seconds: that this batch took.
    """

    operation_id: OperationId
    generation: int
    phase: Phase
    num_good: int
    outcomes: OutcomeRuns
    num_bytes: int
    seconds: float
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageReport:
    """How the store of the moving side does.

    Attributes:
        num_abandoned_calls: past their deadline and not returned.
        snapshot: what its backend has done and how it is; None without a store.
        circuits: whether calls reach the backend, where something decides that.
        retries: what came of trying again; None where nothing does.
        fill_outcomes: pages that tiers were given after a read of a slower one, by outcome.
        tiers: what each tier has done and how it is, by name, where the backend has tiers.
    """

    num_abandoned_calls: int = 0
    snapshot: StorageSnapshot | None = None
    circuits: Mapping[StorageVerb, CircuitState] = dataclasses.field(default_factory=dict)
    retries: RetryCounts | None = None
    fill_outcomes: Mapping[PageOutcome, int] = dataclasses.field(default_factory=dict)
    tiers: Mapping[str, StorageSnapshot] = dataclasses.field(default_factory=dict)


StorageResult: TypeAlias = QueryResult | PagesResult
Result: TypeAlias = CopyResult | StorageResult


def encode_outcomes(outcomes: Sequence[PageOutcome]) -> OutcomeRuns:
    """Return `outcomes` as runs of equal ones."""
    if outcomes and outcomes.count(outcomes[0]) == len(outcomes):
        # As nearly always, and ten times as fast.
        return ((outcomes[0], len(outcomes)),)
    return tuple((outcome, len(list(run))) for outcome, run in groupby(outcomes))


def leading_good(runs: OutcomeRuns) -> int:
    """Return how many leading pages are good."""
    total = 0
    for outcome, count in runs:
        if not outcome.good:
            break
        total += count
    return total
