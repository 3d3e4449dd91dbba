"""A group of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SingleRank"]


class SingleRank:
    """One rank agrees with itself at no cost."""

    size = 1

    def agree(self, values: Sequence[int]) -> Sequence[int]:
        """Return `values`."""
        return values
