"""What the scheduler asks of a model, and what a model asks of its pool."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache.engine.model_config import ModelConfig
    from hicache.layout import PageGeometry
    from hicache.types import IntArray

__all__ = ["KVPool", "Model", "SequenceChunk"]


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceChunk:
    """The next tokens of one sequence: a prompt, a part of one, or one decoded token.

    Attributes:
        token_ids: the tokens to compute, at least one; a tensor must be 1-D int64.
        start: tokens of the sequence before them, whose KV is in the pool (or is being loaded into
            it under the pool's layer events).
        pages: the sequence's page table, covering at least `start + len(token_ids)` tokens.
        num_logits: of how many of its last tokens the logits are asked for.
    """

    token_ids: Sequence[int] | torch.Tensor
    start: int
    pages: IntArray
    num_logits: int = 1


class KVPool(Protocol):
    """Where a model keeps its KV; `DeviceKVPool` and `DeviceMlaPool` of `hicache.pools` are two.

    Slot `page * page_size + offset` holds the token at that offset of the page.
    """

    @property
    def geometry(self) -> PageGeometry:
        """What one page is."""

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Wait for the layer's load, then return its keys `[num_slots, num_heads, key_dim]`."""

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Wait for the layer's load, then return its values `[num_slots, num_heads, value_dim]`."""

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor, /
    ) -> None:
        """Store what new tokens have in a layer; waits for no load.

        `[num_tokens, num_heads, dim]` each: keys and values, or latents and rotated keys.
        """

    def end_layer(self, layer: int) -> None:
        """Say that the pass has stored, or enqueued to store, all it stores in `layer`."""


class Model(Protocol):
    """Computes tokens over a paged pool of the kind that its attention needs; inference only."""

    @property
    def config(self) -> ModelConfig:
        """Its shape."""

    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        """Compute the chunks' tokens and store their KV in the pool.

        Blocks in each layer until the pool lets that layer's buffers be read. On a CUDA device
        the work is only enqueued on the current stream.

        Args:
            chunks: at least one; at most one chunk of a sequence.
            pool: the KV before each chunk's `start`; the new one is added.

        Returns:
            Float32 logits `[sum of num_logits, vocab_size]` of each chunk's last tokens in order,
            on every rank of a model that is spread over several.

        Raises:
            ConfigError: no chunk, an empty chunk, a page table too short, a sequence longer than
                `max_positions`, or logits of more tokens than the chunk has. Nothing was stored.
            TransferError: a layer's load failed, on this rank or on another. What was stored of the
                new KV is not to be used.
            RanksLostError: another rank has ended or does not answer.
        """
