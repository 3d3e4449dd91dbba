"""Which part of a model each rank computes, and that part's shape and weights.

Tensor-parallel ranks split the heads and the columns of the feed-forward layers, pipeline stages
split the layers. Parts need not be equal: 3 KV heads on 2 ranks are 1 and 2. Every rank has the
embedding and the output projection whole.

    llama    KV heads with the query heads that attend to them; where there are more ranks than KV
             heads, neighbours hold the same KV head and split its query heads
    mla      query heads; every rank has the whole latent row, which is all that is cached
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import torch

from hicache.config import RankPlacement
from hicache.engine.decoder import LayerWeights, ModelWeights
from hicache.engine.model_config import LlamaConfig, ModelConfig
from hicache.errors import ConfigError
from hicache.layout import HeadRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.engine.llama import LlamaLayerWeights, LlamaWeights
    from hicache.engine.mla import MlaLayerWeights, MlaWeights
    from hicache.engine.model_config import MlaConfig

__all__ = ["check_split", "llama_shard", "mla_shard", "place_ranks"]

_LayerT = TypeVar("_LayerT", bound=LayerWeights)


def place_ranks(*, tp_size: int, pp_size: int) -> tuple[RankPlacement, ...]:
    """Return where each rank stands, stage after stage."""
    return tuple(
        RankPlacement(tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    )


def check_split(config: ModelConfig, *, tp_size: int, pp_size: int) -> None:
    """Raise `ConfigError` if the model cannot be split so; it says what there is too little of."""
    if tp_size < 1 or pp_size < 1:
        raise ConfigError(f"tp and pp must be at least 1, not {tp_size} and {pp_size}")
    if pp_size > config.num_layers:
        raise ConfigError(
            f"{pp_size} pipeline stages need a layer each, and {config.name} has "
            f"{config.num_layers}; use fewer stages"
        )
    if tp_size > min(config.num_heads, config.ffn_size):
        raise ConfigError(
            f"{tp_size} tensor-parallel ranks need a query head each, and {config.name} has "
            f"{config.num_heads}; use fewer ranks"
        )
    if not isinstance(config, LlamaConfig) or tp_size <= (total := config.num_kv_heads):
        return
    if config.num_heads % tp_size or tp_size % total:
        raise ConfigError(
            f"{tp_size} tensor-parallel ranks cannot share {config.num_heads} query heads on "
            f"{total} KV heads evenly, as they must where there are more ranks than KV heads; "
            f"use {total} ranks or fewer for {config.name}"
        )


def llama_shard(
    config: LlamaConfig, weights: LlamaWeights, placement: RankPlacement
) -> tuple[LlamaConfig, LlamaWeights]:
    """Return the part that the rank at `placement` computes.

    Its tensors are copies, so that the whole may be forgotten.

    Raises:
        ConfigError: see `check_split`.
    """
    check_split(config, tp_size=placement.tp_size, pp_size=placement.pp_size)
    queries, kv_heads = _llama_heads(config, placement)
    columns = _part(config.ffn_size, placement.tp_rank, placement.tp_size)
    layers = _part(config.num_layers, placement.pp_rank, placement.pp_size)
    dim, num_kv, attended = config.head_dim, config.num_kv_heads, config.num_heads * config.head_dim

    def cut(layer: LlamaLayerWeights) -> LlamaLayerWeights:
        q, k, v = layer.qkv.tensor_split((attended, attended + num_kv * dim))
        qkv = torch.cat([_rows(q, queries, dim), _rows(k, kv_heads, dim), _rows(v, kv_heads, dim)])
        attention_output = _columns(layer.attention_output, queries, dim)
        return dataclasses.replace(layer, qkv=qkv, attention_output=attention_output)

    part = dataclasses.replace(
        config,
        num_layers=len(layers),
        num_heads=len(queries),
        num_kv_heads=len(kv_heads),
        ffn_size=len(columns),
        first_layer=layers.start,
        kv_heads=HeadRange(kv_heads.start, kv_heads.stop, num_kv),
    )
    return part, _cut_layers(weights, layers, columns, cut)


def mla_shard(
    config: MlaConfig, weights: MlaWeights, placement: RankPlacement
) -> tuple[MlaConfig, MlaWeights]:
    """As `llama_shard`, of a model with latent attention."""
    check_split(config, tp_size=placement.tp_size, pp_size=placement.pp_size)
    heads = _part(config.num_heads, placement.tp_rank, placement.tp_size)
    columns = _part(config.ffn_size, placement.tp_rank, placement.tp_size)
    layers = _part(config.num_layers, placement.pp_rank, placement.pp_size)
    nope, value = config.qk_nope_head_dim, config.v_head_dim

    def cut(layer: MlaLayerWeights) -> MlaLayerWeights:
        return dataclasses.replace(
            layer,
            query=_rows(layer.query, heads, nope + config.qk_rope_head_dim),
            keys_and_values=_rows(layer.keys_and_values, heads, nope + value),
            attention_output=_columns(layer.attention_output, heads, value),
        )

    part = dataclasses.replace(
        config,
        num_layers=len(layers),
        num_heads=len(heads),
        ffn_size=len(columns),
        first_layer=layers.start,
    )
    return part, _cut_layers(weights, layers, columns, cut)


def _part(total: int, rank: int, size: int) -> range:
    """Return the `rank`-th of `size` parts of `total` things, as equal as can be."""
    return range(total * rank // size, total * (rank + 1) // size)


def _llama_heads(config: LlamaConfig, placement: RankPlacement) -> tuple[range, range]:
    """Return the query heads and the KV heads of a rank."""
    rank, size, total = placement.tp_rank, placement.tp_size, config.num_kv_heads
    if size > total:
        head = rank * total // size
        return _part(config.num_heads, rank, size), range(head, head + 1)
    kv_heads, group = _part(total, rank, size), config.num_heads // total
    return range(kv_heads.start * group, kv_heads.stop * group), kv_heads


def _cut_layers(
    weights: ModelWeights[_LayerT], layers: range, columns: range, cut: Callable[[_LayerT], _LayerT]
) -> ModelWeights[_LayerT]:
    """Return `weights` with the layers of a stage alone, each cut to what a rank computes."""

    def cut_layer(layer: _LayerT) -> _LayerT:
        gate, up = layer.gate_up.chunk(2)
        return dataclasses.replace(
            cut(layer),
            gate_up=torch.cat([_rows(gate, columns), _rows(up, columns)]),
            down=_columns(layer.down, columns),
        )

    return dataclasses.replace(
        weights, layers=tuple(cut_layer(weights.layers[layer]) for layer in layers)
    )


def _rows(matrix: torch.Tensor, of: range, size: int = 1) -> torch.Tensor:
    """Return a copy of the rows of some heads with `size` rows each."""
    return matrix[of.start * size : of.stop * size].clone()


def _columns(matrix: torch.Tensor, of: range, size: int = 1) -> torch.Tensor:
    """Return a copy of the columns of some heads with `size` columns each."""
    return matrix[:, of.start * size : of.stop * size].clone(memory_format=torch.contiguous_format)
