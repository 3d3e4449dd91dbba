"""Time as a dependency, so that everything can run on a simulated clock."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "MonotonicClock"]


class Clock(Protocol):
    """A source of monotonic time in seconds."""

    def now(self) -> float:
        """Return seconds since an arbitrary fixed moment; never decreases."""


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = start_seconds

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back ({seconds} s)")
        self._now += seconds
