"""Where one rank stands among the ranks of its engine."""

from __future__ import annotations

import dataclasses

from hicache.errors import ConfigError

__all__ = ["RankPlacement"]

_PARALLELISMS = ("tp", "pp", "cp", "dp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """A rank's position in each kind of parallelism; by default it is alone.

    Tensor, pipeline and context parallel ranks (`tp`, `pp`, `cp`) of one engine hold different
    parts of the same pages, or equal copies of them. Data parallel replicas (`dp`) hold pages of
    their own, and read each other's from storage. Which layers and heads a rank holds is said by
    its pools (`hicache.layout.PageGeometry`).

    Attributes:
        tp_rank, pp_rank, cp_rank, dp_rank: position, from 0.
        tp_size, pp_size, cp_size, dp_size: how many ranks there are.

    Raises:
        ConfigError: a value that cannot be; the message names it.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        for kind in _PARALLELISMS:
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if type(size) is not int or size < 1:
                raise ConfigError(f"{kind}_size must be an int of at least 1, not {size!r}")
            if type(rank) is not int or not 0 <= rank < size:
                raise ConfigError(
                    f"{kind}_rank must be an int from 0 to {kind}_size - 1 = {size - 1}, "
                    f"not {rank!r}"
                )
