"""How much of what has ended one step of the scheduler takes."""

from __future__ import annotations

__all__ = ["step_share"]

_LEAST = 3
_PART = 4


def step_share(num_ended: int) -> int:
    """Return how many of `num_ended` operations, of all kinds together, a step takes.

    Three, or a quarter if that is more. So a burst is spread over steps, none of which is long, and
    what waits makes a step take more: however rarely there is one, nothing piles up. Follows from
    an agreed number, so it is the same on every rank.
    """
    return max(_LEAST, -(-num_ended // _PART))
