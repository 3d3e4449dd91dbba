"""Where the ranks of one cache meet, and what they find out there besides the minimum."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from hicache.errors import RanksDivergedError, RanksLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache.ranks import RankGroup

__all__ = ["LENGTH", "Call", "RankMeeting", "paired", "unequal"]

LENGTH = 320
"""Values of every agreement. One length for all calls, so that a rank in another call than the
others is found out and not waited for."""

_PADDING = 0


class Call(IntEnum):
    """What ranks meet for."""

    CONSTRUCT = 1
    STEP = 2
    ATTACH = 3
    DETACH = 4
    CLOSE_STORE = 5
    CLEAR = 6


class RankMeeting:
    """Every agreement of one cache.

    A value that has to be equal on all ranks travels with its negative: the minimum of both is the
    smallest and the largest, and every rank sees in the same agreement whether they are one.

    When a rank is lost, or ranks are not equal, that was the last agreement.

    Args:
        ranks: with whom.

    Attributes:
        alone: whether there is nobody to agree with.
        num_agreements: collectives so far; none with one rank.
        ended: why nothing is agreed any more; None while all is well.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.alone = ranks.size == 1
        self.num_agreements = 0
        self.ended: RanksLostError | RanksDivergedError | None = None

    def agree(
        self, call: Call, values: Sequence[int], *, equal: Mapping[str, int] | None = None
    ) -> Sequence[int]:
        """Return the minimum of each of `values` over all ranks; blocks for the slowest.

        Args:
            call: the same on every rank.
            values: as many on every rank.
            equal: by name, what must be the same on every rank; not negative.

        Raises:
            RanksLostError: a rank has not answered in time, now or earlier.
            RanksDivergedError: call, names or number of values, or something in `equal`, differs.
        """
        if self.alone:
            return values
        self.require_all()
        must_be_equal = {"the call": call, "its values": len(values), **(equal or {})}
        words = paired(must_be_equal.values())
        first = len(words)
        words += values
        assert len(words) <= LENGTH
        words += [_PADDING] * (LENGTH - len(words))
        self.num_agreements += 1
        try:
            agreed = self._ranks.agree(words)
            _require_equal(list(must_be_equal), agreed)
        except (RanksLostError, RanksDivergedError) as error:
            self.ended = error
            raise
        return agreed[first : first + len(values)]

    def require_all(self) -> None:
        """Raise what has ended the agreements, if they have ended."""
        if self.ended is not None:
            raise type(self.ended)(str(self.ended))


def paired(values: Iterable[int]) -> list[int]:
    """Return each value with its negative."""
    return [word for value in values for word in (value, -value)]


def unequal(names: Iterable[str], agreed: Sequence[int]) -> list[str]:
    """Return which of `names` differ on some ranks, by the minimum of their `paired` values."""
    pairs = zip(agreed[::2], agreed[1::2], strict=False)
    return [
        name
        for name, (least, minus_most) in zip(names, pairs, strict=False)
        if least != -minus_most
    ]


def _require_equal(names: Sequence[str], agreed: Sequence[int]) -> None:
    different = unequal(names, agreed)
    if different:
        raise RanksDivergedError(
            f"ranks differ in {', '.join(different)}; they must have the same options and make the "
            "same calls in the same order. Stop the engine: what they would compute from now on "
            "is wrong"
        )
