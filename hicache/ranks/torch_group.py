"""Ranks in processes of their own, over `torch.distributed`."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hicache.errors import ConfigError, RanksDivergedError, RanksLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_VALUES", "TorchRankGroup"]

MAX_VALUES = 510
"""Values that one agreement can have."""

_FILL = 0


class TorchRankGroup:
    """One all-reduce of constant size per agreement: gloo, in host memory, nothing on the device.

    What is reduced is one tensor that is made once, whatever the values, so that no rank can enter
    a collective of another size; how many values a rank has travels in it, and ranks that have
    unequal numbers all find out. Nothing is sent that nobody waits for: a rank is never more than
    one agreement ahead of the slowest.

    After the first failure nothing is agreed any more. For a single owner thread.

    Args:
        process_group: gloo, of exactly the ranks that hold equal trees: tensor, pipeline and
            context parallel ranks of one replica. With none, a new group of all ranks of the
            default group is made; then all of them construct one at the same time.
        timeout_seconds: how long an agreement waits for the slowest rank. Longer than the longest
            pause of a healthy rank between two steps, such as the compilation of a kernel.

    Raises:
        ConfigError: `torch.distributed` is not initialized, the group is not gloo, this process is
            not in it, or the deadline is not above 0.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, timeout_seconds: float = 30.0
    ) -> None:
        if timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds must be above 0, not {timeout_seconds}")
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialized; call init_process_group before, or use "
                "SingleRank for an engine of one rank"
            )
        self._timeout_seconds = timeout_seconds
        self._deadline = datetime.timedelta(seconds=timeout_seconds)
        group = process_group or dist.new_group(backend="gloo", timeout=self._deadline)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigError("this process is no rank of the group; construct one in its ranks")
        backend = dist.get_backend(group)
        if backend != "gloo":
            raise ConfigError(
                f"ranks agree over a gloo group, not {backend}; make one with "
                "torch.distributed.new_group(ranks, backend='gloo')"
            )
        self._group = group
        self._rank, self._size = rank, dist.get_world_size(group)
        self._words = torch.empty(2 + MAX_VALUES, dtype=torch.int64)
        # The same memory: filled and read without a tensor operation per value.
        self._view = self._words.numpy()
        self._lost: str | None = None

    @property
    def size(self) -> int:
        """See `RankGroup.size`."""
        return self._size

    @property
    def rank(self) -> int:
        """Which one of them this is, from 0."""
        return self._rank

    def agree(self, values: Sequence[int]) -> list[int]:
        """See `RankGroup.agree`. Blocks until every rank has called, for the deadline at most.

        Args:
            values: below 2 ** 63 in magnitude.

        Raises:
            RanksLostError: a rank has not called in time, or has died; at once from then on.
            RanksDivergedError: the ranks have unequal numbers of values; raised on all of them.
            ConfigError: more than `MAX_VALUES` values; raised on all of them.
        """
        if self._lost is not None:
            raise RanksLostError(self._lost)
        count = len(values)
        view, end = self._view, 2 + min(count, MAX_VALUES)
        view[0], view[1] = count, -count
        view[2:end] = values[:MAX_VALUES]
        view[end:] = _FILL
        self._reduce()
        fewest, most = int(view[0]), -int(view[1])
        if fewest != most:
            raise RanksDivergedError(
                f"ranks agree on {fewest} to {most} values, this one on {count}; "
                "they must make the same call"
            )
        if count > MAX_VALUES:
            raise ConfigError(f"cannot agree on {count} values, only on {MAX_VALUES} at most")
        agreed: list[int] = view[2:end].tolist()
        return agreed

    def _reduce(self) -> None:
        """Let `_words` be the minimum over the ranks."""
        try:
            work = dist.all_reduce(
                self._words, op=dist.ReduceOp.MIN, group=self._group, async_op=True
            )
            work.wait(self._deadline)
        except RuntimeError as error:
            self._lost = (
                f"rank {self._rank} of {self._size} has had no answer of another rank, which has "
                f"died or been silent for {self._timeout_seconds:g} s; restart the engine"
            )
            raise RanksLostError(self._lost) from error
