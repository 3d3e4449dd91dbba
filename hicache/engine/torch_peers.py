"""The ranks of a spread model as processes that talk through `torch.distributed`."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hicache.engine.model_shards import place_ranks
from hicache.engine.peers import EngineRank
from hicache.errors import RanksLostError
from hicache.ranks import TorchRankGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicache.config import RankPlacement

__all__ = ["TorchPeers", "joined_ranks"]


@contextmanager
def joined_ranks(
    rank: int, *, tp_size: int, pp_size: int, rendezvous: Path, timeout_seconds: float
) -> Iterator[EngineRank]:
    """Join the other processes of a replica, each of which does so; blocks until all have.

    Ends when all have come to the end, or at once with an error.

    Args:
        rank: number of this process among the `tp_size * pp_size`, stage after stage.
        tp_size: ranks that hold parts of the same layers.
        pp_size: stages.
        rendezvous: a file that does not exist yet, the same for all, through which they meet.
        timeout_seconds: how long a rank waits for another, here, in every pass and in every step.

    Raises:
        RanksLostError: the others did not come in time, here or at the end.
    """
    placements = place_ranks(tp_size=tp_size, pp_size=pp_size)
    timeout = timedelta(seconds=timeout_seconds)
    with _lost_when_it_fails("the ranks did not meet"):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=len(placements),
            timeout=timeout,
        )
    try:
        # Every process makes every group, in one order.
        with _lost_when_it_fails("the ranks did not meet"):
            # What the model sends must not come between the decisions of the cache.
            control = dist.new_group(timeout=timeout)
            stages = []
            for stage in range(pp_size):
                members = [n for n, place in enumerate(placements) if place.pp_rank == stage]
                stages.append(dist.new_group(members, timeout=timeout))
        placement = placements[rank]
        yield EngineRank(
            placement=placement,
            peers=TorchPeers(placement, stages[placement.pp_rank]),
            group=TorchRankGroup(control, timeout_seconds=timeout_seconds),
        )
        # Whoever left sooner would be missed.
        with _lost_when_it_fails("a rank has not come to the end"):
            dist.barrier()
    finally:
        dist.destroy_process_group()


class TorchPeers:
    """Other processes of one replica, as a rank's model sees them; see `Peers`.

    Every call raises `RanksLostError` when another rank has ended or does not answer in time.

    Args:
        placement: of this rank.
        stage: gloo, the ranks of its stage; those of all stages are the default group.
    """

    def __init__(self, placement: RankPlacement, stage: dist.ProcessGroup) -> None:
        self._placement = placement
        self._stage = stage
        self._rank = placement.pp_rank * placement.tp_size + placement.tp_rank
        self._source = (placement.pp_size - 1) * placement.tp_size
        self.size = placement.tp_size * placement.pp_size
        self.in_first_stage = placement.pp_rank == 0
        self.in_last_stage = placement.pp_rank == placement.pp_size - 1

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See `Peers.sum`."""
        if self._placement.tp_size == 1:
            return partial
        total = partial.float().contiguous()
        with _lost_when_it_fails("a rank of this stage is lost"):
            dist.all_reduce(total, group=self._stage)
        return total.to(partial.dtype)

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """See `Peers.receive`."""
        with _lost_when_it_fails("the stage before is lost"):
            dist.recv(into, src=self._rank - self._placement.tp_size)
        return into

    def send(self, hidden: torch.Tensor) -> None:
        """See `Peers.send`."""
        with _lost_when_it_fails("the next stage is lost"):
            dist.send(hidden.contiguous(), dst=self._rank + self._placement.tp_size)

    def share(self, logits: torch.Tensor, *, good: bool) -> torch.Tensor | None:
        """See `Peers.share`; one sum over all ranks, to which only one of them adds logits."""
        message = torch.zeros(logits.numel() + 1)
        message[-1] = not good
        if self._rank == self._source:
            message[:-1] = logits.flatten()
        with _lost_when_it_fails("a rank is lost"):
            dist.all_reduce(message)
        return None if message[-1] else message[:-1].view(logits.shape)


@contextmanager
def _lost_when_it_fails(what: str) -> Iterator[None]:
    """Turn the ways in which a collective can fail into the one that callers know."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        # Of several lines of advice and a stack of the library, the first line is for people.
        reason = str(error).partition("\n")[0]
        raise RanksLostError(f"{what} ({reason}); start the ranks anew") from error
