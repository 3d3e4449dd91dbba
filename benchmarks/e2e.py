"""Time to first token of a real model: computed, and with the prompt in L1, L2 and L3.

Each turn is a prompt of at least 1,000 tokens that is cached but for its last 40. It is answered by
an engine without a cache and, from each tier in turn, by one with; alone in the batch, everything
warm. All answers to a prompt must be equal, and each hit must be where it is said to be.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Bar, Result, Step, check, summarise
from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.engine.conversations import code_assistant_conversations
from hicache.engine.demo_phase import compare_answers
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.model_config import tiny_config
from hicache.engine.request import Request
from hicache.engine.tokenizer import BpeTokenizer, ByteTokenizer
from hicache.engine.weights import WeightsUnavailable, load_smollm2, random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.tokenizer import Tokenizer
    from hicache.hiradix_cache import HiRadixCache

__all__ = ["Sizes", "load_model", "steps"]

_PAGE_SIZE = 64
_TAIL_TOKENS = 40
"""Of each prompt, computed every time. With the answer it stays below a page, so that nothing of it
is cached for the next time."""

_ANSWER_TOKENS = 8
_TIERS = ("L3", "L2", "L1")
"""In this order each tier is filled by the run before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        num_turns: different prompts.
        rounds: how often each is answered from everywhere.
        prompt_tokens: tokens of the shortest and of the longest prompt that are cached.
        real_model: SmolLM2, if it can be had; otherwise a tiny model with random weights.
    """

    num_turns: int = 8
    rounds: int = 2
    prompt_tokens: tuple[int, int] = (1_024, 1_472)
    real_model: bool = True


def steps(
    *, quick: bool, peers: frozenset[str] = frozenset(), sizes: Sizes | None = None
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: the tiny model, once.
        peers: there are none.
        sizes: instead of those that `quick` means.
    """
    sizes = sizes or (Sizes(rounds=1, real_model=False) if quick else Sizes())
    return [Step("time to first token", partial(_ttft, sizes))]


def load_model(*, real: bool) -> tuple[LlamaModel, Tokenizer]:
    """Return SmolLM2, or the tiny model: because it is wanted, or for want of a network."""
    if real:
        try:
            loaded = load_smollm2()
        except WeightsUnavailable as error:
            print(f"{error}\ngoing on with a tiny model", file=sys.stderr)
        else:
            return LlamaModel(loaded.config, loaded.weights), BpeTokenizer(loaded.tokenizer)
    return LlamaModel(tiny_config(), random_weights(tiny_config(), 0)), ByteTokenizer()


def _ttft(sizes: Sizes) -> list[Result]:
    model, tokenizer = load_model(real=sizes.real_model)
    prompts = _prompts(tokenizer, sizes)
    times: dict[str, list[float]] = {"computed": [], **{tier: [] for tier in _TIERS}}
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(model, sizes, folder)
        try:
            for prompt in prompts:
                bench.fill(prompt)
            for _ in range(sizes.rounds):
                for turn, prompt in enumerate(prompts):
                    for origin, seconds in bench.measure(turn, prompt).items():
                        times[origin].append(seconds * 1e3)
            bench.check()
        finally:
            bench.close()
    return _results(model.config.name, sizes, prompts, times)


def _results(
    model: str, sizes: Sizes, prompts: Sequence[Sequence[int]], times: dict[str, list[float]]
) -> list[Result]:
    lengths = sorted(map(len, prompts))
    params: dict[str, str | int | float | bool] = {
        "model": model,
        "turns": len(prompts),
        "prompt_tokens": f"{lengths[0]}-{lengths[-1]}",
        "computed_tokens": _TAIL_TOKENS,
    }
    rows = [summarise("ttft", times["computed"], params={**params, "tier": "none"}, unit="ms")]
    for tier in reversed(_TIERS):
        # A tiny model computes faster than anything can be copied.
        bars = (Bar(5.0, "ratio"),) if tier == "L2" and sizes.real_model else ()
        row = summarise("ttft", times[tier], params={**params, "tier": tier}, unit="ms", bars=bars)
        rows.append(row.beside("computed", times["computed"]))
    for tier in ("L2", "L3"):
        shares = [
            100 * (slow - fast) / slow for slow, fast in zip(times[tier], times["L1"], strict=True)
        ]
        rows.append(summarise("loading_share", shares, params={**params, "tier": tier}, unit="%"))
    return rows


def _prompts(tokenizer: Tokenizer, sizes: Sizes) -> list[list[int]]:
    """Return real prompts of growing length, each whole pages and a tail."""
    least, most = sizes.prompt_tokens
    conversations = code_assistant_conversations(
        tokenizer, num_users=sizes.num_turns, num_turns=1, source_tokens=most, seed=0
    )
    prompts = []
    for index, conversation in enumerate(conversations):
        wanted = least + (most - least) * index // max(1, sizes.num_turns - 1)
        tokens = conversation.first_prompt()
        cached = min(wanted, len(tokens) - _TAIL_TOKENS) // _PAGE_SIZE * _PAGE_SIZE
        prompts.append(tokens[: cached + _TAIL_TOKENS])
    return prompts


class _Bench:
    """An engine with a cache over three tiers and one without any."""

    def __init__(self, model: LlamaModel, sizes: Sizes, folder: str) -> None:
        config = model.config
        self._geometry = KVGeometry(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="float32",
            page_size=_PAGE_SIZE,
        )
        longest = sizes.prompt_tokens[1] + _TAIL_TOKENS + _ANSWER_TOKENS
        self._num_pages = -(-longest // _PAGE_SIZE) + 1
        self._plain = self._engine(model, None)
        self._cached = self._engine(
            model,
            HiCacheConfig.from_mapping(
                {
                    "page_size": _PAGE_SIZE,
                    "prefetch_policy": "wait_complete",
                    "host": {"ratio": float(sizes.num_turns)},
                    # What each tier takes is measured, whether computing is sooner or not.
                    "load_cost_estimate": False,
                    "prefetch": {"threshold_tokens": _PAGE_SIZE, "cost_estimate": False},
                    "storage": {
                        "backend": "file",
                        "extra_config": {"path": folder},
                        "model_name": config.name,
                        "weights_revision": config.weights_revision,
                    },
                }
            ),
        )

    def _engine(self, model: LlamaModel, config: HiCacheConfig | None) -> Engine:
        device = create_device("cpu")
        pool = DeviceKVPool(
            self._geometry, num_pages=self._num_pages, torch_device=torch.device("cpu")
        )
        allocator, handle = PageAllocator(self._num_pages), None
        if config is not None:
            handle = CacheHandle(
                *create_hiradix_cache(
                    config, device=device, device_pool=pool, device_allocator=allocator
                )
            )
        return Engine(model, pool, allocator, cache=handle)

    @property
    def _cache(self) -> HiRadixCache:
        assert self._cached.cache is not None
        return self._cached.cache

    def fill(self, prompt: Sequence[int]) -> None:
        """Bring a prompt into every tier."""
        self._run(self._cached, prompt)
        check(self._cached.settle(), "the cache does not come to rest")

    def measure(self, turn: int, prompt: Sequence[int]) -> dict[str, float]:
        """Return the seconds to the first token by origin, of equal answers."""
        plain = self._run(self._plain, prompt)
        seconds = {"computed": plain.first_token_at - plain.submitted_at}
        for tier in _TIERS:
            self._leave_only(tier)
            request = self._run(self._cached, prompt)
            check(self._cached.settle(), "the cache does not come to rest")
            hits = {
                "L1": request.device_hit_tokens,
                "L2": request.host_hit_tokens,
                "L3": request.storage_hit_tokens,
            }
            cached = len(prompt) - _TAIL_TOKENS
            check(hits[tier] == cached, f"{hits} instead of {cached} tokens were found in {tier}")
            difference = compare_answers(turn, 0, request, plain)
            check(
                difference is None or difference.near_tie,
                f"the answer from {tier} differs: {difference}",
            )
            seconds[tier] = request.first_token_at - request.submitted_at
        return seconds

    def _leave_only(self, tier: str) -> None:
        """Empty the tiers above `tier`."""
        cache = self._cache
        if tier in ("L2", "L3"):
            cache.evict(self._num_pages)
        if tier == "L3":
            cache.evict_host(cache.controller.host_allocator.num_pages)

    def _run(self, engine: Engine, prompt: Sequence[int]) -> Request:
        request = Request("only", prompt, max_new_tokens=_ANSWER_TOKENS)
        engine.run(request)
        return request

    def check(self) -> None:
        """Check the cache as a whole."""
        violations = check_system(self._cache)
        check(not violations, f"the cache contradicts itself: {violations[:1]}")

    def close(self) -> None:
        """Stop the cache."""
        check(self._cache.close(), "the cache does not close")
