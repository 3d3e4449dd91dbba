"""What every layer of one forward pass needs, computed once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.model import SequenceChunk
    from hicache.engine.model_config import ModelConfig
    from hicache.types import IntArray

__all__ = ["Batch", "Span", "make_batch"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """One sequence of a batch.

    Attributes:
        rows: where its new tokens are in the batch.
        slots: `[start + num_new]`, pool slots of all its tokens in order.
        mask: `[num_new, start + num_new]`, true where a new token may look; `None` where `causal`
            says it, or where nothing is to be masked because there is one new token.
        causal: every token of the sequence is new.
    """

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The chunks of one forward pass as tensors.

    Attributes:
        token_ids: `[num_new]`, the new tokens of all sequences one after the other.
        positions: `[num_new]`, where they are in their sequences.
        new_slots: `[num_new]`, pool slots of the new tokens.
        logit_rows: which of the new tokens' logits are asked for.
        spans: the sequences.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    new_slots: torch.Tensor
    logit_rows: torch.Tensor
    spans: tuple[Span, ...]


def make_batch(
    chunks: Sequence[SequenceChunk], config: ModelConfig, *, page_size: int, device: torch.device
) -> Batch:
    """Return the chunks as tensors on `device`.

    Raises:
        ConfigError: see `hicache.engine.model.Model.forward`.
    """
    if not chunks:
        raise ConfigError("a forward pass needs at least one chunk; skip the step instead")
    spans, token_ids, positions, new_slots = [], [], [], []
    logit_rows: list[int] = []
    num_rows = 0
    for chunk in chunks:
        tokens = torch.as_tensor(chunk.token_ids, dtype=torch.int64, device=device)
        num_new = tokens.numel()
        slots = torch.from_numpy(_slots(chunk, num_new, config, page_size)).to(device)
        mask = None
        if chunk.start > 0 and num_new > 1:
            whole = torch.ones(num_new, len(slots), dtype=torch.bool, device=device)
            mask = whole.tril(diagonal=chunk.start)
        rows = slice(num_rows, num_rows + num_new)
        spans.append(Span(rows=rows, slots=slots, mask=mask, causal=chunk.start == 0))
        token_ids.append(tokens)
        positions.append(torch.arange(chunk.start, len(slots), device=device))
        new_slots.append(slots[chunk.start :])
        num_rows += num_new
        logit_rows += range(num_rows - chunk.num_logits, num_rows)
    return Batch(
        token_ids=torch.cat(token_ids),
        positions=torch.cat(positions),
        new_slots=torch.cat(new_slots),
        logit_rows=torch.tensor(logit_rows, device=device),
        spans=tuple(spans),
    )


def _slots(chunk: SequenceChunk, num_new: int, config: ModelConfig, page_size: int) -> IntArray:
    """Return the slots of the sequence's first `start + num_new` tokens."""
    num_tokens = chunk.start + num_new
    if num_new == 0 or chunk.start < 0:
        raise ConfigError(
            f"a chunk of {num_new} tokens from {chunk.start} on; it needs at least one token "
            "and a start that is not negative"
        )
    if not 1 <= chunk.num_logits <= num_new:
        raise ConfigError(
            f"logits of {chunk.num_logits} tokens of a chunk of {num_new}; ask for at least the "
            "last one's and at most for all"
        )
    if num_tokens > config.max_positions:
        raise ConfigError(
            f"a sequence of {num_tokens} tokens; {config.name} ends at "
            f"{config.max_positions}: end the sequence there"
        )
    if len(chunk.pages) * page_size < num_tokens:
        raise ConfigError(
            f"{len(chunk.pages)} pages of {page_size} tokens do not cover {num_tokens} tokens; "
            "allocate pages before the forward pass"
        )
    positions = np.arange(num_tokens, dtype=np.int64)
    slots: IntArray = chunk.pages[positions // page_size] * page_size + positions % page_size
    return slots
