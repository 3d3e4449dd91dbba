"""How the ranks of one engine come to the same decision."""

from hicache.ranks.base import RankGroup
from hicache.ranks.single import SingleRank

__all__ = ["RankGroup", "SingleRank"]
