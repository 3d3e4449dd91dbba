"""The paged forward pass against a dense one that recomputes everything in float64."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from hicache.engine.llama import KVPool, LlamaModel, LlamaWeights, SequenceChunk
from hicache.engine.model_config import LlamaConfig, tiny_config
from hicache.engine.weights import random_weights
from hicache.errors import ConfigError
from hicache.layout import KVGeometry
from hicache.pools.device import DeviceKVPool

if TYPE_CHECKING:
    from hicache.types import IntArray

PAGE_SIZE = 16
NUM_PAGES = 64
CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG, seed=1)
MODEL = LlamaModel(CONFIG, WEIGHTS)
# Logits have a standard deviation of 8; float32 rounding through four layers stays far below this.
TOLERANCE = 2e-3


def dense_logits(config: LlamaConfig, weights: LlamaWeights, tokens: list[int]) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` by the textbook, one head at a time, in float64."""
    w = weights.to(dtype=torch.float64, device=torch.device("cpu"))
    dim, length = config.head_dim, len(tokens)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_eps).sqrt() * weight.double()

    def rope(x: torch.Tensor) -> torch.Tensor:
        turned = torch.empty_like(x)
        for pair in range(dim // 2):
            angle = torch.arange(length).double() * config.rope_theta ** (-2 * pair / dim)
            even, odd = x[:, 2 * pair], x[:, 2 * pair + 1]
            turned[:, 2 * pair] = even * angle.cos() - odd * angle.sin()
            turned[:, 2 * pair + 1] = even * angle.sin() + odd * angle.cos()
        return turned

    hidden = w.embedding[torch.tensor(tokens)]
    future = torch.ones(length, length).triu(1).bool()
    for layer in w.layers:
        heads = (norm(hidden, layer.attention_norm) @ layer.qkv.T).chunk(
            config.num_heads + 2 * config.num_kv_heads, 1
        )
        attended = []
        for head in range(config.num_heads):
            kv_head = head * config.num_kv_heads // config.num_heads
            key = rope(heads[config.num_heads + kv_head])
            value = heads[config.num_heads + config.num_kv_heads + kv_head]
            scores = rope(heads[head]) @ key.T / dim**0.5
            attended.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ value)
        hidden = hidden + torch.cat(attended, 1) @ layer.attention_output.T
        gate, up = (norm(hidden, layer.ffn_norm) @ layer.gate_up.T).chunk(2, 1)
        hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ layer.down.T
    return norm(hidden, w.final_norm) @ w.lm_head.T


def make_pool(config: LlamaConfig = CONFIG, dtype: str = "float32") -> DeviceKVPool:
    """A pool in which a slot that was never written poisons whatever reads it."""
    geometry = KVGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        page_size=PAGE_SIZE,
    )
    pool = DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=torch.device("cpu"))
    for layer in range(config.num_layers):
        pool.key_pages(layer).fill_(float("nan"))
        pool.value_pages(layer).fill_(float("nan"))
    return pool


def make_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(length)]


def page_tables(rng: random.Random, lengths: list[int]) -> list[IntArray]:
    """Disjoint scattered page tables for sequences of these lengths."""
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    tables = []
    for length in lengths:
        count = -(-length // PAGE_SIZE)
        tables.append(np.array(pages[:count], dtype=np.int64))
        pages = pages[count:]
    return tables


def prefill(tokens: list[int], pages: IntArray, pool: KVPool) -> torch.Tensor:
    return MODEL.forward([SequenceChunk(tokens, 0, pages)], pool)[0]


def verify_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.double(), atol=TOLERANCE, rtol=0)


# 100 tokens are more than the few rows for which matmuls are cut into slabs.
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
def test_a_prefill_gives_the_dense_logits_of_its_last_token(length: int) -> None:
    rng = random.Random(length)
    tokens = make_tokens(rng, length)
    (pages,) = page_tables(rng, [length])
    verify_equal(prefill(tokens, pages, make_pool()), dense_logits(CONFIG, WEIGHTS, tokens)[-1])


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_may_be_cut_into_any_chunks(seed: int) -> None:
    rng = random.Random(seed)
    tokens = make_tokens(rng, 150)
    (pages,) = page_tables(rng, [150])
    cuts = [0, *sorted(rng.sample(range(1, 150), rng.randint(1, 6))), 150]
    expected = dense_logits(CONFIG, WEIGHTS, tokens)
    pool = make_pool()
    for start, end in itertools.pairwise(cuts):
        logits = MODEL.forward([SequenceChunk(tokens[start:end], start, pages)], pool)
        verify_equal(logits[0], expected[end - 1])


@pytest.mark.parametrize("seed", range(3))
def test_sequences_of_a_batch_do_not_change_each_other(seed: int) -> None:
    rng = random.Random(seed)
    cached = [0, 70, 33, 0, 16]
    new = [40, 1, 20, 1, 1]
    prompts = [make_tokens(rng, before + after) for before, after in zip(cached, new, strict=True)]
    tables = page_tables(rng, [len(prompt) for prompt in prompts])
    pool = make_pool()
    for prompt, before, pages in zip(prompts, cached, tables, strict=True):
        if before:
            prefill(prompt[:before], pages, pool)
    chunks = [
        SequenceChunk(prompt[before:], before, pages)
        for prompt, before, pages in zip(prompts, cached, tables, strict=True)
    ]
    logits = MODEL.forward(chunks, pool)
    assert logits.shape == (len(chunks), CONFIG.vocab_size)
    for row, prompt in zip(logits, prompts, strict=True):
        verify_equal(row, dense_logits(CONFIG, WEIGHTS, prompt)[-1])


def test_greedy_decoding_chooses_the_tokens_of_the_dense_model() -> None:
    rng = random.Random(7)
    prompts = [make_tokens(rng, 30), make_tokens(rng, 12)]
    tables = page_tables(rng, [60, 60])
    pool = make_pool()
    chunks = [
        SequenceChunk(prompt, 0, pages) for prompt, pages in zip(prompts, tables, strict=True)
    ]
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(20):
        for sequence, token in zip(
            sequences, MODEL.forward(chunks, pool).argmax(-1).tolist(), strict=True
        ):
            sequence.append(token)
        chunks = [
            SequenceChunk([sequence[-1]], len(sequence) - 1, pages)
            for sequence, pages in zip(sequences, tables, strict=True)
        ]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        chosen = dense_logits(CONFIG, WEIGHTS, sequence).argmax(-1).tolist()
        assert sequence[len(prompt) :] == chosen[len(prompt) - 1 : -1]


def test_sequences_with_a_common_prefix_share_its_pages() -> None:
    rng = random.Random(3)
    prefix = make_tokens(rng, 2 * PAGE_SIZE)
    tails = [make_tokens(rng, 20), make_tokens(rng, 9)]
    shared, *own = page_tables(rng, [len(prefix), 20, 9])
    pool = make_pool()
    prefill(prefix, shared, pool)
    logits = MODEL.forward(
        [
            SequenceChunk(tail, len(prefix), np.concatenate([shared, pages]))
            for tail, pages in zip(tails, own, strict=True)
        ],
        pool,
    )
    for row, tail in zip(logits, tails, strict=True):
        verify_equal(row, dense_logits(CONFIG, WEIGHTS, prefix + tail)[-1])


def test_a_tensor_of_tokens_is_as_good_as_a_list() -> None:
    pages = np.array([5], dtype=np.int64)
    from_list = prefill([1, 2, 3], pages, make_pool())
    chunk = SequenceChunk(torch.tensor([1, 2, 3]), 0, pages)
    assert torch.equal(MODEL.forward([chunk], make_pool())[0], from_list)


class LoadingPool:
    """A pool whose cached slots of a layer arrive only when that layer is waited for."""

    def __init__(self, pool: DeviceKVPool, filled: DeviceKVPool, cached: IntArray) -> None:
        self.geometry = pool.geometry
        self.calls: list[tuple[str, int]] = []
        self._pool = pool
        self._filled = filled
        self._cached = cached

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        self.calls.append(("get", layer))
        self._pool.key_pages(layer)[self._cached] = self._filled.key_pages(layer)[self._cached]
        return self._pool.get_key_buffer(layer)

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        self.calls.append(("get", layer))
        self._pool.value_pages(layer)[self._cached] = self._filled.value_pages(layer)[self._cached]
        return self._pool.get_value_buffer(layer)

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.calls.append(("set", layer))
        self._pool.set_kv_buffer(layer, slots, k, v)


def test_layer_i_stores_first_and_waits_for_the_load_of_layer_i_only() -> None:
    rng = random.Random(11)
    tokens = make_tokens(rng, 50)
    (pages,) = page_tables(rng, [50])
    cached = 2 * PAGE_SIZE
    filled = make_pool()
    prefill(tokens[:cached], pages, filled)

    pool = LoadingPool(make_pool(), filled, pages[:2])
    logits = MODEL.forward([SequenceChunk(tokens[cached:], cached, pages)], pool)

    verify_equal(logits[0], dense_logits(CONFIG, WEIGHTS, tokens)[-1])
    assert pool.calls == [
        call
        for layer in range(CONFIG.num_layers)
        for call in (("set", layer), ("get", layer), ("get", layer))
    ]


def test_tied_embeddings_project_with_the_embedding() -> None:
    config = dataclasses.replace(CONFIG, tied_embeddings=True)
    weights = random_weights(config, seed=2)
    assert weights.lm_head is weights.embedding
    converted = weights.to(dtype=torch.bfloat16, device=torch.device("cpu"))
    assert converted.lm_head is converted.embedding
    chunk = SequenceChunk([7, 8, 9], 0, np.array([0], dtype=np.int64))
    logits = LlamaModel(config, weights).forward([chunk], make_pool(config))
    verify_equal(logits[0], dense_logits(config, weights, [7, 8, 9])[-1])


def test_a_bfloat16_model_gives_float32_logits_close_to_the_dense_ones() -> None:
    rng = random.Random(5)
    tokens = make_tokens(rng, 40)
    chunk = SequenceChunk(tokens, 0, np.arange(3, dtype=np.int64))
    # One layer: with more, attention this peaked magnifies bfloat16's rounding.
    config = dataclasses.replace(CONFIG, num_layers=1)
    weights = dataclasses.replace(WEIGHTS, layers=WEIGHTS.layers[:1])
    model = LlamaModel(config, weights, dtype=torch.bfloat16)
    logits = model.forward([chunk], make_pool(config, "bfloat16"))[0]
    assert logits.dtype == torch.float32
    expected = dense_logits(config, weights, tokens)[-1]
    assert torch.nn.functional.cosine_similarity(logits.double(), expected, dim=0) > 0.999


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one chunk"),
        ([SequenceChunk([], 0, np.arange(1))], "at least one token"),
        ([SequenceChunk([1], -1, np.arange(1))], "not negative"),
        ([SequenceChunk([1] * 17, 0, np.arange(1))], "do not cover 17"),
        ([SequenceChunk([1], 32, np.arange(2))], "do not cover 33"),
        ([SequenceChunk([1], CONFIG.max_positions, np.arange(1000))], "end the sequence"),
    ],
)
def test_a_chunk_that_cannot_be_computed_is_refused_before_anything_is_stored(
    chunks: list[SequenceChunk], message: str
) -> None:
    good = SequenceChunk([1, 2], 0, np.arange(1))
    pool = make_pool()
    with pytest.raises(ConfigError, match=message):
        MODEL.forward([good, *chunks] if chunks else [], pool)
    assert pool.key_pages(0).isnan().all()


def test_weights_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="3 layers for a model of 4"):
        LlamaModel(CONFIG, dataclasses.replace(WEIGHTS, layers=WEIGHTS.layers[:3]))
    config = dataclasses.replace(CONFIG, ffn_size=128)
    with pytest.raises(ConfigError, match="gate_up has shape"):
        LlamaModel(config, WEIGHTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"rms_eps": -1e-5}, "rms_eps"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "even"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change)
