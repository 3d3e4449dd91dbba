"""What becomes of the results that the moving side brings, before ranks agree on anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller.records import CopyResult, QueryResult
from hicache.controller.stats import MovementStats
from hicache.radix import CopyKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.controller.copy_queue import CopyQueue
    from hicache.controller.cost_model import CostModel
    from hicache.controller.records import Result, StorageResult
    from hicache.controller.store_queue import StoreQueue

__all__ = ["ResultIntake"]


class ResultIntake:
    """Notes what each result says with its operation, in the counters, and as what it has cost.

    A result of an operation that was forgotten meanwhile is counted and says nothing else.

    Args:
        writes, loads, store_queue: operations that have not ended.
        costs: what reads and loads are measured for.

    Attributes:
        stats: per movement.
    """

    def __init__(
        self, *, writes: CopyQueue, loads: CopyQueue, store_queue: StoreQueue, costs: CostModel
    ) -> None:
        self._writes = writes
        self._loads = loads
        self._store_queue = store_queue
        self._costs = costs
        self.stats = {kind: MovementStats() for kind in CopyKind}

    def take(self, results: Iterable[Result]) -> None:
        """Take results in the order in which they came."""
        for result in results:
            if isinstance(result, CopyResult):
                self._take_copy(result)
            else:
                self._take_stored(result)

    def _take_copy(self, result: CopyResult) -> None:
        if self._writes.take(result):
            self.stats[CopyKind.WRITE].note_copy(result)
            return
        self.stats[CopyKind.LOAD].note_copy(result)
        if self._loads.take(result):
            self._costs.note_copy(result)

    def _take_stored(self, result: StorageResult) -> None:
        kind = self._store_queue.take(result)
        if isinstance(result, QueryResult):
            self.stats[kind].note_query(result)
            return
        self.stats[kind].note_pages(result)
        if kind is CopyKind.PREFETCH:
            self._costs.note_pages(result)
