"""An engine over a tiny model that counts what it computes, and a store that a test can hold."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import torch
from scripted_parts import InjectedFactory, faulty_storage, injected

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.llama import LlamaModel
from hicache.engine.model_config import tiny_config
from hicache.engine.request import Request
from hicache.engine.weights import random_weights
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.storage.memory import MemoryPages
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from hicache.engine.model import KVPool, SequenceChunk
    from hicache.hiradix_cache import HiRadixCache
    from hicache.testing.faulty_storage import Gate, Verb
    from hicache.transfer import TransferPlan

MAX_STEPS = 20_000
CONFIG = dataclasses.replace(tiny_config(), num_layers=2)
MODEL = LlamaModel(CONFIG, random_weights(CONFIG, 0))


def tokens(seed: object, count: int) -> list[int]:
    """Return as many tokens, which are others for another seed."""
    rng = random.Random(repr(seed))
    return [rng.randrange(256) for _ in range(count)]


DOCUMENT = tokens("document", 320)


class CountingModel:
    """A model that counts the tokens it computes."""

    config = CONFIG

    def __init__(self) -> None:
        self.num_tokens = 0

    def forward(self, chunks: Sequence[SequenceChunk], pool: KVPool) -> torch.Tensor:
        self.num_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        return MODEL.forward(chunks, pool)


class SchedulingRig:
    """An engine; leaving it checks that nothing is left behind.

    Args:
        page_size: in tokens.
        device_tokens: size of L1; L2 has twice that.
        max_batch_requests, chunk_tokens, cache_aware: see `Engine`.
        prefetch_policy, load_threshold_tokens: of the cache.
        store: L3; None for two tiers.
        gates: hold the calls to it, and are opened in the end.
        cached: whether there is a cache.
    """

    def __init__(
        self,
        *,
        page_size: int = 16,
        device_tokens: int = 2048,
        max_batch_requests: int = 8,
        chunk_tokens: int = 1000,
        cache_aware: bool = True,
        prefetch_policy: str = "wait_complete",
        load_threshold_tokens: int = 1,
        store: MemoryPages | None = None,
        gates: Mapping[Verb, Gate] | None = None,
        cached: bool = True,
    ) -> None:
        self.model = CountingModel()
        self._gates = gates or {}
        num_pages = device_tokens // page_size
        geometry = CONFIG.geometry(dtype="float32", page_size=page_size)
        pool = DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch.device("cpu"))
        allocator = PageAllocator(num_pages)
        config = HiCacheConfig.from_mapping(
            {
                "page_size": page_size,
                "prefetch_policy": prefetch_policy,
                "load_back_threshold_tokens": load_threshold_tokens,
                "host": {"ratio": 2.0, "huge_pages": False},
                "prefetch": {"threshold_tokens": page_size, "cost_estimate": False},
            }
        )
        if store is not None:
            config = dataclasses.replace(config, storage=injected(num_workers=2))
        handle = factory = None
        if store is not None:
            factory = InjectedFactory(faulty_storage(store, gates=self._gates))
        if cached:
            handle = CacheHandle(
                *create_hiradix_cache(
                    config,
                    device=create_device("cpu"),
                    device_pool=pool,
                    device_allocator=allocator,
                    factory=factory,
                )
            )
        self.engine = Engine(
            self.model,
            pool,
            allocator,
            cache=handle,
            max_batch_requests=max_batch_requests,
            chunk_tokens=chunk_tokens,
            cache_aware=cache_aware,
        )

    def __enter__(self) -> SchedulingRig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for gate in self._gates.values():
            gate.open()
        settled = self.engine.settle()
        faults = check_system(self.cache, request_device_pages=self.engine.owned_pages())
        closed = self.cache.close()
        if error is None:
            assert settled
            assert faults == []
            assert self.cache.protected_size == 0
            assert closed

    @property
    def cache(self) -> HiRadixCache:
        assert self.engine.cache is not None
        return self.engine.cache

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)

    def run(self, *requests: Request) -> int:
        """Serve these and all that wait; return how many tokens that took to compute."""
        before = self.model.num_tokens
        self.engine.run(*requests, max_idle_steps=MAX_STEPS)
        return self.model.num_tokens - before

    def drop_device(self) -> None:
        """Leave what is cached on the host alone."""
        assert self.engine.settle()
        self.cache.evict(1_000_000)

    def let_loads_fail(self, fails: Callable[[], bool]) -> None:
        """Let a load fail in its last layer whenever `fails` says so."""
        (pair,) = self.cache.controller._mover._pairs  # type: ignore[attr-defined]
        load_layer, last = pair.engine.load_layer, pair.engine.num_layers - 1

        def load(plan: TransferPlan, layer: int) -> None:
            if layer == last and fails():
                raise OSError("the link is down")
            load_layer(plan, layer)

        pair.engine.load_layer = load

    def names(self) -> list[str]:
        """Names of the requests that run, in the order in which they were admitted."""
        return [request.request_id for request in self.engine.running]


def request(
    name: str, prompt: Sequence[int], *, answer: int = 1, cacheable: bool = True
) -> Request:
    return Request(name, prompt, max_new_tokens=answer, cacheable=cacheable)


def ask(number: int, *, prompt: Sequence[int] = DOCUMENT, answer: int = 1) -> Request:
    """Return a request with a question of its own about a document."""
    return request(f"ask {number}", [*prompt, *tokens(number, 20 + number)], answer=answer)


def store_with(*prompts: Sequence[int]) -> MemoryPages:
    """Return a store that holds the full pages of each prompt."""
    store = MemoryPages()
    with SchedulingRig(store=store) as rig:
        for number, prompt in enumerate(prompts):
            rig.run(request(f"store {number}", prompt))
    return store


def answers_alone(requests: Sequence[Request]) -> list[list[int]]:
    """Return what each answers when an engine without a cache computes it alone."""
    engine = SchedulingRig(cached=False).engine
    alone = [request("alone", one.prompt_ids, answer=one.max_new_tokens) for one in requests]
    for one in alone:
        engine.run(one)
    return [one.output_ids for one in alone]
