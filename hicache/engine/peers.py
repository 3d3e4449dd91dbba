"""What the parts of a model that is spread over ranks have to tell each other in a pass."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from hicache.config import RankPlacement
from hicache.ranks import SingleRank

if TYPE_CHECKING:
    import torch

    from hicache.ranks import RankGroup

__all__ = ["Alone", "EngineRank", "Peers"]


class Peers(Protocol):
    """The ranks that compute one model together.

    The ranks of a stage (tensor-parallel) hold parts of the same layers; stages (pipeline-parallel)
    hold layers one after the other. All ranks call in the same order, whatever happens to one of
    them, because a rank that left out a call would leave the others waiting.
    """

    @property
    def size(self) -> int:
        """Number of ranks in all stages."""

    @property
    def in_first_stage(self) -> bool:
        """Whether this rank's layers are the first."""

    @property
    def in_last_stage(self) -> bool:
        """Whether this rank's layers are the last."""

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum over this stage's ranks, the same bits on each; added as float32.

        `partial` is the caller's no longer.
        """

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """Return what the stage before has sent, which has the shape and type of `into`."""

    def send(self, hidden: torch.Tensor) -> None:
        """Send the next stage what its first layer begins with."""

    def share(self, logits: torch.Tensor, *, good: bool) -> torch.Tensor | None:
        """Return the logits of the last stage's first rank, the same bits on all ranks.

        Args:
            logits: float32; only the shape matters on other ranks.
            good: whether all went well on this rank.

        Returns:
            None on all ranks when it did not on one.
        """


class Alone:
    """The one rank of a model that is in one piece."""

    size = 1
    in_first_stage = True
    in_last_stage = True

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Return `partial`."""
        return partial

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        """Fail: there is no stage before."""
        raise AssertionError("one rank has all layers")

    def send(self, hidden: torch.Tensor) -> None:
        """Fail: there is no next stage."""
        raise AssertionError("one rank has all layers")

    def share(self, logits: torch.Tensor, *, good: bool) -> torch.Tensor | None:
        """Return `logits`."""
        return logits if good else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineRank:
    """One of the ranks that serve the same requests together; by default it is alone.

    Attributes:
        placement: where it stands.
        peers: the others, as the model sees them.
        group: the others, as the cache sees them.
    """

    placement: RankPlacement = dataclasses.field(default_factory=RankPlacement)
    peers: Peers = dataclasses.field(default_factory=Alone)
    group: RankGroup = dataclasses.field(default_factory=SingleRank)
