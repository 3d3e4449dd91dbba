"""A model that is spread over ranks computes what it computes in one piece."""

from __future__ import annotations

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from decoder_laws import make_pool, make_tokens, page_tables, verify_equal
from test_llama import dense_logits as dense_llama
from test_mla import dense_logits as dense_mla

from hicache.engine.llama import LlamaModel
from hicache.engine.mla import MlaModel
from hicache.engine.model import SequenceChunk
from hicache.engine.model_config import LlamaConfig, MlaConfig, tiny_config, tiny_mla_config
from hicache.engine.model_shards import check_split, llama_shard, mla_shard, place_ranks
from hicache.engine.weights import random_mla_weights, random_weights
from hicache.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decoder_laws import AnyPool

    from hicache.config import RankPlacement

GUARD_SECONDS = 30.0
LLAMA = tiny_config()
# Six query heads on three KV heads, which two ranks cannot share evenly; so are 7 layers on 2.
UNEVEN = dataclasses.replace(LLAMA, num_heads=6, num_kv_heads=3, num_layers=5, ffn_size=161)
MLA = dataclasses.replace(tiny_mla_config(), num_heads=5)


class Exchange:
    """Where the threads of a spread model meet, in place of processes."""

    def __init__(self, tp_size: int, pp_size: int) -> None:
        self.stages = [threading.Barrier(tp_size) for _ in range(pp_size)]
        self.everybody = threading.Barrier(tp_size * pp_size)
        self.board: dict[Any, Any] = {}
        self.sent = {
            (stage, tp): threading.Semaphore(0) for stage in range(pp_size) for tp in range(tp_size)
        }


class ThreadPeers:
    """A rank of an exchange."""

    def __init__(self, placement: RankPlacement, exchange: Exchange) -> None:
        self._place = placement
        self._exchange = exchange
        self.size = placement.tp_size * placement.pp_size
        self.in_first_stage = placement.pp_rank == 0
        self.in_last_stage = placement.pp_rank == placement.pp_size - 1
        self.num_sums = 0

    def _all_of(self, barrier: threading.Barrier, kind: str, mine: Any) -> list[Any]:
        board, stage = self._exchange.board, self._place.pp_rank
        board[kind, stage, self._place.tp_rank] = mine
        barrier.wait(GUARD_SECONDS)
        found = [value for key, value in sorted(board.items()) if key[0] == kind]
        if kind == "sum":
            found = [board[kind, stage, tp] for tp in range(self._place.tp_size)]
        barrier.wait(GUARD_SECONDS)
        return found

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        parts = self._all_of(self._exchange.stages[self._place.pp_rank], "sum", partial)
        return torch.stack([part.float() for part in parts]).sum(0).to(partial.dtype)

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        before = (self._place.pp_rank - 1, self._place.tp_rank)
        assert self._exchange.sent[before].acquire(timeout=GUARD_SECONDS)
        hidden: torch.Tensor = self._exchange.board[("hidden", *before)]
        assert hidden.shape == into.shape
        assert hidden.dtype == into.dtype
        return hidden.clone()

    def send(self, hidden: torch.Tensor) -> None:
        here = (self._place.pp_rank, self._place.tp_rank)
        self._exchange.board[("hidden", *here)] = hidden
        self._exchange.sent[here].release()

    def share(self, logits: torch.Tensor, *, good: bool) -> torch.Tensor | None:
        place = self._place
        mine = (good, logits, (place.pp_rank, place.tp_rank) == (place.pp_size - 1, 0))
        all_of = self._all_of(self._exchange.everybody, "share", mine)
        (source,) = [logits for _, logits, is_source in all_of if is_source]
        return source if all(good for good, _, _ in all_of) else None


class Spread:
    """A tiny model over threads, each with a pool of its own."""

    def __init__(
        self, config: LlamaConfig | MlaConfig, tp_size: int, pp_size: int, dtype: str = "float32"
    ) -> None:
        exchange = Exchange(tp_size, pp_size)
        self.placements = place_ranks(tp_size=tp_size, pp_size=pp_size)
        self.models: list[LlamaModel | MlaModel] = []
        self.pools: list[AnyPool] = []
        self.peers = [ThreadPeers(place, exchange) for place in self.placements]
        self.weights: Any
        for place, peers in zip(self.placements, self.peers, strict=True):
            torch_dtype = getattr(torch, dtype)
            if isinstance(config, LlamaConfig):
                self.weights = random_weights(config, seed=1)
                shape, weights = llama_shard(config, self.weights, place)
                self.models.append(LlamaModel(shape, weights, dtype=torch_dtype, peers=peers))
            else:
                self.weights = random_mla_weights(config, seed=1)
                latent, parts = mla_shard(config, self.weights, place)
                self.models.append(MlaModel(latent, parts, dtype=torch_dtype, peers=peers))
            self.pools.append(make_pool(self.models[-1].config, dtype))

    def forward(self, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
        """Return the logits, which all ranks have alike."""
        with ThreadPoolExecutor(len(self.models)) as threads:
            jobs = [
                threads.submit(model.forward, chunks, pool)
                for model, pool in zip(self.models, self.pools, strict=True)
            ]
        first, *others = [job.result() for job in jobs]
        assert all(torch.equal(first, other) for other in others)
        return first


WAYS = [
    pytest.param(config, tp, pp, id=f"{config.name}-{config.num_heads}-tp{tp}-pp{pp}")
    for config, tps in ((LLAMA, (1, 2, 4)), (UNEVEN, (2, 3)), (MLA, (2, 3)))
    for tp in tps
    for pp in (1, 2)
]


@pytest.mark.parametrize(("config", "tp_size", "pp_size"), WAYS)
def test_a_spread_model_gives_the_dense_logits(
    config: LlamaConfig | MlaConfig, tp_size: int, pp_size: int
) -> None:
    """Prompts in chunks, then decoding, in one batch."""
    spread, rng = Spread(config, tp_size, pp_size), random.Random(tp_size)
    prompts = [make_tokens(rng, 50), make_tokens(rng, 20)]
    tables = page_tables(rng, [60, 30])
    spread.forward([SequenceChunk(prompts[0][:30], 0, tables[0])])
    logits = spread.forward(
        [SequenceChunk(prompts[0][30:], 30, tables[0]), SequenceChunk(prompts[1], 0, tables[1])]
    )
    logits = torch.cat([logits, spread.forward([SequenceChunk([5], 50, tables[0])])])
    sequences = [*prompts, [*prompts[0], 5]]
    for row, tokens in zip(logits, sequences, strict=True):
        if isinstance(config, LlamaConfig):
            expected = dense_llama(config, spread.weights, tokens)
        else:
            expected = dense_mla(config, spread.weights, tokens)
        verify_equal(row, expected[-1])


@pytest.mark.parametrize(("config", "tp_size", "pp_size"), WAYS)
def test_the_parts_of_all_ranks_are_the_whole_model(
    config: LlamaConfig | MlaConfig, tp_size: int, pp_size: int
) -> None:
    spread = Spread(config, tp_size, pp_size)
    parts = [model.config for model in spread.models]
    stages = parts[::tp_size]
    assert sum(part.num_layers for part in stages) == config.num_layers
    for part, place in zip(parts, spread.placements, strict=True):
        before = stages[: place.pp_rank]
        assert part.first_layer == sum(stage.num_layers for stage in before)
        geometry = part.geometry(dtype="float32", page_size=16)
        assert geometry.first_layer == part.first_layer
    for name in ("num_heads", "ffn_size"):
        total = sum(getattr(part, name) for part in parts[:tp_size])
        assert total == getattr(config, name)
    if isinstance(config, LlamaConfig):
        ranges = [part.kv_heads for part in parts[:tp_size] if isinstance(part, LlamaConfig)]
        held = [head for one in ranges if one is not None for head in range(one.first, one.last)]
        copies = max(1, tp_size // config.num_kv_heads)
        assert held == sorted(list(range(config.num_kv_heads)) * copies)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
def test_a_load_that_fails_on_one_rank_fails_the_pass_on_all(
    tp_size: int, pp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = Spread(LLAMA, tp_size, pp_size)
    (pages,) = page_tables(random.Random(0), [40])
    chunk = SequenceChunk(make_tokens(random.Random(1), 40), 0, pages)
    for pool in spread.pools:
        with monkeypatch.context() as patch:

            def fail(layer: int) -> torch.Tensor:
                raise TransferError("the link is down")

            patch.setattr(pool, "get_key_buffer", fail)
            with ThreadPoolExecutor(len(spread.models)) as threads:
                jobs = [
                    threads.submit(model.forward, [chunk], pool)
                    for model, pool in zip(spread.models, spread.pools, strict=True)
                ]
            for job in jobs:
                with pytest.raises(TransferError, match="one of the ranks"):
                    job.result()
    # The next pass is as if nothing had been.
    expected = dense_llama(LLAMA, spread.weights, list(chunk.token_ids))
    verify_equal(spread.forward([chunk])[0], expected[-1])


def test_two_sums_a_layer_are_all_that_a_stage_exchanges() -> None:
    spread = Spread(LLAMA, 2, 2)
    (pages,) = page_tables(random.Random(0), [20])
    spread.forward([SequenceChunk(make_tokens(random.Random(1), 20), 0, pages)])
    assert [peers.num_sums for peers in spread.peers] == [4, 4, 4, 4]


def test_sums_of_a_16_bit_model_are_added_as_float32() -> None:
    spread = Spread(dataclasses.replace(LLAMA, num_layers=1), 2, 1, dtype="bfloat16")
    tokens = make_tokens(random.Random(5), 40)
    (pages,) = page_tables(random.Random(0), [40])
    logits = spread.forward([SequenceChunk(tokens, 0, pages)])[0]
    config = dataclasses.replace(LLAMA, num_layers=1)
    expected = dense_llama(config, spread.weights, tokens)[-1]
    assert torch.nn.functional.cosine_similarity(logits.double(), expected, dim=0) > 0.999


@pytest.mark.parametrize(
    ("config", "tp_size", "pp_size", "message"),
    [
        (LLAMA, 0, 1, "at least 1"),
        (LLAMA, 1, 5, "5 pipeline stages need a layer each, and tiny-llama has 4"),
        (LLAMA, 5, 1, "5 tensor-parallel ranks need a query head each"),
        (LLAMA, 3, 1, "cannot share 4 query heads on 2 KV heads evenly"),
        (UNEVEN, 4, 1, "use 3 ranks or fewer"),
        (MLA, 6, 1, "need a query head each, and tiny-mla has 5"),
    ],
)
def test_a_model_that_cannot_be_split_so_is_refused_with_the_reason(
    config: LlamaConfig, tp_size: int, pp_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(config, tp_size=tp_size, pp_size=pp_size)
