"""One thing that can happen to simulated ranks in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache.sim.coverage import Meeting
    from hicache.sim.ranks import Rank

__all__ = ["Action"]


class Action(NamedTuple):
    """Something that can happen.

    Attributes:
        weight: how often it does, beside the others.
        is_possible: whether it can happen now; changes nothing.
        do: makes it happen and says in words what that was.
        meets: what it would perhaps bring about now.
        eagerness: what is added to `weight` when that was not met yet; little where it ends much
            that others could meet later.
        rank: the only one that it happens to; None for all.
    """

    weight: float
    is_possible: Callable[[], object]
    do: Callable[[], str]
    meets: Callable[[], Iterable[Meeting]] = tuple
    eagerness: float = 20.0
    rank: Rank | None = None
