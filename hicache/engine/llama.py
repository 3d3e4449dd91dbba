"""Llama: grouped-query attention over cached keys and values."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from hicache.engine.decoder import Decoder, LayerWeights, ModelWeights, linear, rotate
from hicache.engine.model_config import LlamaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache.engine.batch import Batch
    from hicache.engine.model import KVPool

__all__ = ["LlamaLayerWeights", "LlamaModel", "LlamaWeights"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LlamaLayerWeights(LayerWeights):
    """The weights of one layer of Llama.

    Attributes:
        qkv: `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`: query heads, then key
            heads, then value heads. The pairs that rotary embedding turns are adjacent elements
            (GGUF's order for this architecture), not the two halves of a head.
    """

    qkv: torch.Tensor


LlamaWeights: TypeAlias = ModelWeights[LlamaLayerWeights]


class LlamaModel(Decoder[LlamaConfig, LlamaLayerWeights]):
    """A Llama model over a `DeviceKVPool`; see `Decoder`."""

    def _attention_shapes(self) -> Mapping[str, tuple[int, ...]]:
        config = self.config
        attended = config.num_heads * config.head_dim
        return {
            "qkv": (attended + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
            "attention_output": (config.hidden_size, attended),
        }

    def _attention(
        self,
        layer: int,
        normed: torch.Tensor,
        batch: Batch,
        rotation: torch.Tensor,
        pool: KVPool,
    ) -> torch.Tensor:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = linear(normed, self._weights.layers[layer].qkv).view(len(normed), -1, config.head_dim)
        rotated = rotate(qkv[:, :num_rotated], rotation)
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
        return attended.flatten(1)
