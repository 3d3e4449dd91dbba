"""A paged Llama forward pass.

Keys and values live in a paged pool that the cache fills behind the model's back. In layer *i* the
model first stores the keys and values of the new tokens and only then asks the pool for the layer's
buffers. Asking is what waits for the load of layer *i*, so the copy of layer *i + 1* overlaps the
computation of layer *i*. Storing does not wait: it touches none of the slots being loaded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.model_config import LlamaConfig
    from hicache.types import IntArray

__all__ = ["KVPool", "LayerWeights", "LlamaModel", "LlamaWeights", "PageGeometry", "SequenceChunk"]

# Up to so many rows a CPU matmul is cut into so many slabs of output features: see `_linear`.
_SLAB_MAX_ROWS = 64
_NUM_SLABS = 8


class PageGeometry(Protocol):
    """What the model has to know about pages."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""


class KVPool(Protocol):
    """Where the model keeps keys and values; `hicache.pools.DeviceKVPool` is one.

    Slot `page * page_size + offset` holds the token at that offset of the page.
    """

    @property
    def geometry(self) -> PageGeometry:
        """The shape of a page."""

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Wait for the layer's load, then return `[num_slots, num_kv_heads, head_dim]`."""

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Wait for the layer's load, then return `[num_slots, num_kv_heads, head_dim]`."""

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store `[num_tokens, num_kv_heads, head_dim]` keys and values; waits for no load."""


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceChunk:
    """The next tokens of one sequence: a prompt, a part of one, or one decoded token.

    Attributes:
        token_ids: the tokens to compute, at least one; a tensor must be 1-D int64.
        start: tokens of the sequence before them, whose keys and values are in the pool (or are
            being loaded into it under the pool's layer events).
        pages: the sequence's page table, covering at least `start + len(token_ids)` tokens.
    """

    token_ids: Sequence[int] | torch.Tensor
    start: int
    pages: IntArray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """The weights of one layer; a projection is `[num_outputs, num_inputs]`.

    Attributes:
        attention_norm: `[hidden_size]`, float32.
        qkv: `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`: query heads, then key
            heads, then value heads. The pairs that rotary embedding turns are adjacent elements
            (GGUF's order for this architecture), not the two halves of a head.
        attention_output: `[hidden_size, num_heads * head_dim]`.
        ffn_norm: `[hidden_size]`, float32.
        gate_up: `[2 * ffn_size, hidden_size]`: gate, then up.
        down: `[hidden_size, ffn_size]`.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LlamaWeights:
    """All weights of a model.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        layers: one entry a layer.
        final_norm: `[hidden_size]`, float32.
        lm_head: `[vocab_size, hidden_size]`; the embedding itself where the two are tied.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor

    def to(self, *, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
        """Return the weights as `dtype` on `device`; norms stay float32, tied tensors tied.

        Tensors that are already there are shared with the result, not copied.
        """
        embedding = self.embedding.to(device, dtype)
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(
                LayerWeights(
                    attention_norm=layer.attention_norm.to(device, torch.float32),
                    qkv=layer.qkv.to(device, dtype),
                    attention_output=layer.attention_output.to(device, dtype),
                    ffn_norm=layer.ffn_norm.to(device, torch.float32),
                    gate_up=layer.gate_up.to(device, dtype),
                    down=layer.down.to(device, dtype),
                )
                for layer in self.layers
            ),
            final_norm=self.final_norm.to(device, torch.float32),
            lm_head=embedding if self.lm_head is self.embedding else self.lm_head.to(device, dtype),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Span:
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
class _Batch:
    """What every layer of one forward pass needs, computed once.

    Attributes:
        token_ids: `[num_new]`, the new tokens of all sequences one after the other.
        rotation: `[num_new, 1, head_dim / 2]` complex, the turn of each pair.
        new_slots: `[num_new]`, pool slots of the new tokens.
        spans: the sequences.
    """

    token_ids: torch.Tensor
    rotation: torch.Tensor
    new_slots: torch.Tensor
    spans: tuple[_Span, ...]


class LlamaModel:
    """A Llama model that computes over a paged KV pool; inference only.

    Stateless between calls: everything a sequence leaves behind is in the pool. Logits of a
    sequence do not depend on what else is in the batch, on how its prompt was cut into chunks, or
    on where its pages are, beyond rounding.

    Args:
        config: shape of the model.
        weights: weights of that shape.
        dtype: what projections and attention compute in; the pool must hold the same. Norms, rotary
            embedding and logits are float32 whatever it is.
        device: where the model computes; the pool must be there too.

    Raises:
        ConfigError: a weight has another shape than `config` says.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_shapes(config, weights)
        self.config = config
        self._device = torch.device(device)
        self._weights = weights.to(dtype=dtype, device=self._device)
        self._rotations = _rotations(config).to(self._device)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        """Compute the chunks' tokens and store their keys and values in the pool.

        Blocks in each layer until the pool lets that layer's buffers be read. On a CUDA device
        the work is only enqueued on the current stream.

        Args:
            chunks: at least one; at most one chunk of a sequence.
            pool: keys and values before each chunk's `start`; the new ones are added.

        Returns:
            Float32 logits `[len(chunks), vocab_size]` of each chunk's last token.

        Raises:
            ConfigError: no chunk, an empty chunk, a page table too short, or a sequence longer than
                `max_positions`. Nothing was stored.
            TransferError: from the pool, when a layer's load failed. New keys and values of the
                layers up to that one were stored.
        """
        batch = self._prepare(chunks, pool.geometry.page_size)
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            hidden = hidden + self._attention(index, normed, batch, pool)
            normed = self._norm(hidden, layer.ffn_norm)
            gate, up = _linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + _linear(F.silu(gate) * up, layer.down)
        last_rows = torch.tensor([span.rows.stop - 1 for span in batch.spans], device=self._device)
        last = self._norm(hidden.index_select(0, last_rows), self._weights.final_norm)
        return _linear(last, self._weights.lm_head).float()

    def _attention(
        self, layer: int, normed: torch.Tensor, batch: _Batch, pool: KVPool
    ) -> torch.Tensor:
        """Return `[num_new, hidden_size]`; store the new keys and values, then read the layer's."""
        config, weights = self.config, self._weights.layers[layer]
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = _linear(normed, weights.qkv).view(len(normed), -1, config.head_dim)
        rotated = _rotate(qkv[:, :num_rotated], batch.rotation)
        queries, new_keys = rotated.tensor_split((config.num_heads,), dim=1)
        pool.set_kv_buffer(layer, batch.new_slots, new_keys, qkv[:, num_rotated:])
        keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)

        attended = torch.empty_like(queries)
        for span in batch.spans:
            attended[span.rows] = F.scaled_dot_product_attention(
                queries[span.rows].transpose(0, 1).unsqueeze(0),
                keys.index_select(0, span.slots).transpose(0, 1).unsqueeze(0),
                values.index_select(0, span.slots).transpose(0, 1).unsqueeze(0),
                attn_mask=span.mask,
                is_causal=span.causal,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return _linear(attended.flatten(1), weights.attention_output)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32, returned in the dtype of `hidden`."""
        normed = F.rms_norm(hidden.float(), weight.shape, weight, self.config.rms_eps)
        return normed.to(hidden.dtype)

    def _prepare(self, chunks: Sequence[SequenceChunk], page_size: int) -> _Batch:
        """Check the chunks and compute what all layers share."""
        if not chunks:
            raise ConfigError("a forward pass needs at least one chunk; skip the step instead")
        spans, token_ids, positions, new_slots = [], [], [], []
        num_rows = 0
        for chunk in chunks:
            tokens = torch.as_tensor(chunk.token_ids, dtype=torch.int64, device=self._device)
            num_new = tokens.numel()
            slots = torch.from_numpy(self._slots(chunk, num_new, page_size)).to(self._device)
            mask = None
            if chunk.start > 0 and num_new > 1:
                whole = torch.ones(num_new, len(slots), dtype=torch.bool, device=self._device)
                mask = whole.tril(diagonal=chunk.start)
            spans.append(
                _Span(
                    rows=slice(num_rows, num_rows + num_new),
                    slots=slots,
                    mask=mask,
                    causal=chunk.start == 0,
                )
            )
            token_ids.append(tokens)
            positions.append(torch.arange(chunk.start, len(slots), device=self._device))
            new_slots.append(slots[chunk.start :])
            num_rows += num_new
        return _Batch(
            token_ids=torch.cat(token_ids),
            rotation=self._rotations.index_select(0, torch.cat(positions)).unsqueeze(1),
            new_slots=torch.cat(new_slots),
            spans=tuple(spans),
        )

    def _slots(self, chunk: SequenceChunk, num_new: int, page_size: int) -> IntArray:
        """Return the slots of the sequence's first `start + num_new` tokens."""
        num_tokens = chunk.start + num_new
        if num_new == 0 or chunk.start < 0:
            raise ConfigError(
                f"a chunk of {num_new} tokens from {chunk.start} on; it needs at least one token "
                "and a start that is not negative"
            )
        if num_tokens > self.config.max_positions:
            raise ConfigError(
                f"a sequence of {num_tokens} tokens; {self.config.name} ends at "
                f"{self.config.max_positions}: end the sequence there"
            )
        if len(chunk.pages) * page_size < num_tokens:
            raise ConfigError(
                f"{len(chunk.pages)} pages of {page_size} tokens do not cover {num_tokens} tokens; "
                "allocate pages before the forward pass"
            )
        positions = np.arange(num_tokens, dtype=np.int64)
        slots: IntArray = chunk.pages[positions // page_size] * page_size + positions % page_size
        return slots


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T` for `[num_rows, num_inputs]` and `[num_outputs, num_inputs]`.

    A CPU matmul of a few rows is bound by reading the weight, and the BLAS reads it on one core
    whatever the number of threads. As a batch of slabs it is read on all cores.
    """
    num_rows, num_outputs = x.shape[0], weight.shape[0]
    num_slabs = math.gcd(num_outputs, _NUM_SLABS)
    if not x.is_cpu or num_rows > _SLAB_MAX_ROWS:
        return F.linear(x, weight)
    slabs = weight.view(num_slabs, -1, weight.shape[1])
    return torch.bmm(x.expand(num_slabs, -1, -1), slabs.mT).transpose(0, 1).flatten(1)


def _rotations(config: LlamaConfig) -> torch.Tensor:
    """Return `[max_positions, head_dim / 2]` complex numbers of length one."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    positions = torch.arange(config.max_positions, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn adjacent pairs of `[num_new, num_heads, head_dim]` by their position."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(heads.dtype)


def _check_shapes(config: LlamaConfig, weights: LlamaWeights) -> None:
    """Raise `ConfigError` naming the first weight that does not have the configured shape."""
    hidden, attended = config.hidden_size, config.num_heads * config.head_dim
    outer = {
        "embedding": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "lm_head": (config.vocab_size, hidden),
    }
    inner = {
        "attention_norm": (hidden,),
        "qkv": (attended + 2 * config.num_kv_heads * config.head_dim, hidden),
        "attention_output": (hidden, attended),
        "ffn_norm": (hidden,),
        "gate_up": (2 * config.ffn_size, hidden),
        "down": (hidden, config.ffn_size),
    }
    if len(weights.layers) != config.num_layers:
        raise ConfigError(
            f"weights of {len(weights.layers)} layers for a model of {config.num_layers}; "
            "take config and weights from the same file"
        )
    owners: list[tuple[LlamaWeights | LayerWeights, dict[str, tuple[int, ...]]]]
    owners = [(weights, outer), *((layer, inner) for layer in weights.layers)]
    for owner, shapes in owners:
        for name, shape in shapes.items():
            found = tuple(getattr(owner, name).shape)
            if found != shape:
                raise ConfigError(
                    f"weight {name} has shape {found}, the configuration asks for {shape}; "
                    "take config and weights from the same file"
                )
