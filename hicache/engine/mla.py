"""Multi-head latent attention as DeepSeek has it: all heads share one cached row a token.

The row is a normed latent, from which keys and values of all heads are projected, and one key that
carries the position. The projection is computed explicitly for all tokens of a sequence at each
step: slower than folding it into queries and outputs, and the same answer.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from hicache.engine.decoder import Decoder, LayerWeights, ModelWeights, linear, rotate
from hicache.engine.model_config import MlaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache.engine.batch import Batch
    from hicache.engine.model import KVPool

__all__ = ["MlaLayerWeights", "MlaModel", "MlaWeights"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MlaLayerWeights(LayerWeights):
    """The weights of one layer with latent attention.

    Attributes:
        query: `[num_heads * (qk_nope_head_dim + qk_rope_head_dim), hidden_size]`: of each head, the
            elements that know no position, then those that are rotated, in adjacent pairs.
        row: `[kv_lora_rank + qk_rope_head_dim, hidden_size]`: the latent, then the rotated key.
        latent_norm: `[kv_lora_rank]`, float32.
        keys_and_values: `[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]`: of each
            head, its key, then its value.
    """

    query: torch.Tensor
    row: torch.Tensor
    latent_norm: torch.Tensor
    keys_and_values: torch.Tensor


MlaWeights: TypeAlias = ModelWeights[MlaLayerWeights]


class MlaModel(Decoder[MlaConfig, MlaLayerWeights]):
    """A model with latent attention over a `DeviceMlaPool`; see `Decoder`."""

    def _attention_shapes(self) -> Mapping[str, tuple[int, ...]]:
        config = self.config
        heads, hidden, rank = config.num_heads, config.hidden_size, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        return {
            "query": (heads * (nope + rope), hidden),
            "row": (rank + rope, hidden),
            "latent_norm": (rank,),
            "keys_and_values": (heads * (nope + value), rank),
            "attention_output": (hidden, heads * value),
        }

    def _attention(
        self,
        layer: int,
        normed: torch.Tensor,
        batch: Batch,
        rotation: torch.Tensor,
        pool: KVPool,
    ) -> torch.Tensor:
        config, weights = self.config, self._weights.layers[layer]
        queries = linear(normed, weights.query).view(len(normed), config.num_heads, -1)
        fixed, turned = queries.tensor_split((config.qk_nope_head_dim,), dim=-1)
        queries = torch.cat([fixed, rotate(turned, rotation)], dim=-1)
        new_rows = linear(normed, weights.row).unsqueeze(1)
        latents, rope_keys = new_rows.tensor_split((config.kv_lora_rank,), dim=-1)
        latents = self._norm(latents, weights.latent_norm)
        pool.set_kv_buffer(layer, batch.new_slots, latents, rotate(rope_keys, rotation))
        rows = pool.get_key_buffer(layer)

        attended = queries.new_empty(len(normed), config.num_heads, config.v_head_dim)
        for span in batch.spans:
            keys, values = self._keys_and_values(rows.index_select(0, span.slots), weights)
            attended[span.rows] = F.scaled_dot_product_attention(
                queries[span.rows].transpose(0, 1).unsqueeze(0),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=span.mask,
                is_causal=span.causal,
            )[0].transpose(0, 1)
        return attended.flatten(1)

    def _keys_and_values(
        self, rows: torch.Tensor, weights: MlaLayerWeights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[num_tokens, num_heads, dim]` of `[num_tokens, 1, row]`."""
        config = self.config
        latents, rope_keys = rows.tensor_split((config.kv_lora_rank,), dim=-1)
        both = linear(latents.squeeze(1), weights.keys_and_values)
        fixed, values = both.view(len(rows), config.num_heads, -1).tensor_split(
            (config.qk_nope_head_dim,), dim=-1
        )
        keys = torch.cat([fixed, rope_keys.expand(-1, config.num_heads, -1)], dim=-1)
        return keys, values
