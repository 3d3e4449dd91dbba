"""A paged forward pass; what differs from model to model is the attention.

KV lives in a paged pool that the cache fills behind the model's back. In layer *i* the model first
stores the KV of the new tokens and only then asks the pool for the layer's buffers. Asking is what
waits for the load of layer *i*, so the copy of layer *i + 1* overlaps the computation of layer *i*.
Storing does not wait: it touches none of the slots being loaded.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from hicache.engine.batch import make_batch
from hicache.engine.model_config import ModelConfig
from hicache.engine.peers import Alone
from hicache.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache.engine.batch import Batch
    from hicache.engine.model import KVPool, SequenceChunk
    from hicache.engine.peers import Peers

__all__ = ["Decoder", "LayerWeights", "ModelWeights", "linear", "rotate"]

# Up to so many rows a CPU matmul is cut into so many slabs of output features: see `linear`.
_SLAB_MAX_ROWS = 64
_NUM_SLABS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerWeights:
    """The weights of one layer but its attention's; a projection is `[num_outputs, num_inputs]`.

    Attributes:
        attention_norm: `[hidden_size]`, float32.
        attention_output: `[hidden_size, attended_size]`.
        ffn_norm: `[hidden_size]`, float32.
        gate_up: `[2 * ffn_size, hidden_size]`: gate, then up.
        down: `[hidden_size, ffn_size]`.
    """

    attention_norm: torch.Tensor
    attention_output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


_ConfigT = TypeVar("_ConfigT", bound=ModelConfig)
_LayerT = TypeVar("_LayerT", bound=LayerWeights)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelWeights(Generic[_LayerT]):
    """All weights of a model.

    Attributes:
        embedding: `[vocab_size, hidden_size]`.
        layers: one entry a layer.
        final_norm: `[hidden_size]`, float32.
        lm_head: `[vocab_size, hidden_size]`; the embedding itself where the two are tied.
    """

    embedding: torch.Tensor
    layers: tuple[_LayerT, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor

    def to(self, *, dtype: torch.dtype, device: torch.device) -> ModelWeights[_LayerT]:
        """Return the weights as `dtype` on `device`; norms stay float32, tied tensors tied.

        Tensors that are already there are shared with the result, not copied.
        """
        embedding = self.embedding.to(device, dtype)
        return ModelWeights(
            embedding=embedding,
            layers=tuple(_convert(layer, dtype, device) for layer in self.layers),
            final_norm=self.final_norm.to(device, torch.float32),
            lm_head=embedding if self.lm_head is self.embedding else self.lm_head.to(device, dtype),
        )


class Decoder(ABC, Generic[_ConfigT, _LayerT]):
    """A decoder that computes over a paged KV pool: a `hicache.engine.model.Model`.

    Stateless between calls: everything a sequence leaves behind is in the pool. Logits of a
    sequence do not depend on what else is in the batch, on how its prompt was cut into chunks, or
    on where its pages are, beyond rounding.

    Args:
        config: shape of the model.
        weights: weights of that shape.
        dtype: what projections and attention compute in; the pool must hold the same. Norms, rotary
            embedding and logits are float32 whatever it is.
        device: where the model computes; the pool must be there too.
        peers: the other ranks, where `config` and `weights` are a shard of a model
            (`hicache.engine.model_shards`); by default there are none.

    Raises:
        ConfigError: a weight has another shape than `config` says.
    """

    def __init__(
        self,
        config: _ConfigT,
        weights: ModelWeights[_LayerT],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        peers: Peers | None = None,
    ) -> None:
        self.config = config
        self._peers = peers or Alone()
        _check_shapes(config, weights, self._attention_shapes())
        self._device = torch.device(device)
        self._weights = weights.to(dtype=dtype, device=self._device)
        self._rotations = _rotations(config).to(self._device)

    @abstractmethod
    def _attention_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of a layer's weights that belong to its attention, by name."""

    @abstractmethod
    def _attention(
        self,
        layer: int,
        normed: torch.Tensor,
        batch: Batch,
        rotation: torch.Tensor,
        pool: KVPool,
    ) -> torch.Tensor:
        """Store the new tokens' KV of `layer`, then read the layer's, and attend.

        Args:
            layer: which layer.
            normed: `[num_new, hidden_size]`.
            batch: the new tokens.
            rotation: the turn of each pair at their positions, for `rotate`.
            pool: where the KV is.

        Returns:
            `[num_new, attended_size]`, of the new tokens, before the output projection.
        """

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        """See `hicache.engine.model.Model.forward`."""
        batch = make_batch(
            chunks, self.config, page_size=pool.geometry.page_size, device=self._device
        )
        peers = self._peers
        embedding = self._weights.embedding
        if peers.in_first_stage:
            hidden = F.embedding(batch.token_ids, embedding)
        else:
            hidden = peers.receive(embedding.new_empty(len(batch.token_ids), embedding.shape[1]))
        hidden, failure = self._all_layers(hidden, batch, pool)
        if peers.in_last_stage:
            last = self._norm(hidden.index_select(0, batch.logit_rows), self._weights.final_norm)
            logits = linear(last, self._weights.lm_head).float()
        else:
            peers.send(hidden)
            logits = torch.empty(len(batch.logit_rows), self.config.vocab_size)
        shared = peers.share(logits, good=failure is None)
        if shared is None:
            raise TransferError(
                "a load failed on one of the ranks; its prompt can be computed instead"
            ) from failure
        return shared

    def _all_layers(
        self, hidden: torch.Tensor, batch: Batch, pool: KVPool
    ) -> tuple[torch.Tensor, TransferError | None]:
        """Return what the last layer gives, and the first load of a layer that failed.

        With peers a pass goes on after a failure, because they wait for this rank in each layer.
        """
        peers, failure = self._peers, None
        rotation = self._rotations.index_select(0, batch.positions).unsqueeze(1)
        for index, layer in enumerate(self._weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            try:
                attended = self._attention(index, normed, batch, rotation, pool)
            except TransferError as error:
                if peers.size == 1:
                    raise
                failure = failure or error
                attended = normed.new_zeros(len(normed), layer.attention_output.shape[1])
            pool.end_layer(index)
            hidden = hidden + peers.sum(linear(attended, layer.attention_output))
            normed = self._norm(hidden, layer.ffn_norm)
            gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + peers.sum(linear(F.silu(gate) * up, layer.down))
        return hidden, failure

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32, returned in the dtype of `hidden`."""
        normed = F.rms_norm(hidden.float(), weight.shape, weight, self.config.rms_eps)
        return normed.to(hidden.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return `[num_new, num_heads, dim]` with adjacent pairs turned by their position.

    Args:
        heads: what to turn; an even number of elements a head.
        rotation: `[num_new, 1, dim / 2]` complex.
    """
    pairs = torch.view_as_complex(heads.float().contiguous().view(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(heads.dtype)


def _rotations(config: ModelConfig) -> torch.Tensor:
    """Return `[max_positions, rope_dim / 2]` complex numbers of length one."""
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float64) / config.rope_dim
    frequencies = config.rope_theta**-exponents
    positions = torch.arange(config.max_positions, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def _convert(layer: _LayerT, dtype: torch.dtype, device: torch.device) -> _LayerT:
    """Return the layer's projections as `dtype` and its norms as float32, on `device`."""
    tensors = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return dataclasses.replace(
        layer,
        **{
            name: tensor.to(device, dtype if tensor.ndim == 2 else torch.float32)
            for name, tensor in tensors.items()
        },
    )


def _check_shapes(
    config: ModelConfig, weights: ModelWeights[Any], attention: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ConfigError` naming the first weight that does not have the configured shape."""
    hidden = config.hidden_size
    outer = {
        "embedding": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "lm_head": (config.vocab_size, hidden),
    }
    inner = {
        "attention_norm": (hidden,),
        **attention,
        "ffn_norm": (hidden,),
        "gate_up": (2 * config.ffn_size, hidden),
        "down": (hidden, config.ffn_size),
    }
    if len(weights.layers) != config.num_layers:
        raise ConfigError(
            f"weights of {len(weights.layers)} layers for a model of {config.num_layers}; "
            "take config and weights from the same file"
        )
    for owner, shapes in [(weights, outer), *((layer, inner) for layer in weights.layers)]:
        for name, shape in shapes.items():
            found = tuple(getattr(owner, name).shape)
            if found != shape:
                raise ConfigError(
                    f"weight {name} has shape {found}, the configuration asks for {shape}; "
                    "take config and weights from the same file"
                )
