"""A straight line through what was measured lately."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AffineFit", "Line", "fit_line"]

_WINDOW = 16
"""Observations that count: loads change within seconds, and a store that was slow recovers."""

_FAR_APART = 2.0
"""Two observations tell a slope when one is so many times as large as the other."""


class Line(NamedTuple):
    """`base + slope * x`; neither is negative."""

    base: float
    slope: float


class AffineFit:
    """Observations `(x, y)` of something that costs a fixed part and a part that grows with x.

    The newest 16 count. Fitting costs some 30 us and is done when asked for, after news.
    """

    def __init__(self) -> None:
        self._observed: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._line: Line | None = None

    @property
    def observed(self) -> Sequence[tuple[float, float]]:
        """The observations that count, the oldest first."""
        return self._observed

    def note(self, x: float, y: float) -> None:
        """Take note of `y` at `x`; nothing is learnt where `x` is not positive or `y` negative."""
        if x > 0 and y >= 0:
            self._observed.append((x, y))
            self._line = None

    def line(self) -> Line | None:
        """Return the line, through the origin while all x are alike; None before anything."""
        if self._line is None and self._observed:
            self._line = fit_line(self._observed) or _through_origin(self._observed)
        return self._line


def fit_line(points: Sequence[tuple[float, float]]) -> Line | None:
    """Return a line through points that a minority of outliers does not bend.

    Its slope is the median of the slopes between points that are far apart, its base the median
    of what that leaves. None when no two points are.
    """
    ordered = sorted(points)
    slopes = [
        (y - other_y) / (x - other_x)
        for index, (other_x, other_y) in enumerate(ordered)
        for x, y in ordered[index + 1 :]
        if x > other_x and x >= _FAR_APART * other_x
    ]
    if not slopes:
        return None
    slope = max(0.0, median(slopes))
    base = median(y - slope * x for x, y in points)
    return Line(base, slope) if base >= 0 else _through_origin(points)


def _through_origin(points: Sequence[tuple[float, float]]) -> Line:
    return Line(0.0, median(y / x for x, y in points))
