"""The agreement that a scheduler step is built on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RankGroup"]


class RankGroup(Protocol):
    """The ranks that hold the same tree over different shards of the KV.

    Each rank calls `agree` exactly once per scheduler step, once when its cache is built, and when
    a store is attached, detached or cleared, with a vector of one length, whatever happened, so
    that no branch can make ranks call a different number of collectives.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    def agree(self, values: Sequence[int]) -> Sequence[int]:
        """Return the element-wise minimum of `values` over all ranks; the same on each.

        Blocks for the slowest rank, up to a deadline.

        Raises:
            RanksLostError: a rank has not called in time, or is gone.
        """
