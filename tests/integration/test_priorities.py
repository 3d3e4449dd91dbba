"""What is important to the scheduler stays longer in memory."""

from __future__ import annotations

import pytest
from serving import MODEL, make_pool

from hicache.config import HiCacheConfig, HostPoolConfig
from hicache.device import create_device
from hicache.engine.engine import CacheHandle, Engine
from hicache.engine.request import Request
from hicache.hiradix_cache import create_hiradix_cache
from hicache.pools import PageAllocator

PAGE = 16


def prompt(seed: int) -> list[int]:
    return [(seed * 31 + index * 7) % 200 for index in range(100)]


@pytest.mark.parametrize("chunk_tokens", [512, 32])
def test_the_pages_of_an_important_request_outlive_those_of_later_ones(chunk_tokens: int) -> None:
    pool = make_pool(MODEL.config.geometry(dtype="float32", page_size=PAGE), 16)
    allocator = PageAllocator(16)
    config = HiCacheConfig(
        page_size=PAGE,
        eviction_policy="priority",
        host=HostPoolConfig(ratio=0.0625, huge_pages=False),
    )
    cache, counter = create_hiradix_cache(
        config, device=create_device("cpu"), device_pool=pool, device_allocator=allocator
    )
    engine = Engine(
        MODEL, pool, allocator, cache=CacheHandle(cache, counter), chunk_tokens=chunk_tokens
    )

    def serve(seed: int, *, priority: int = 0) -> Request:
        request = Request(f"{seed}/{priority}", prompt(seed), max_new_tokens=4, priority=priority)
        engine.run(request)
        return request

    try:
        serve(1, priority=3)
        for seed in range(2, 8):
            serve(seed)
        assert serve(1, priority=-1).device_hit_tokens == 96
        assert serve(2).device_hit_tokens == 0
    finally:
        engine.settle()
        cache.close()
