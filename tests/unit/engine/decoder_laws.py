"""What holds for every decoder: its paged forward pass is the dense one of the textbook."""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
import torch

from hicache.engine.model import KVPool, Model, SequenceChunk
from hicache.errors import ConfigError
from hicache.layout import KVGeometry, MlaGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool

if TYPE_CHECKING:
    from hicache.engine.model_config import ModelConfig
    from hicache.types import IntArray

PAGE_SIZE = 16
NUM_PAGES = 64
VOCAB = 512
MAX_POSITIONS = 4096
# Logits have a standard deviation of 8; float32 rounding through four layers stays far below this.
TOLERANCE = 2e-3

AnyPool: TypeAlias = DeviceKVPool | DeviceMlaPool


def make_pool(config: ModelConfig, dtype: str = "float32") -> AnyPool:
    """A pool in which a slot that was never written poisons whatever reads it."""
    geometry = config.geometry(dtype=dtype, page_size=PAGE_SIZE)
    device = torch.device("cpu")
    pool: AnyPool
    if isinstance(geometry, KVGeometry):
        pool = DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=device)
    else:
        assert isinstance(geometry, MlaGeometry)
        pool = DeviceMlaPool(geometry, num_pages=NUM_PAGES, torch_device=device)
    for layer in range(config.num_layers):
        for part in pool.layer_parts(layer):
            part.fill_(float("nan"))
    return pool


def make_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def page_tables(rng: random.Random, lengths: list[int]) -> list[IntArray]:
    """Disjoint scattered page tables for sequences of these lengths."""
    pages = rng.sample(range(NUM_PAGES), NUM_PAGES)
    tables = []
    for length in lengths:
        count = -(-length // PAGE_SIZE)
        tables.append(np.array(pages[:count], dtype=np.int64))
        pages = pages[count:]
    return tables


def verify_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.double(), atol=TOLERANCE, rtol=0)


def dense_rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of `[num_tokens, dim]` by the textbook, one pair at a time."""
    length, dim = x.shape
    turned = torch.empty_like(x)
    for pair in range(dim // 2):
        angle = torch.arange(length).double() * theta ** (-2 * pair / dim)
        even, odd = x[:, 2 * pair], x[:, 2 * pair + 1]
        turned[:, 2 * pair] = even * angle.cos() - odd * angle.sin()
        turned[:, 2 * pair + 1] = even * angle.sin() + odd * angle.cos()
    return turned


def dense_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm by the textbook."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def dense_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One causal head over `[num_tokens, dim]` by the textbook."""
    future = torch.ones(len(query), len(query)).triu(1).bool()
    scores = query @ key.T / math.sqrt(query.shape[1])
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ value


class LoadingPool:
    """A pool whose cached slots of a layer arrive only when that layer is waited for."""

    def __init__(self, pool: AnyPool, filled: AnyPool, cached: IntArray) -> None:
        self.geometry = pool.geometry
        self.calls: list[tuple[str, int]] = []
        self._pool = pool
        self._filled = filled
        self._cached = cached

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        self._arrive(layer)
        return self._pool.get_key_buffer(layer)

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        self._arrive(layer)
        return self._pool.get_value_buffer(layer)

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor, /
    ) -> None:
        self.calls.append(("set", layer))
        self._pool.set_kv_buffer(layer, slots, first, second)

    def end_layer(self, layer: int) -> None:
        self.calls.append(("end", layer))

    def _arrive(self, layer: int) -> None:
        if self.calls[-1] != ("get", layer):
            self.calls.append(("get", layer))
        both = zip(self._pool.layer_parts(layer), self._filled.layer_parts(layer), strict=True)
        for part, filled in both:
            part[self._cached] = filled[self._cached]


class DecoderLaws(ABC):
    """Laws of `model`, which computes with the weights that `dense_logits` knows."""

    model: Model

    @abstractmethod
    def dense_logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits `[len(tokens), vocab]` by the textbook, one head at a time, in float64."""

    def make_pool(self) -> AnyPool:
        return make_pool(self.model.config)

    def prefill(self, tokens: list[int], pages: IntArray, pool: KVPool) -> torch.Tensor:
        return self.model.forward([SequenceChunk(tokens, 0, pages)], pool)[0]

    # 100 tokens are more than the few rows for which matmuls are cut into slabs.
    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
    def test_a_prefill_gives_the_dense_logits_of_its_last_token(self, length: int) -> None:
        rng = random.Random(length)
        tokens = make_tokens(rng, length)
        (pages,) = page_tables(rng, [length])
        found = self.prefill(tokens, pages, self.make_pool())
        verify_equal(found, self.dense_logits(tokens)[-1])

    @pytest.mark.parametrize("seed", range(5))
    def test_a_prompt_may_be_cut_into_any_chunks(self, seed: int) -> None:
        rng = random.Random(seed)
        tokens = make_tokens(rng, 150)
        (pages,) = page_tables(rng, [150])
        cuts = [0, *sorted(rng.sample(range(1, 150), rng.randint(1, 6))), 150]
        expected = self.dense_logits(tokens)
        pool = self.make_pool()
        for start, end in itertools.pairwise(cuts):
            logits = self.model.forward([SequenceChunk(tokens[start:end], start, pages)], pool)
            verify_equal(logits[0], expected[end - 1])

    @pytest.mark.parametrize("seed", range(3))
    def test_sequences_of_a_batch_do_not_change_each_other(self, seed: int) -> None:
        rng = random.Random(seed)
        cached = [0, 70, 33, 0, 16]
        new = [40, 1, 20, 1, 1]
        prompts = [make_tokens(rng, sum(lengths)) for lengths in zip(cached, new, strict=True)]
        tables = page_tables(rng, [len(prompt) for prompt in prompts])
        pool = self.make_pool()
        for prompt, before, pages in zip(prompts, cached, tables, strict=True):
            if before:
                self.prefill(prompt[:before], pages, pool)
        chunks = [
            SequenceChunk(prompt[before:], before, pages)
            for prompt, before, pages in zip(prompts, cached, tables, strict=True)
        ]
        logits = self.model.forward(chunks, pool)
        assert logits.shape == (len(chunks), VOCAB)
        for row, prompt in zip(logits, prompts, strict=True):
            verify_equal(row, self.dense_logits(prompt)[-1])

    def test_greedy_decoding_chooses_the_tokens_of_the_dense_model(self) -> None:
        rng = random.Random(7)
        prompts = [make_tokens(rng, 30), make_tokens(rng, 12)]
        tables = page_tables(rng, [60, 60])
        pool = self.make_pool()
        chunks = [
            SequenceChunk(prompt, 0, pages) for prompt, pages in zip(prompts, tables, strict=True)
        ]
        sequences = [list(prompt) for prompt in prompts]
        for _ in range(20):
            chosen = self.model.forward(chunks, pool).argmax(-1).tolist()
            for sequence, token in zip(sequences, chosen, strict=True):
                sequence.append(token)
            chunks = [
                SequenceChunk([sequence[-1]], len(sequence) - 1, pages)
                for sequence, pages in zip(sequences, tables, strict=True)
            ]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            chosen = self.dense_logits(sequence).argmax(-1).tolist()
            assert sequence[len(prompt) :] == chosen[len(prompt) - 1 : -1]

    def test_sequences_with_a_common_prefix_share_its_pages(self) -> None:
        rng = random.Random(3)
        prefix = make_tokens(rng, 2 * PAGE_SIZE)
        tails = [make_tokens(rng, 20), make_tokens(rng, 9)]
        shared, *own = page_tables(rng, [len(prefix), 20, 9])
        pool = self.make_pool()
        self.prefill(prefix, shared, pool)
        chunks = [
            SequenceChunk(tail, len(prefix), np.concatenate([shared, pages]))
            for tail, pages in zip(tails, own, strict=True)
        ]
        for row, tail in zip(self.model.forward(chunks, pool), tails, strict=True):
            verify_equal(row, self.dense_logits(prefix + tail)[-1])

    def test_a_tensor_of_tokens_is_as_good_as_a_list(self) -> None:
        pages = np.array([5], dtype=np.int64)
        from_list = self.prefill([1, 2, 3], pages, self.make_pool())
        chunk = SequenceChunk(torch.tensor([1, 2, 3]), 0, pages)
        assert torch.equal(self.model.forward([chunk], self.make_pool())[0], from_list)

    def test_layer_i_stores_then_waits_for_the_load_of_layer_i_only_then_ends(self) -> None:
        rng = random.Random(11)
        tokens = make_tokens(rng, 50)
        (pages,) = page_tables(rng, [50])
        cached = 2 * PAGE_SIZE
        filled = self.make_pool()
        self.prefill(tokens[:cached], pages, filled)

        pool = LoadingPool(self.make_pool(), filled, pages[:2])
        logits = self.model.forward([SequenceChunk(tokens[cached:], cached, pages)], pool)

        verify_equal(logits[0], self.dense_logits(tokens)[-1])
        layers = range(self.model.config.num_layers)
        assert pool.calls == [(call, layer) for layer in layers for call in ("set", "get", "end")]

    @pytest.mark.parametrize(
        ("chunks", "message"),
        [
            ([], "at least one chunk"),
            ([SequenceChunk([], 0, np.arange(1))], "at least one token"),
            ([SequenceChunk([1], -1, np.arange(1))], "not negative"),
            ([SequenceChunk([1] * 17, 0, np.arange(1))], "do not cover 17"),
            ([SequenceChunk([1], 32, np.arange(2))], "do not cover 33"),
            ([SequenceChunk([1], MAX_POSITIONS, np.arange(1000))], "end the sequence"),
        ],
    )
    def test_a_chunk_that_cannot_be_computed_is_refused_before_anything_is_stored(
        self, chunks: list[SequenceChunk], message: str
    ) -> None:
        good = SequenceChunk([1, 2], 0, np.arange(1))
        pool = self.make_pool()
        with pytest.raises(ConfigError, match=message):
            self.model.forward([good, *chunks] if chunks else [], pool)
        assert all(part.isnan().all() for part in pool.layer_parts(0))
