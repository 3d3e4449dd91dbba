"""How the ranks of one engine come to the same decision.

The tensor, pipeline and context parallel ranks of one replica form one `RankGroup`: they hold equal
trees over different parts of the KV. Each runs the same scheduler on the same requests in the same
order, and calls `HiRadixCache.check_hicache_events` exactly once per scheduler step, also in a step
in which it computes nothing. There they meet, and where a store is attached, detached or cleared.
Whatever depends on something local (a copy, a store, a clock, free pages, a measured speed) is
decided by the minimum over all of them.

Pipeline stages are no exception. The first stage decides which requests run, and in every stage the
scheduler makes the same calls to its cache in that order, once per scheduler step and not once per
micro-batch: a page has arrived when it has on the last stage. What a stage needs of its own is only
when it computes.

Data parallel replicas are groups of their own; no agreement crosses them.

A load can fail on one rank alone, whose layers then raise `TransferError`, while they run on the
others. What such a pass has computed is to be discarded on all ranks before their next step.
"""

from hicache.ranks.base import RankGroup
from hicache.ranks.single import SingleRank
from hicache.ranks.torch_group import TorchRankGroup

__all__ = ["RankGroup", "SingleRank", "TorchRankGroup"]
