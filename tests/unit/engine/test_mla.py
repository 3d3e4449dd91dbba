"""Multi-head latent attention against the textbook."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from decoder_laws import (
    DecoderLaws,
    dense_attend,
    dense_norm,
    dense_rope,
    make_pool,
    make_tokens,
)

from hicache.engine.mla import MlaModel, MlaWeights
from hicache.engine.model import SequenceChunk
from hicache.engine.model_config import MlaConfig, tiny_mla_config
from hicache.engine.weights import random_mla_weights
from hicache.errors import ConfigError

CONFIG = tiny_mla_config()
WEIGHTS = random_mla_weights(CONFIG, seed=1)


def dense_logits(config: MlaConfig, weights: MlaWeights, tokens: list[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` by the textbook, one head at a time, in float64."""
    w = weights.to(dtype=torch.float64, device=torch.device("cpu"))
    rank, nope, rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    hidden = w.embedding[torch.tensor(tokens)]
    for layer in w.layers:
        normed = dense_norm(hidden, layer.attention_norm, config.rms_eps)
        rows = normed @ layer.row.T
        latent = dense_norm(rows[:, :rank], layer.latent_norm, config.rms_eps)
        shared_key = dense_rope(rows[:, rank:], config.rope_theta)
        attended = []
        for head in range(config.num_heads):
            of_head = layer.query[head * (nope + rope) : (head + 1) * (nope + rope)]
            query = normed @ of_head[:nope].T
            turned = dense_rope(normed @ of_head[nope:].T, config.rope_theta)
            size = nope + config.v_head_dim
            up = layer.keys_and_values[head * size : (head + 1) * size]
            key, value = latent @ up[:nope].T, latent @ up[nope:].T
            attended.append(
                dense_attend(torch.cat([query, turned], 1), torch.cat([key, shared_key], 1), value)
            )
        hidden = hidden + torch.cat(attended, 1) @ layer.attention_output.T
        gate, up = (dense_norm(hidden, layer.ffn_norm, config.rms_eps) @ layer.gate_up.T).chunk(
            2, 1
        )
        hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ layer.down.T
    return dense_norm(hidden, w.final_norm, config.rms_eps) @ w.lm_head.T


class TestMla(DecoderLaws):
    model = MlaModel(CONFIG, WEIGHTS)

    def dense_logits(self, tokens: list[int]) -> torch.Tensor:
        return dense_logits(CONFIG, WEIGHTS, tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_model_gives_float32_logits_close_to_the_dense_ones(dtype: str) -> None:
    tokens = make_tokens(random.Random(5), 40)
    chunk = SequenceChunk(tokens, 0, np.arange(3, dtype=np.int64))
    # One layer: with more, attention this peaked magnifies bfloat16's rounding.
    config = dataclasses.replace(CONFIG, num_layers=1)
    weights = dataclasses.replace(WEIGHTS, layers=WEIGHTS.layers[:1])
    model = MlaModel(config, weights, dtype=getattr(torch, dtype))
    logits = model.forward([chunk], make_pool(config, dtype))[0]
    assert logits.dtype == torch.float32
    expected = dense_logits(config, weights, tokens)[-1]
    assert torch.nn.functional.cosine_similarity(logits.double(), expected, dim=0) > 0.999


def test_heads_of_any_size_give_the_dense_logits() -> None:
    """No two sizes are equal, and a pair that is rotated need not start on an even element."""
    config = dataclasses.replace(
        CONFIG,
        num_layers=2,
        num_heads=3,
        kv_lora_rank=21,
        qk_nope_head_dim=13,
        qk_rope_head_dim=6,
        v_head_dim=10,
    )
    weights = random_mla_weights(config, seed=4)
    tokens = make_tokens(random.Random(6), 30)
    chunk = SequenceChunk(tokens, 0, np.array([9, 2], dtype=np.int64))
    logits = MlaModel(config, weights).forward([chunk], make_pool(config))
    expected = dense_logits(config, weights, tokens)[-1]
    torch.testing.assert_close(logits[0].double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_heads": 5}, "query"),
        ({"kv_lora_rank": 16}, "row"),
        ({"v_head_dim": 8}, "keys_and_values"),
        ({"ffn_size": 128}, "gate_up"),
    ],
)
def test_weights_of_another_shape_are_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"weight {name} has shape"):
        MlaModel(dataclasses.replace(CONFIG, **change), WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kv_lora_rank": 0}, r"MlaConfig\.kv_lora_rank is 0"), ({"qk_rope_head_dim": 7}, "even")],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change)
