"""A small serving workload over a tiny model, with the cache and without, for integration tests."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import torch

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.model_config import tiny_config
from hicache.engine.request import Request
from hicache.engine.weights import random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_TOKENS = 32
DEVICE_TOKENS = 768
MODEL = LlamaModel(tiny_config(), random_weights(tiny_config(), 0))


@dataclasses.dataclass(frozen=True)
class Variant:
    """One combination of options under test."""

    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    layout: str = "page_first"
    page_size: int = 16
    chunk_tokens: int = 96

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


def make_engine(variant: Variant, storage: Path | None) -> Engine:
    """Return an engine with L1 below the working set; without a cache when `storage` is None."""
    config = MODEL.config
    geometry = KVGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        page_size=variant.page_size,
    )
    num_pages = DEVICE_TOKENS // variant.page_size
    device = create_device("cpu")
    pool = DeviceKVPool(geometry, num_pages=num_pages, torch_device=device.torch_device)
    allocator = PageAllocator(num_pages)
    handle = None
    if storage is not None:
        cache_config = HiCacheConfig.from_mapping(
            {
                "page_size": variant.page_size,
                "write_policy": variant.write_policy,
                "prefetch_policy": variant.prefetch_policy,
                "host": {"layout": variant.layout, "ratio": 1.5, "huge_pages": False},
                "storage": {
                    "backend": "file",
                    "extra_config": {"path": str(storage)},
                    "model_name": "tiny",
                    "weights_revision": "seed 0",
                },
                "prefetch": {"threshold_tokens": variant.page_size},
            }
        )
        handle = CacheHandle(
            *create_hiradix_cache(
                cache_config, device=device, device_pool=pool, device_allocator=allocator
            )
        )
    return Engine(
        MODEL,
        pool,
        allocator,
        cache=handle,
        max_batch_requests=2,
        chunk_tokens=variant.chunk_tokens,
    )


class Workload:
    """Conversations that share a prefix, served together with requests that are aborted."""

    def __init__(self, seed: int, *, num_users: int = 6) -> None:
        self._rng = random.Random(seed)
        system = self._tokens(70)
        self._history = [system + self._tokens(90) for _ in range(num_users)]
        self._turn = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(count)]

    def serve_turn(self, engine: Engine, *, num_aborts: int = 0) -> list[Request]:
        """Submit one more turn of every conversation at once and return the requests, ended."""
        self._turn += 1
        requests = []
        for user, history in enumerate(self._history):
            history += self._tokens(12)
            requests.append(Request(f"{user}/{self._turn}", history, max_new_tokens=ANSWER_TOKENS))
        doomed = [
            Request(f"doomed {n}/{self._turn}", self._doomed_prompt(), max_new_tokens=ANSWER_TOKENS)
            for n in range(num_aborts)
        ]
        queue = requests + doomed
        self._rng.shuffle(queue)
        for request in queue:
            engine.submit(request)
        while engine.waiting or engine.running:
            engine.step()
            if doomed and self._rng.random() < 0.3:
                engine.abort(doomed.pop().request_id)
        for history, request in zip(self._history, requests, strict=True):
            history += request.output_ids
        return requests

    def _doomed_prompt(self) -> list[int]:
        history = self._rng.choice(self._history)
        return history[: self._rng.randrange(1, len(history))] + self._tokens(40)


def answers_without_cache(requests: list[Request], plain: Engine) -> list[list[int]]:
    """Return the answer of each request's prompt, computed alone on an engine without a cache."""
    answers = []
    for request in requests:
        alone = Request("alone", request.prompt_ids, max_new_tokens=ANSWER_TOKENS)
        plain.run(alone)
        answers.append(alone.output_ids)
    return answers


def finish(engine: Engine) -> None:
    """Settle, check every invariant, close, and check that nothing of the cache is left."""
    cache = engine.cache
    assert cache is not None
    assert engine.settle(timeout_seconds=30.0)
    assert check_system(cache, request_device_pages=engine.owned_pages()) == []
    assert cache.protected_size == 0
    assert cache.close()
    assert cache.num_in_flight == 0


torch.set_num_threads(1)
