"""Requests in the order in which they came; what another order can do otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.request import Request
    from hicache.hiradix_cache import HiRadixCache

__all__ = ["ArrivalOrder"]


class ArrivalOrder:
    """First come, first served; no request knows of another.

    Args:
        cache: None when there is none.
    """

    def __init__(self, cache: HiRadixCache | None) -> None:
        self._cache = cache

    def submit(self, request: Request, waiting: Sequence[Request]) -> None:
        """Begin the prefetch of a new request, which comes after those in `waiting`."""
        if self._cache is not None:
            self._cache.prefetch_from_storage(request.request_id, request.matchable_key())

    def begin_step(self) -> None:
        """Take note of what has ended since the last step; called once a step."""

    def candidates(self, waiting: Sequence[Request]) -> list[Request]:
        """Return those of the queue that may be admitted in this step, best first."""
        return list(waiting)

    def is_held_back(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether a candidate had better wait for what others are about to bring."""
        return False

    def is_due(self, request: Request) -> bool:
        """Whether nobody may be admitted before `request` when only room keeps it from running."""
        return False

    def note_admitted(self, request: Request, waiting: Sequence[Request]) -> None:
        """Take note of an admission; `request` is still in the queue."""
