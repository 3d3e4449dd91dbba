"""Llama against the textbook."""

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
    verify_equal,
)

from hicache.engine.llama import LlamaModel, LlamaWeights
from hicache.engine.model import SequenceChunk
from hicache.engine.model_config import LlamaConfig, tiny_config
from hicache.engine.weights import random_weights
from hicache.errors import ConfigError

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=1)


def dense_logits(config: LlamaConfig, weights: LlamaWeights, tokens: list[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` by the textbook, one head at a time, in float64."""
    w = weights.to(dtype=torch.float64, device=torch.device("cpu"))
    hidden = w.embedding[torch.tensor(tokens)]
    for layer in w.layers:
        heads = (dense_norm(hidden, layer.attention_norm, config.rms_eps) @ layer.qkv.T).chunk(
            config.num_heads + 2 * config.num_kv_heads, 1
        )
        attended = []
        for head in range(config.num_heads):
            kv_head = head * config.num_kv_heads // config.num_heads
            key = heads[config.num_heads + kv_head]
            value = heads[config.num_heads + config.num_kv_heads + kv_head]
            query, key = (dense_rope(x, config.rope_theta) for x in (heads[head], key))
            attended.append(dense_attend(query, key, value))
        hidden = hidden + torch.cat(attended, 1) @ layer.attention_output.T
        gate, up = (dense_norm(hidden, layer.ffn_norm, config.rms_eps) @ layer.gate_up.T).chunk(
            2, 1
        )
        hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ layer.down.T
    return dense_norm(hidden, w.final_norm, config.rms_eps) @ w.lm_head.T


class TestLlama(DecoderLaws):
    model = LlamaModel(CONFIG, WEIGHTS)

    def dense_logits(self, tokens: list[int]) -> torch.Tensor:
        return dense_logits(CONFIG, WEIGHTS, tokens)


def test_tied_embeddings_project_with_the_embedding() -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=True)
    weights = random_weights(config, seed=2)
    assert weights.lm_head is weights.embedding
    converted = weights.to(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert converted.lm_head is converted.embedding
    chunk = SequenceChunk([7, 8, 9], 0, np.array([0], dtype=np.int64))
    logits = LlamaModel(config, weights).forward([chunk], make_pool(config))
    verify_equal(logits[0], dense_logits(config, weights, [7, 8, 9])[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_model_gives_float32_logits_close_to_the_dense_ones(dtype: str) -> None:
    tokens = make_tokens(random.Random(5), 40)
    chunk = SequenceChunk(tokens, 0, np.arange(3, dtype=np.int64))
    # One layer: with more, attention this peaked magnifies bfloat16's rounding.
    config = dataclasses.replace(CONFIG, num_layers=1)
    weights = dataclasses.replace(WEIGHTS, layers=WEIGHTS.layers[:1])
    model = LlamaModel(config, weights, dtype=getattr(torch, dtype))
    logits = model.forward([chunk], make_pool(config, dtype))[0]
    assert logits.dtype == torch.float32
    expected = dense_logits(config, weights, tokens)[-1]
    assert torch.nn.functional.cosine_similarity(logits.double(), expected, dim=0) > 0.999


def test_weights_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="3 layers for a model of 4"):
        LlamaModel(CONFIG, dataclasses.replace(WEIGHTS, layers=WEIGHTS.layers[:3]))
    config = dataclasses.replace(CONFIG, ffn_size=128)
    with pytest.raises(ConfigError, match="gate_up has shape"):
        LlamaModel(config, WEIGHTS)
    config = dataclasses.replace(CONFIG, num_kv_heads=1)
    with pytest.raises(ConfigError, match="qkv has shape"):
        LlamaModel(config, WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, r"LlamaConfig\.num_layers is 0"),
        ({"rms_eps": -1e-5}, "rms_eps"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change)
