"""What it is worth to keep what waits for its next use, by how many uses each age has seen.

Ages are octaves: 0, then 1, 2 to 3, 4 to 7 and so on, in any unit of time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["hazards_by_class", "worth_by_age"]

_PRIOR_HAZARD: Final = 0.1
_PRIOR_WAITS: Final = 4.0
_PRIOR_USES_OF_CLASS: Final = 2.0
_PRIOR_USES_OF_AGE: Final = 0.3

_PRIOR_DECLINE: Final = 0.99
"""Of the chance from age to age: the first two last as long, and the younger one is to stay."""

_MAX_HAZARD: Final = 0.95
_MIN_SURVIVAL: Final = 1e-9


def hazards_by_class(
    used: Sequence[float], exposed: Sequence[float], num_ages: int
) -> Iterator[list[float]]:
    """Yield the chance of a use in each octave of age, for one class of uses after the other.

    What uses have not shown is assumed: an age is like the one before it, and a class like the one
    below it. To have seen many waits without a use tells how few uses there are, and not at which
    age. So while there is none, what waits longest is worth least, as octaves become longer and
    their chances do not become better; each use that is seen, or missed where others would have
    had some, takes a little from that.

    Args:
        used: weight of the waits that ended with a use, all ages of the first class first.
        exposed: weight of the waits that came through, likewise.
        num_ages: octaves of each class.
    """
    total = sum(used)
    hazard = (total + _PRIOR_HAZARD * _PRIOR_WAITS) / (sum(exposed) + _PRIOR_WAITS)
    certainty = total / (total + _PRIOR_HAZARD * _PRIOR_WAITS)
    hazards = []
    for age in range(num_ages):
        expected = certainty * hazard * sum(exposed[age::num_ages])
        hazard = min(hazard * _correction(sum(used[age::num_ages]), expected), _MAX_HAZARD)
        hazards.append(hazard)
        hazard *= _PRIOR_DECLINE
    for first in range(0, len(used), num_ages):
        cells = slice(first, first + num_ages)
        hazards = _hazards_beside(used[cells], exposed[cells], hazards)
        yield hazards


def _hazards_beside(
    used: Sequence[float], exposed: Sequence[float], prior: Sequence[float]
) -> list[float]:
    """Return the chances of one class: `prior`, as a whole and at each age as uses correct it."""
    total, expected = sum(used), sum(map(float.__mul__, exposed, prior))
    scale = (total + _PRIOR_USES_OF_CLASS) / (expected + _PRIOR_USES_OF_CLASS)
    certainty = total / (total + _PRIOR_USES_OF_CLASS)
    return [
        min(
            min(scale * chance, _MAX_HAZARD)
            * _correction(seen, certainty * scale * chance * through),
            _MAX_HAZARD,
        )
        for seen, through, chance in zip(used, exposed, prior, strict=True)
    ]


def _correction(seen: float, expected: float) -> float:
    """Return by what to multiply a chance with which so many uses were expected."""
    return (seen + _PRIOR_USES_OF_AGE) / (expected + _PRIOR_USES_OF_AGE)


def worth_by_age(hazards: list[float]) -> list[float]:
    """Return, for each age, the most uses per request that keeping a page until some age yields.

    With the uses expected until each age over the time kept until then, both counted from age 0,
    that is the steepest slope from a point to a later one: an edge of the upper convex hull, which
    is built from the end.
    """
    uses, times, survival = [0.0], [0.0], 1.0
    for octave, hazard in enumerate(hazards):
        width = max((1 << octave) >> 1, 1)
        uses.append(uses[-1] + survival * hazard)
        times.append(times[-1] + survival * width * (1 - hazard / 2))
        survival = max(survival * (1 - hazard), _MIN_SURVIVAL)

    def slope(start: int, end: int) -> float:
        return (uses[end] - uses[start]) / (times[end] - times[start])

    worth = [0.0] * len(hazards)
    hull = [len(hazards)]
    for age in range(len(hazards) - 1, -1, -1):
        while len(hull) > 1 and slope(age, hull[-1]) <= slope(age, hull[-2]):
            hull.pop()
        worth[age] = slope(age, hull[-1])
        hull.append(age)
    return worth
