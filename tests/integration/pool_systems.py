"""A whole cache over pools of any kind, driven to the end of each movement, and its bytes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hicache.config import HiCacheConfig, RankPlacement
from hicache.device import create_device
from hicache.hiradix_cache import HiRadixCache, LoadStatus, create_hiradix_cache
from hicache.layout import KVGeometry, MlaGeometry, RowGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool, DeviceRowPool, PageAllocator
from hicache.radix import RadixKey
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache.pools import Allocator, DevicePool
    from hicache.ranks import RankGroup
    from hicache.transfer import LayerDoneCounter
    from hicache.types import IntArray

CPU = torch.device("cpu")
NUM_PAGES = 64
NUM_CACHED = 6


def kv_pool(kind: str, *, dtype: str, page_size: int) -> DeviceKVPool | DeviceMlaPool:
    page: dict[str, Any] = {"num_layers": 3, "dtype": dtype, "page_size": page_size}
    if kind == "mha":
        geometry = KVGeometry(num_kv_heads=2, head_dim=4, **page)
        return DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)
    latent = MlaGeometry(kv_lora_rank=8, qk_rope_head_dim=2, **page)
    return DeviceMlaPool(latent, num_pages=NUM_PAGES, torch_device=CPU)


def side_pool(*, dtype: str, page_size: int, num_layers: int = 3, width: int = 5) -> DeviceRowPool:
    geometry = RowGeometry(
        name="indexer", width=width, num_layers=num_layers, dtype=dtype, page_size=page_size
    )
    return DeviceRowPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)


class System(NamedTuple):
    """A cache over a KV pool and side pools."""

    cache: HiRadixCache
    counter: LayerDoneCounter
    allocator: Allocator
    pools: Sequence[DevicePool]
    key: RadixKey

    def insert(self) -> list[list[torch.Tensor]]:
        """Insert pages of random bytes, and return what each pool holds of them."""
        pages = self.allocator.alloc(NUM_CACHED)
        assert pages is not None
        generator = torch.Generator().manual_seed(3)
        for pool in self.pools:
            for layer in range(pool.geometry.num_layers):
                for part in pool.layer_parts(layer):
                    noise = torch.randn(NUM_CACHED, *part.shape[1:], generator=generator)
                    part[torch.from_numpy(pages)] = noise.to(part.dtype)
        content = self.content(pages)
        self.cache.insert(self.key, pages, request_id="first", chunked=False)
        self.settle()
        return content

    def content(self, pages: IntArray) -> list[list[torch.Tensor]]:
        """Return the bytes of `pages` by pool and layer, part after part."""
        index = torch.from_numpy(pages)
        return [
            [
                torch.stack([part[index].view(torch.uint8) for part in pool.layer_parts(layer)])
                for layer in range(pool.geometry.num_layers)
            ]
            for pool in self.pools
        ]

    def settle(self) -> None:
        end = time.monotonic() + 30.0
        while self.cache.num_in_flight:
            self.cache.check_hicache_events()
            assert time.monotonic() < end
            time.sleep(0.0005)

    def forget_device(self) -> None:
        """Evict everything from L1, and let every pool forget what it held."""
        assert self.cache.evict(NUM_PAGES).num_freed == NUM_CACHED
        for pool in self.pools:
            for layer in range(pool.geometry.num_layers):
                for part in pool.layer_parts(layer):
                    part.fill_(-1.0)

    def prefetch(self) -> int:
        """Prefetch to the end; return how many pages came."""
        self.cache.prefetch_from_storage("second", self.key)
        self.settle()
        return self.cache.pop_prefetch_loaded_tokens("second") // self.cache.config.page_size

    def load(self) -> IntArray:
        """Load, wait for each layer of each pool as a model does, and return the pages."""
        load = self.cache.init_load_back(self.cache.match_prefix(self.key))
        assert load.status is LoadStatus.QUEUED
        self.counter.set_consumer(self.cache.ready_to_load_host_cache())
        for pool in self.pools:
            for layer in range(pool.geometry.num_layers):
                if isinstance(pool, DeviceRowPool):
                    pool.get_row_buffer(layer)
                else:
                    pool.get_key_buffer(layer)  # type: ignore[attr-defined]
        return load.device_pages

    def close(self) -> None:
        self.settle()
        assert check_system(self.cache) == []
        assert self.cache.close()


def draft_pool(*, dtype: str, page_size: int, num_layers: int = 1) -> DeviceKVPool:
    geometry = KVGeometry(
        num_kv_heads=2, head_dim=3, num_layers=num_layers, dtype=dtype, page_size=page_size
    )
    return DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)


def make_system(
    storage: Path,
    pools: Sequence[DevicePool],
    *,
    layout: str = "page_first",
    placement: RankPlacement | None = None,
    ranks: RankGroup | None = None,
    **extra_config: object,
) -> System:
    page_size = pools[0].geometry.page_size
    config = HiCacheConfig.from_mapping(
        {
            "page_size": page_size,
            "load_back_threshold_tokens": page_size,
            "prefetch_policy": "wait_complete",
            "host": {"layout": layout, "ratio": 2.0, "huge_pages": False},
            "prefetch": {"threshold_tokens": page_size},
            "storage": {
                "backend": "file",
                "extra_config": {"path": str(storage), **extra_config},
                "model_name": "model",
                "weights_revision": "1",
            },
        }
    )
    cache, counter = create_hiradix_cache(
        config,
        device=create_device("cpu"),
        device_pool=pools[0],
        device_allocator=PageAllocator(NUM_PAGES),
        side_pools=pools[1:],
        placement=placement,
        ranks=ranks,
    )
    key = RadixKey(range(NUM_CACHED * page_size))
    return System(cache, counter, cache.controller.device_allocator, pools, key)


def verify_equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for pool, (layers, expected_layers) in enumerate(zip(found, expected, strict=True)):
        for layer, (one, other) in enumerate(zip(layers, expected_layers, strict=True)):
            assert torch.equal(one, other), f"layer {layer} of pool {pool} has other bytes"
