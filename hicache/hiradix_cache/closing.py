"""The end of a cache, also when a backend call hangs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hicache.errors import RanksDivergedError

if TYPE_CHECKING:
    from hicache.hiradix_cache.parts import CacheParts
    from hicache.hiradix_cache.publishing import Publisher

__all__ = ["close_cache"]

_STEPS_TO_END = 3
"""A prefetch that is answered needs a step each to begin, to be closed and to be released."""


def close_cache(parts: CacheParts, publisher: Publisher, timeout_seconds: float) -> bool:
    """See `HiRadixCache.close`."""
    controller = parts.controller
    publisher.drop_queued()
    stopped = controller.close(timeout_seconds)
    num_idle_steps = 0
    while controller.num_in_flight and num_idle_steps < _STEPS_TO_END:
        before = controller.num_in_flight
        with suppress(RanksDivergedError):
            publisher.publish()
        num_idle_steps = 0 if controller.num_in_flight < before else num_idle_steps + 1
    if stopped:
        parts.returns.end()
    controller.closed()
    return stopped
