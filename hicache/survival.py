"""What it is worth to keep what waits for its next use, by how many uses each age has seen.

Ages are octaves: 0, then 1, 2 to 3, 4 to 7 and so on, in any unit of time.
"""

from __future__ import annotations

from typing import Final

__all__ = ["hazards_beside", "worth_by_age"]

_CELL_PRIOR_REQUESTS: Final = 2.0
_MAX_HAZARD: Final = 0.95
_MIN_SURVIVAL: Final = 1e-9


def hazards_beside(reused: list[float], exposed: list[float], prior: list[float]) -> list[float]:
    """Return the chance of a use in each octave of age; where little was seen, `prior`'s shape."""
    expected = sum(map(float.__mul__, exposed, prior))
    scale = (sum(reused) + _CELL_PRIOR_REQUESTS) / (expected + _CELL_PRIOR_REQUESTS)
    return [
        min(
            (seen + _CELL_PRIOR_REQUESTS * min(scale * chance, _MAX_HAZARD))
            / (risk + _CELL_PRIOR_REQUESTS),
            _MAX_HAZARD,
        )
        for seen, risk, chance in zip(reused, exposed, prior, strict=True)
    ]


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
