"""Who of the waiting requests goes first, and who had better wait for what others bring."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.engine.arrival_order import ArrivalOrder
from hicache.hashing import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.request import Request
    from hicache.hiradix_cache import HiRadixCache
    from hicache.radix import RadixKey

__all__ = ["MAX_PASSES", "CacheAwareOrder", "Readiness"]

MAX_PASSES: Final = 8
"""So many younger requests may be admitted before one that could run; then it goes first."""

_LEAST_SAVED_TOKENS: Final = 64
"""For fewer, waiting costs more than computing them: a step has a price of its own."""

_LOOKED_UP: Final = 32
"""Waiting requests looked up in a step; those behind them are not admitted in it."""


class Readiness(IntEnum):
    """Where the KV of a waiting request is; those with less go first."""

    ON_DEVICE = 0
    """The device has at least half of its tokens."""
    IN_MEMORY = 1
    """Device and host together have."""
    COLD = 2
    """Most is to be computed."""
    FETCHING = 3
    """Its prefetch, or one that brings the same, is not over."""


class CacheAwareOrder(ArrivalOrder):
    """Orders a queue by what the cache has, and holds back what others compute or fetch.

    A request is held back while a prefetch of one before it brings the same pages, and while a
    running one computes or loads pages of its prompt that the device has not. So whom it waits for
    is before it: nobody waits in a circle, and whoever is aborted or sent back is not waited for
    any more. What has become of the others is looked at anew in every step.

    All follows from tokens, agreed outcomes and counts of requests: ranks that are given the same
    requests in the same order decide alike.

    Args:
        cache: of the engine.
        page_size: tokens in a page.
    """

    _cache: HiRadixCache

    def __init__(self, cache: HiRadixCache, *, page_size: int) -> None:
        super().__init__(cache)
        self._page_size = page_size
        self._followers: list[Request] = []

    def submit(self, request: Request, waiting: Sequence[Request]) -> None:
        """Begin the prefetch of a new request, or let it follow one that brings the same."""
        key, standing = request.matchable_key(), request.standing
        standing.num_known = self._num_in_memory(key)
        for other in waiting:
            reach = self._cache.prefetch_reach(other.request_id)
            shared = self._shared_tokens(key, other.prompt_key) if reach else 0
            if self._is_worth_following(standing.num_known, reach, shared):
                standing.leader, standing.num_shared = other, shared
                standing.num_awaited = min(shared, reach)
                self._followers.append(request)
                return
        super().submit(request, waiting)

    def begin_step(self) -> None:
        """Let those whose leader's prefetch is over begin their own, for what comes after it."""
        following = [one for one in self._followers if not one.finished]
        self._followers = [one for one in following if self._still_follows(one)]

    def candidates(self, waiting: Sequence[Request]) -> list[Request]:
        """Return the requests that may be admitted in this step, best first."""
        ranked = []
        num_looked_up = 0
        for position, request in enumerate(waiting):
            if request.standing.leader is not None or self._cache.prefetch_reach(
                request.request_id
            ):
                readiness = Readiness.FETCHING
            elif num_looked_up < _LOOKED_UP:
                readiness = self._look_up(request)
                num_looked_up += 1
            else:
                break
            ranked.append((-1 if self.is_due(request) else readiness, position, request))
        return [request for _, _, request in sorted(ranked, key=lambda one: one[:2])]

    def is_due(self, request: Request) -> bool:
        """Whether so many have passed `request` that it is the next, ready or not."""
        return request.standing.num_passes >= MAX_PASSES

    def is_held_back(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a candidate waits for what others bring; one that is due computes it instead."""
        if request.standing.leader is not None:
            return True
        if self.is_due(request):
            return False
        key, standing = request.matchable_key(), request.standing
        for other in running:
            if not other.cacheable or other.num_computed >= other.num_prompt_tokens:
                continue
            # What the host has, and the other computes all the same, is not worth a load; unless a
            # load of it has failed.
            failed = other.num_failed_loads > 0
            num_there = standing.num_in_memory if failed else standing.num_on_device
            shared = self._shared_tokens(key, other.prompt_key)
            if shared - num_there >= _LEAST_SAVED_TOKENS:
                standing.num_awaited = max(standing.num_awaited, shared)
                return True
        return False

    def note_admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        """Count a pass for everyone who stands before `request` in the queue."""
        for older in waiting:
            if older is request:
                break
            older.standing.num_passes += 1

    def _look_up(self, request: Request) -> Readiness:
        """Return where the KV of a request is; that keeps it from being evicted, too."""
        key, standing = request.matchable_key(), request.standing
        found = self._cache.tree.match(key)
        standing.num_on_device = found.num_device_pages * self._page_size
        standing.num_in_memory = standing.num_on_device + found.num_host_pages * self._page_size
        if 2 * standing.num_on_device >= len(key):
            return Readiness.ON_DEVICE
        return Readiness.IN_MEMORY if 2 * standing.num_in_memory >= len(key) else Readiness.COLD

    def _num_in_memory(self, key: RadixKey) -> int:
        found = self._cache.tree.match(key)
        return (found.num_device_pages + found.num_host_pages) * self._page_size

    def _is_worth_following(self, num_known: int, reach: int, shared: int) -> bool:
        """Whether a prefetch up to token `reach` brings enough of what is shared, soon enough.

        It is given to the tree as a whole, so at least half of it has to be of use.
        """
        saved = min(shared, reach) - num_known
        return saved >= _LEAST_SAVED_TOKENS and 2 * saved >= reach - num_known

    def _still_follows(self, request: Request) -> bool:
        """Whether the leader's prefetch goes on; if not, `request` begins its own.

        But not when the leader was brought less than was expected: nor would this one be.
        """
        standing = request.standing
        leader = standing.leader
        assert leader is not None
        reach = 0 if leader.finished else self._cache.prefetch_reach(leader.request_id)
        if self._is_worth_following(standing.num_known, reach, standing.num_shared):
            standing.num_awaited = min(standing.num_shared, reach)
            return True
        standing.leader = None
        key = request.matchable_key()
        if leader.finished or self._num_in_memory(key) >= standing.num_awaited:
            self._cache.prefetch_from_storage(request.request_id, key)
        return False

    def _shared_tokens(self, one: RadixKey, other: RadixKey) -> int:
        """Return how many leading tokens, in whole pages, two keys have in common."""
        step = self._page_size * TOKEN_BYTES
        if one.namespace != other.namespace or one.data[:step] != other.data[:step]:
            return 0
        length = min(len(one), len(other))
        differs = one.tokens()[:length] != other.tokens()[:length]
        position = int(np.argmax(differs)) if differs.any() else length
        return position - position % self._page_size
