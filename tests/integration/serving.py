"""A small serving workload over tiny models, with the cache and without, for integration tests."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import torch

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.mla import MlaModel
from hicache.engine.model_config import tiny_config, tiny_mla_config
from hicache.engine.request import Request
from hicache.engine.weights import random_mla_weights, random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry, MlaGeometry, PageGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool, PageAllocator
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage import StorageBackendFactory

ANSWER_TOKENS = 32
DEVICE_TOKENS = 768
MODEL = LlamaModel(tiny_config(), random_weights(tiny_config(), 0))


@dataclasses.dataclass(frozen=True)
class Variant:
    """One combination of options under test."""

    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    layout: str = "page_first_direct"
    page_size: int = 16
    chunk_tokens: int = 96
    attention: str = "mha"
    dtype: str = "float32"
    num_aborts: int = 3
    write_by_layer: bool = True

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


def make_model(variant: Variant) -> LlamaModel | MlaModel:
    """Return the tiny model with the attention and element type of `variant`."""
    dtype = getattr(torch, variant.dtype)
    if variant.attention == "mha":
        return LlamaModel(tiny_config(), random_weights(tiny_config(), 0), dtype=dtype)
    return MlaModel(tiny_mla_config(), random_mla_weights(tiny_mla_config(), 0), dtype=dtype)


def make_pool(geometry: PageGeometry, num_pages: int) -> DeviceKVPool | DeviceMlaPool:
    """Return a device pool for the KV of either model."""
    cpu = torch.device("cpu")
    if isinstance(geometry, KVGeometry):
        return DeviceKVPool(geometry, num_pages=num_pages, torch_device=cpu)
    assert isinstance(geometry, MlaGeometry)
    return DeviceMlaPool(geometry, num_pages=num_pages, torch_device=cpu)


def make_engine(
    variant: Variant, storage: Path | None, *, factory: StorageBackendFactory | None = None
) -> Engine:
    """Return an engine with L1 below the working set; without a cache when `storage` is None."""
    model = make_model(variant)
    num_pages = DEVICE_TOKENS // variant.page_size
    device = create_device("cpu")
    geometry = model.config.geometry(dtype=variant.dtype, page_size=variant.page_size)
    pool = make_pool(geometry, num_pages)
    allocator = PageAllocator(num_pages)
    handle = None
    if storage is not None:
        cache_config = HiCacheConfig.from_mapping(
            {
                "page_size": variant.page_size,
                "write_policy": variant.write_policy,
                "write_by_layer": variant.write_by_layer,
                "prefetch_policy": variant.prefetch_policy,
                "host": {"layout": variant.layout, "ratio": 1.5, "huge_pages": False},
                "storage": {
                    "backend": "file",
                    "extra_config": {"path": str(storage)},
                    "model_name": model.config.name,
                    "weights_revision": "seed 0",
                },
                # Which costs more depends on the machine; here all that is stored is wanted.
                "prefetch": {"threshold_tokens": variant.page_size, "cost_estimate": False},
            }
        )
        handle = CacheHandle(
            *create_hiradix_cache(
                cache_config,
                device=device,
                device_pool=pool,
                device_allocator=allocator,
                factory=factory,
            )
        )
    return Engine(
        model,
        pool,
        allocator,
        cache=handle,
        max_batch_requests=2,
        chunk_tokens=variant.chunk_tokens,
    )


class Workload:
    """Conversations that share a prefix, served together with requests that are aborted.

    What the conversations say depends on the seed and the answers alone, not on the aborts.
    """

    def __init__(self, seed: int, *, num_users: int = 6) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        system = self._tokens(70)
        self._history = [system + self._tokens(90) for _ in range(num_users)]
        self._turn = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(256) for _ in range(count)]

    def serve_turn(
        self, engine: Engine, *, num_aborts: int = 0, alone: bool = False
    ) -> list[Request]:
        """Serve one more turn of every conversation and return the requests, ended.

        Args:
            engine: serves them.
            num_aborts: further requests, aborted at any moment; some end before that.
            alone: whether requests come one by one, the aborted ones last, and the engine begins
                each when all that it prefetches has come; else all come at once in any order.
        """
        self._turn += 1
        requests = []
        for user, history in enumerate(self._history):
            history += self._tokens(12)
            requests.append(Request(f"{user}/{self._turn}", history, max_new_tokens=ANSWER_TOKENS))
        storm = random.Random(f"{self._seed}/{self._turn}")
        doomed = [self._doomed(storm, n) for n in range(num_aborts)]
        queue = requests + doomed
        if not alone:
            storm.shuffle(queue)
        for arrivals in [[request] for request in queue] if alone else [queue]:
            for request in arrivals:
                engine.submit(request)
            assert not alone or engine.settle()
            while engine.waiting or engine.running:
                engine.step()
                if doomed and storm.random() < 0.3:
                    engine.abort(doomed.pop().request_id)
        for history, request in zip(self._history, requests, strict=True):
            history += request.output_ids
        return requests

    def _doomed(self, storm: random.Random, number: int) -> Request:
        history = storm.choice(self._history)
        prompt = history[: storm.randrange(1, len(history))]
        prompt += [storm.randrange(256) for _ in range(40)]
        name = f"doomed {number}/{self._turn}"
        return Request(name, prompt, max_new_tokens=ANSWER_TOKENS)


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
