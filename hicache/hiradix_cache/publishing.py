"""What has ended, and what becomes of it in the tree."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache.errors import RanksDivergedError, RanksLostError
from hicache.hiradix_cache.followed_tree import FollowedTree
from hicache.hiradix_cache.step_share import step_share
from hicache.hiradix_cache.switching_off import drop_host_copies, switch_off
from hicache.radix import CopyKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.clock import Clock
    from hicache.controller.agreement import Finished
    from hicache.hiradix_cache.parts import CacheParts

__all__ = ["Publisher"]


class Publisher:
    """Takes what has ended on every rank, and notices when that cannot be known any more.

    Args:
        parts: of the cache.
        clock: what this rank adds to the time that all go by.

    Attributes:
        is_off: whether L2 and L3 have been switched off; see `switch_off`.
    """

    def __init__(self, parts: CacheParts, *, clock: Clock) -> None:
        self.is_off = False
        self._parts = parts
        self._clock = clock
        tree = parts.tree
        self._followed = tree if isinstance(tree, FollowedTree) else None

    def publish(self) -> None:
        """Take of what has ended what a step takes, see `step_share`; one agreement.

        Begins nothing that `close` would have to end.

        Raises:
            RanksDivergedError: see `HiRadixCache.check_hicache_events`.
        """
        if self.is_off:
            self._publish_alone()
            return
        parts = self._parts
        digest = 0 if self._followed is None else self._followed.digest
        try:
            finished = parts.controller.collect(self._clock.now(), tree_digest=digest)
        except RanksLostError:
            self.notice()
            return
        except RanksDivergedError:
            self.notice()
            raise
        now = parts.controller.now
        if any(finished):
            self._take(finished, now)
        parts.prefetcher.end_late(now)

    def _take(self, finished: Finished, now: float) -> None:
        """Take the share of a step of what has ended, and all loads, which are few.

        Loads come first: their host pages are what a read had best evict. Then what requests wait
        for, of which there is room for one at least.
        """
        parts = self._parts
        num_ended = finished.num_ended
        share = step_share(num_ended)
        for ack, good in finished.loads:
            for load in ack.operations:
                parts.loader.finish(load, good=bool(good))
        num_left = max(1, share - len(finished.loads))
        num_left -= parts.prefetcher.advance(finished, now=now, most=num_left)
        taken = finished
        if num_ended > share:
            is_awaited = parts.tree.num_pending_evict_pages > 0
            taken = finished.oldest(num_left, all_writes=is_awaited)
        parts.controller.take(taken)
        for ack, good in taken.writes:
            for write in ack.operations:
                parts.writer.finish(write, good=bool(good))
        for persist, num_good in taken.persists:
            parts.persister.finish(persist, num_good)
            parts.prefetcher.stored(persist.hashes[:num_good])
            parts.returns.copy_ended(persist.ticket)
        parts.prefetcher.release(taken.released)

    def drop_queued(self) -> None:
        """End copies that were never started."""
        for operation in self._parts.controller.drop_queued():
            assert operation.ticket is not None
            is_write = operation.ticket.kind is CopyKind.WRITE
            end = self._parts.writer.finish if is_write else self._parts.loader.finish
            end(operation, good=False)

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Call `notice` whatever becomes of what is done inside."""
        try:
            yield
        finally:
            self.notice()

    def notice(self) -> None:
        """Switch L2 and L3 off if an agreement has found that the ranks are not one any more."""
        ended = self._parts.controller.meeting.ended
        if ended is None or self.is_off:
            return
        self.is_off = True
        lost = isinstance(ended, RanksLostError)
        self._parts.counters["ranks_lost" if lost else "ranks_diverged"] += 1
        self.drop_queued()
        switch_off(self._parts)

    def _publish_alone(self) -> None:
        controller = self._parts.controller
        controller.take_results()
        drop_host_copies(self._parts)
        if isinstance(controller.meeting.ended, RanksDivergedError):
            controller.meeting.require_all()
