"""What has ended, and what becomes of it in the tree."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache.errors import RanksDivergedError, RanksLostError
from hicache.hiradix_cache.followed_tree import FollowedTree
from hicache.hiradix_cache.switching_off import drop_host_copies, switch_off
from hicache.radix import CopyKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.clock import Clock
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
        """Take what has ended; one agreement. Begins nothing that `close` would have to end.

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
        for ack, good in finished.writes:
            for write in ack.operations:
                parts.writer.finish(write, good=bool(good))
        for ack, good in finished.loads:
            for load in ack.operations:
                parts.loader.finish(load, good=bool(good))
        parts.prefetcher.advance(finished, now=parts.controller.now)
        for persist, num_good in finished.persists:
            parts.persister.finish(persist, num_good)
            parts.prefetcher.stored(persist.hashes[:num_good])
            parts.returns.copy_ended(persist.ticket)

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
