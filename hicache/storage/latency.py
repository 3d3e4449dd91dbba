"""How long calls took, in buckets that double."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from itertools import accumulate
from typing import Final

__all__ = ["LATENCY_BOUNDS_SECONDS", "LatencyHistogram", "LatencyRecorder"]

LATENCY_BOUNDS_SECONDS: Final[tuple[float, ...]] = tuple(1e-6 * 2**power for power in range(28))
"""Upper bounds of the buckets, inclusive: 1 us to 134 s, each twice the one before."""

_NUM_BUCKETS: Final = len(LATENCY_BOUNDS_SECONDS) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyHistogram:
    """Calls by how long they took.

    Attributes:
        counts: calls in each bucket of `LATENCY_BOUNDS_SECONDS`, then those beyond the last.
        total_seconds: of all calls together.
    """

    counts: tuple[int, ...] = (0,) * _NUM_BUCKETS
    total_seconds: float = 0.0

    @property
    def num_calls(self) -> int:
        """Calls in all buckets."""
        return sum(self.counts)

    def quantile_seconds(self, part: float) -> float:
        """Return a bound that `part` (above 0, at most 1) of the calls kept; 0 without calls.

        It is the smallest of the buckets' bounds, so too high by less than a factor of 2 above
        1 us, and infinite beyond the last.
        """
        wanted = part * self.num_calls
        if not wanted:
            return 0.0
        bounds = (*LATENCY_BOUNDS_SECONDS, math.inf)
        return bounds[bisect_left([*accumulate(self.counts)], wanted)]


class LatencyRecorder:
    """Counts calls into buckets; not thread-safe."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._total_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one call."""
        self._counts[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1
        self._total_seconds += seconds

    def histogram(self) -> LatencyHistogram:
        """Return what has been counted so far."""
        return LatencyHistogram(counts=tuple(self._counts), total_seconds=self._total_seconds)
