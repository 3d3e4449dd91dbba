"""A straight line through what was measured lately."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AffineFit", "Line", "fit_line", "is_fit_due"]

_WINDOW = 16
"""Observations that count: loads change within seconds, and a store that was slow recovers."""

_FAR_APART = 2.0
"""Two observations tell a slope when one is so many times as large as the other."""

_NEW_PART = 4
"""A line is fitted anew when one in so many observations is new."""


class Line(NamedTuple):
    """`base + slope * x`; neither is negative."""

    base: float
    slope: float


class AffineFit:
    """Observations `(x, y)` of something that costs a fixed part and a part that grows with x.

    The newest 16 count. Fitting costs some 15 us, which a scheduler's step pays: it is done when
    asked for, once a quarter of them is new.
    """

    def __init__(self) -> None:
        self._observed: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._line: Line | None = None
        self._num_new = 0

    @property
    def observed(self) -> Sequence[tuple[float, float]]:
        """The observations that count, the oldest first."""
        return self._observed

    def note(self, x: float, y: float) -> None:
        """Take note of `y` at `x`; nothing is learnt where `x` is not positive or `y` negative."""
        if x > 0 and y >= 0:
            self._observed.append((x, y))
            self._num_new += 1

    def line(self) -> Line | None:
        """Return the line, through the origin while all x are alike; None before anything.

        It may lack the newest observations, up to a quarter of those that count.
        """
        if is_fit_due(self._num_new, len(self._observed)):
            self._line = fit_line(self._observed) or _through_origin(self._observed)
            self._num_new = 0
        return self._line


def is_fit_due(num_new: int, num_observed: int) -> bool:
    """Return whether enough is new since the last fit for another one."""
    return num_new > 0 and num_new * _NEW_PART >= num_observed


def fit_line(points: Sequence[tuple[float, float]]) -> Line | None:
    """Return a line through points that a minority of outliers does not bend.

    Its slope is the median of the slopes between points that are far apart, its base the median
    of what that leaves. None when no two points are.
    """
    ordered = sorted(points)
    sizes = [x for x, _ in ordered]
    slopes = [
        (y - other_y) / (x - other_x)
        for other_x, other_y in ordered
        for x, y in ordered[bisect_left(sizes, _FAR_APART * other_x) :]
    ]
    if not slopes:
        return None
    slope = max(0.0, median(slopes))
    base = median(y - slope * x for x, y in points)
    return Line(base, slope) if base >= 0 else _through_origin(points)


def _through_origin(points: Sequence[tuple[float, float]]) -> Line:
    return Line(0.0, median(y / x for x, y in points))
