"""What reading from storage costs one request, compared with computing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.controller.cost_model import StorageWait, StoredHit
from hicache.controller.operations import RequestWait
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.controller import HiCacheController
    from hicache.controller.operations import PrefetchOperation
    from hicache.radix import RadixNode

__all__ = ["ReadCosts"]


class ReadCosts:
    """Asks the cost model about prefetches.

    Everything that the answers follow from is the same on all ranks: trees, operations, agreed
    speeds, the agreed time and what had arrived everywhere in the last step.
    """

    def __init__(self, controller: HiCacheController) -> None:
        self._controller = controller
        self._queue = controller.store_queue
        self._page_size = controller.config.page_size

    def num_worth_reading(
        self, operation: PrefetchOperation, num_hits: int, *, least_pages: int
    ) -> int:
        """Return how many of a hit's leading pages to read; judged once, however long it waits.

        Args:
            operation: whose query is answered.
            num_hits: pages that storage has.
            least_pages: that are worth a read at all.
        """
        config = self._controller.config
        if operation.num_worth_reading is None:
            if config.prefetch.cost_estimate:
                operation.num_worth_reading = self._judge(operation, num_hits, least_pages)
            else:
                operation.num_worth_reading = num_hits
        return min(num_hits, operation.num_worth_reading)

    @property
    def knows_computing(self) -> bool:
        """Whether every rank has measured what computing takes."""
        return self._controller.costs.speeds.compute is not None

    def note_wanted(self, operation: PrefetchOperation) -> None:
        """Note, the first time, that the request of a prefetch could run: from now on it waits."""
        if operation.request_wait is None:
            operation.request_wait = RequestWait(self._controller.now, operation.num_arrived)

    def is_worth_waiting(self, operation: PrefetchOperation) -> bool:
        """Whether a request that could run waits on for its prefetch, by what both would take."""
        assert operation.request_wait is not None
        if self._controller.costs.is_worth_waiting(self._wait(operation, operation.request_wait)):
            return True
        if operation.host_pages is not None or operation.is_probe is not None:
            return False
        operation.is_probe = self._controller.costs.begins_useless_read()
        return operation.is_probe

    def _wait(self, operation: PrefetchOperation, request_wait: RequestWait) -> StorageWait:
        now, page_size = self._controller.now, self._page_size
        first_page, num_pages = operation.ticket.first_page, _num_expected(operation)
        num_left = num_pages - operation.num_arrived
        is_reading = operation.host_pages is not None
        return StorageWait(
            first_token=(first_page + operation.num_arrived) * page_size,
            last_token=(first_page + num_pages) * page_size,
            awaited_from_token=(first_page + request_wait.num_arrived) * page_size,
            waited_seconds=now - request_wait.since,
            quiet_seconds=now - operation.progressed_at if is_reading else 0.0,
            num_calls=self._num_calls(num_left),
            num_pages_ahead=self._num_pages_ahead(operation, num_left),
            is_probe=operation.is_probe is True and not is_reading,
        )

    def _judge(self, operation: PrefetchOperation, num_hits: int, least_pages: int) -> int:
        config = self._controller.config
        device_end = _device_end(operation.anchor)
        hit = StoredHit(
            num_pages=num_hits,
            num_host_pages=operation.anchor.end - device_end,
            first_token=device_end * self._page_size,
            num_tokens=len(operation.key),
            num_pages_ahead=self._num_pages_ahead(operation, num_hits),
            num_calls=self._num_calls(num_hits),
            least_pages=least_pages,
        )
        return self._controller.costs.leading_pages_to_read(
            hit,
            # An adaptive request may still leave what it reads when it could run.
            may_refuse=config.prefetch_policy is not PrefetchPolicy.ADAPTIVE,
            loads_partly=config.load_cost_estimate,
        )

    def _num_calls(self, num_pages: int) -> int:
        return -(-num_pages // self._controller.storage_batch_pages)

    def _num_pages_ahead(self, operation: PrefetchOperation, num_pages: int) -> int:
        """Return the pages that each worker reads for others before it has read `num_pages`.

        Workers go on with reads in turn, one call each.
        """
        storage = self._controller.storage
        if storage is None:
            return 0
        others = self._queue.num_pages_beside(operation, num_pages)
        return others // storage.num_workers


def _num_expected(operation: PrefetchOperation) -> int:
    """Return the pages that a prefetch reads, or all that were asked for while that is open."""
    if operation.host_pages is not None:
        return len(operation.host_pages)
    if operation.num_worth_reading is not None:
        return operation.num_worth_reading
    return len(operation.hashes)


def _device_end(node: RadixNode) -> int:
    """Return where the device pages on the path of `node` end."""
    while node.evicted:
        assert node.parent is not None
        node = node.parent
    return node.end
