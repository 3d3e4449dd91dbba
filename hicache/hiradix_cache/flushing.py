"""Bringing everything to storage, for an orderly end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.hiradix_cache.cache import HiRadixCache

__all__ = ["flush_to_storage"]

_STEP_SECONDS = 0.001


def flush_to_storage(
    cache: HiRadixCache,
    write_unstored: Callable[[], int],
    sleep: Callable[[float], None],
    timeout_seconds: float,
) -> int:
    """See `HiRadixCache.flush`.

    Args:
        cache: takes its steps here.
        write_unstored: begins to bring to storage what it lacks; returns how many pages those are.
        sleep: called with seconds between two steps.
        timeout_seconds: counted in steps.
    """
    if cache.controller.storage is None:
        return 0
    num_left = write_unstored()
    for _ in range(int(timeout_seconds / _STEP_SECONDS)):
        if not cache.num_in_flight:
            before, num_left = num_left, write_unstored()
            if not num_left or num_left == before:
                break
        cache.check_hicache_events()
        sleep(_STEP_SECONDS)
    return num_left
