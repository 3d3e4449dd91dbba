"""What a run of the demo is made of; crosses the process boundary as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DemoOptions", "DemoSize"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSize:
    """How much is asked of the model.

    Attributes:
        num_users: conversations, an even number.
        turns_before_restart, turns_after_restart: turns of each conversation.
        source_tokens: tokens of source code in a first turn, at most.
        answer_tokens: tokens of every answer.
        device_tokens: size of L1, less than the conversations need.
        chunk_tokens: prompt tokens computed in one step.
    """

    num_users: int
    turns_before_restart: int
    turns_after_restart: int
    source_tokens: int
    answer_tokens: int
    device_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.num_users < 2 or self.num_users % 2:
            raise ConfigError(f"num_users must be even and at least 2, not {self.num_users}")

    @property
    def num_turns(self) -> int:
        """Turns of each conversation."""
        return self.turns_before_restart + self.turns_after_restart


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run of the demo.

    Attributes:
        model: `smollm2` or `random`.
        dtype: element type of weights, activations and KV.
        seed: decides files, questions and order.
        size: see `DemoSize`.
        cache: configuration of the cache.
        tp_size, pp_size: tensor-parallel ranks and pipeline stages that the model is spread over.
        restart_tp_size: and tensor-parallel ranks after the restart.
    """

    model: str
    dtype: str
    seed: int
    size: DemoSize
    cache: HiCacheConfig
    tp_size: int = 1
    pp_size: int = 1
    restart_tp_size: int = 1

    @property
    def ranks_change(self) -> bool:
        """Whether the model is split over another number of ranks after the restart."""
        return self.tp_size != self.restart_tp_size

    def tp_size_of(self, *, after_restart: bool) -> int:
        """Return the number of tensor-parallel ranks of a phase."""
        return self.restart_tp_size if after_restart else self.tp_size

    def to_mapping(self) -> dict[str, object]:
        """Return plain data that `from_mapping` reads back."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "seed": self.seed,
            "size": dataclasses.asdict(self.size),
            "cache": self.cache.to_mapping(),
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "restart_tp_size": self.restart_tp_size,
        }

    @classmethod
    def from_mapping(cls, data: dict[str, Any]) -> DemoOptions:
        """Return the options that `to_mapping` gave."""
        return cls(
            model=data["model"],
            dtype=data["dtype"],
            seed=data["seed"],
            size=DemoSize(**data["size"]),
            cache=HiCacheConfig.from_mapping(data["cache"]),
            tp_size=data["tp_size"],
            pp_size=data["pp_size"],
            restart_tp_size=data["restart_tp_size"],
        )

    def write(self, path: Path) -> None:
        """Write the options to `path`."""
        path.write_text(json.dumps(self.to_mapping()), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> DemoOptions:
        """Read what `write` wrote."""
        return cls.from_mapping(json.loads(path.read_text(encoding="utf-8")))
