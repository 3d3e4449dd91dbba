"""Guesses of a draft model change how many passes an answer takes, never the answer."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import pytest
import torch
from decoder_laws import make_pool, make_tokens

from hicache.engine.engine import Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.mla import MlaModel
from hicache.engine.model import SequenceChunk
from hicache.engine.model_config import tiny_config, tiny_mla_config
from hicache.engine.passes import Draft
from hicache.engine.request import FinishReason, Request
from hicache.engine.weights import random_mla_weights, random_weights
from hicache.errors import ConfigError
from hicache.pools import PageAllocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decoder_laws import AnyPool

    from hicache.engine.model import KVPool, Model

NUM_PAGES = 64
TARGET = LlamaModel(tiny_config(), random_weights(tiny_config(), 0))
LATENT = MlaModel(tiny_mla_config(), random_mla_weights(tiny_mla_config(), 0))
SMALL_CONFIG = dataclasses.replace(tiny_config(), name="tiny-draft", num_layers=1, num_kv_heads=1)
SMALL = LlamaModel(SMALL_CONFIG, random_weights(SMALL_CONFIG, 7))


class Counting:
    """A model that notes its passes: how many tokens of each chunk, and their logits' number."""

    def __init__(self, model: Model) -> None:
        self.config = model.config
        self.passes: list[list[tuple[int, int]]] = []
        self._model = model

    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        self.passes.append([(len(chunk.token_ids), chunk.num_logits) for chunk in chunks])
        return self._model.forward(chunks, pool)


class HalfRight:
    """A draft model that is right about every second position; knows the target."""

    def __init__(self, target: Model) -> None:
        self.config = target.config
        self._target = target

    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        logits = self._target.forward(chunks, pool).clone()
        for row, chunk in zip(logits, chunks, strict=True):
            if (chunk.start + len(chunk.token_ids)) % 2:
                row[row.argmax()] = -1e9
        return logits


def make_engine(
    model: Model, draft: Model | None = None, num_tokens: int = 4, num_pages: int = NUM_PAGES
) -> tuple[Engine, AnyPool | None]:
    pool = make_pool(model.config)
    side = None if draft is None else make_pool(draft.config)
    guesses = None
    if draft is not None and side is not None:
        guesses = Draft(model=draft, pool=side, num_tokens=num_tokens)
    allocator = PageAllocator(num_pages)
    return Engine(model, pool, allocator, cache=None, chunk_tokens=40, draft=guesses), side


def answer(engine: Engine, prompts: Sequence[list[int]], **options: int) -> list[Request]:
    new_tokens = options.get("max_new_tokens", 24)
    requests = [Request(str(n), p, max_new_tokens=new_tokens) for n, p in enumerate(prompts)]
    engine.run(*requests)
    return requests


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [make_tokens(rng, rng.randrange(1, 100)) for _ in range(3)]


DRAFTS: dict[str, tuple[Model, Model]] = {
    "of other weights": (TARGET, SMALL),
    "half right": (TARGET, HalfRight(TARGET)),
    "the model itself": (TARGET, TARGET),
    "of other attention": (LATENT, SMALL),
}


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("kind", DRAFTS)
def test_answers_are_those_without_a_draft(kind: str, num_tokens: int) -> None:
    model, draft = DRAFTS[kind]
    plain, _ = make_engine(model)
    guessing, _ = make_engine(model, draft, num_tokens)
    prompts = prompts_of(num_tokens)
    expected, found = answer(plain, prompts), answer(guessing, prompts)
    assert [one.output_ids for one in found] == [one.output_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.finish_reason is other.finish_reason
        both = zip(one.choices, other.choices, strict=True)
        assert all(mine.logits == pytest.approx(theirs.logits, abs=2e-3) for mine, theirs in both)


def test_a_draft_that_is_always_right_needs_a_pass_for_all_its_guesses_and_one_token() -> None:
    model = Counting(TARGET)
    engine, _ = make_engine(model, TARGET, num_tokens=4)
    (request,) = answer(engine, [make_tokens(random.Random(1), 30)], max_new_tokens=21)
    assert len(request.output_ids) == 21
    # The prompt gives the first token, each further pass five.
    assert model.passes == [[(30, 1)], *[[(5, 5)]] * 4]


def test_a_draft_that_is_always_wrong_costs_no_pass_more() -> None:
    model = Counting(TARGET)
    engine, _ = make_engine(model, SMALL, num_tokens=4)
    (request,) = answer(engine, [make_tokens(random.Random(1), 30)], max_new_tokens=21)
    plain, _ = make_engine(TARGET)
    (expected,) = answer(plain, [request.prompt_ids], max_new_tokens=21)
    assert request.output_ids == expected.output_ids
    assert len(model.passes) <= 21


def test_no_guess_goes_beyond_the_end_of_an_answer() -> None:
    """Its pages would not be those that the request may have."""
    model = Counting(TARGET)
    engine, _ = make_engine(model, TARGET, num_tokens=8, num_pages=3)
    (request,) = answer(engine, [make_tokens(random.Random(1), 40)], max_new_tokens=8)
    assert request.finish_reason is FinishReason.LENGTH
    # Seven are left after the first: six guesses and the one that follows them.
    assert model.passes == [[(40, 1)], [(7, 7)]]


@pytest.mark.parametrize("position", range(6))
def test_an_answer_that_is_stopped_within_the_guesses_ends_there(position: int) -> None:
    prompt = make_tokens(random.Random(2), 30)
    plain, _ = make_engine(TARGET)
    (whole,) = answer(plain, [prompt])
    stop = whole.output_ids[position]
    engine, _ = make_engine(TARGET, TARGET, num_tokens=4)
    request = Request("stopped", prompt, max_new_tokens=24, stop_ids=[stop])
    engine.run(request)
    assert request.output_ids == whole.output_ids[: whole.output_ids.index(stop) + 1]
    assert request.finish_reason is FinishReason.STOP
    assert len(request.choices) == len(request.output_ids)


@pytest.mark.parametrize("kind", ["of other weights", "half right", "the model itself"])
def test_the_draft_has_the_kv_of_every_token_whose_kv_the_model_has(kind: str) -> None:
    """A page that the tree takes is whole in both pools; a slot never written is not a number."""
    model, draft = DRAFTS[kind]
    engine, side = make_engine(model, draft, num_tokens=3)
    assert side is not None
    request = Request("only", make_tokens(random.Random(3), 50), max_new_tokens=40)
    engine.submit(request)
    while engine.step() and engine.running:
        slots = [int(page) * 16 + offset for page in request.pages for offset in range(16)][
            : request.num_computed
        ]
        for part in side.layer_parts(0):
            assert not part.flatten(0, 1)[slots].isnan().any()


@pytest.mark.parametrize(
    ("changes", "num_tokens", "message"),
    [
        ({}, 0, "at least 1 token, not 0"),
        ({"vocab_size": 400}, 2, "cannot guess for tiny-llama"),
        ({"max_positions": 100}, 2, "no fewer positions"),
    ],
)
def test_a_draft_that_cannot_guess_for_the_model_is_refused(
    changes: dict[str, int], num_tokens: int, message: str
) -> None:
    config = dataclasses.replace(SMALL_CONFIG, **changes)  # type: ignore[arg-type]
    draft = LlamaModel(config, random_weights(config, 0))
    with pytest.raises(ConfigError, match=message):
        make_engine(TARGET, draft, num_tokens)


def test_logits_of_more_tokens_than_a_chunk_has_are_refused() -> None:
    pages = torch.arange(2).numpy()
    for num_logits in (0, 4):
        with pytest.raises(ConfigError, match=f"logits of {num_logits} tokens of a chunk of 3"):
            TARGET.forward(
                [SequenceChunk([1, 2, 3], 0, pages, num_logits)], make_pool(TARGET.config)
            )


def test_logits_of_the_last_tokens_are_those_of_shorter_chunks() -> None:
    tokens, pages = make_tokens(random.Random(4), 20), torch.arange(2).numpy()
    found = TARGET.forward([SequenceChunk(tokens, 0, pages, 3)], make_pool(TARGET.config))
    for row, length in zip(found, (18, 19, 20), strict=True):
        (expected,) = TARGET.forward(
            [SequenceChunk(tokens[:length], 0, pages)], make_pool(TARGET.config)
        )
        torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)
