"""What a model keeps beside its KV: it moves, is stored, is found and is lost with its KV page."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from pairwise import pairwise
from storage_damage import flip

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.errors import ConfigError
from hicache.hiradix_cache import HiRadixCache, LoadStatus, create_hiradix_cache
from hicache.layout import HostLayout, KVGeometry, MlaGeometry, RowGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool, DeviceRowPool, PageAllocator
from hicache.radix import RadixKey
from hicache.storage.page_store import list_pages
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache.pools import DevicePool
    from hicache.transfer import LayerDoneCounter
    from hicache.types import IntArray

CPU = torch.device("cpu")
NUM_PAGES = 64
NUM_CACHED = 6
WAYS = pairwise(
    {
        "kv": ["mha", "mla"],
        "kv_dtype": ["float32", "bfloat16"],
        "side_dtype": ["float16", "float32"],
        "layout": [layout.value for layout in HostLayout],
        "page_size": [1, 16, 64],
        "side_layers": [3, 1, 5],
    }
)


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
    allocator: PageAllocator
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


def make_system(
    storage: Path, pools: Sequence[DevicePool], *, layout: str = "page_first"
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
                "extra_config": {"path": str(storage)},
                "model_name": "model",
                "weights_revision": "1",
            },
        }
    )
    allocator = PageAllocator(NUM_PAGES)
    cache, counter = create_hiradix_cache(
        config,
        device=create_device("cpu"),
        device_pool=pools[0],
        device_allocator=allocator,
        side_pools=pools[1:],
    )
    key = RadixKey(range(NUM_CACHED * page_size))
    return System(cache, counter, allocator, pools, key)


def verify_equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for pool, (layers, expected_layers) in enumerate(zip(found, expected, strict=True)):
        for layer, (one, other) in enumerate(zip(layers, expected_layers, strict=True)):
            assert torch.equal(one, other), f"layer {layer} of pool {pool} has other bytes"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_both_pools_come_back_from_the_host_and_from_storage_bit_by_bit(
    way: dict[str, Any], tmp_path: Path
) -> None:
    def make_pools() -> list[DevicePool]:
        return [
            kv_pool(way["kv"], dtype=way["kv_dtype"], page_size=way["page_size"]),
            side_pool(
                dtype=way["side_dtype"],
                page_size=way["page_size"],
                num_layers=way["side_layers"],
            ),
        ]

    system = make_system(tmp_path, make_pools(), layout=way["layout"])
    written = system.insert()
    system.forget_device()
    verify_equal(system.content(system.load()), written)

    system.settle()
    system.forget_device()
    system.cache.reset()
    assert system.prefetch() == NUM_CACHED
    verify_equal(system.content(system.load()), written)
    system.close()

    restarted = make_system(tmp_path, make_pools(), layout=way["layout"])
    assert restarted.prefetch() == NUM_CACHED
    verify_equal(restarted.content(restarted.load()), written)
    restarted.close()


def test_three_pools_of_three_widths_are_one_page_in_storage(tmp_path: Path) -> None:
    kv = kv_pool("mla", dtype="bfloat16", page_size=16)
    first = side_pool(dtype="float32", page_size=16)
    second = side_pool(dtype="float16", page_size=16, num_layers=2, width=1)
    system = make_system(tmp_path, [kv, first, second])
    written = system.insert()
    page_bytes = sum(pool.geometry.page_bytes for pool in (kv, first, second))
    assert {page.num_bytes for page in list_pages(str(tmp_path))} == {page_bytes}
    system.forget_device()
    verify_equal(system.content(system.load()), written)
    system.close()


@pytest.mark.parametrize("pool", [0, 1])
def test_a_page_damaged_in_either_pool_is_a_miss_for_both(pool: int, tmp_path: Path) -> None:
    """C025, C057: pools are read as one page, so the hit ends with the shorter one."""

    def make_pools() -> list[DevicePool]:
        return [
            kv_pool("mha", dtype="float32", page_size=4),
            side_pool(dtype="float16", page_size=4),
        ]

    system = make_system(tmp_path, make_pools())
    written = system.insert()
    system.close()
    pages = list(list_pages(str(tmp_path)))
    assert len(pages) == NUM_CACHED
    flip(pages[4], 0 if pool == 0 else -1)

    restarted = make_system(tmp_path, make_pools())
    assert restarted.prefetch() == 4
    found = restarted.content(restarted.load())
    verify_equal(found, [[part[:, :4] for part in layers] for layers in written])
    restarted.close()


def test_pages_stored_with_other_side_pools_are_other_pages(tmp_path: Path) -> None:
    """Shape and element type of a side pool are part of the namespace."""
    others: list[list[DevicePool]] = [
        [],
        [side_pool(dtype="float16", page_size=4)],
        [side_pool(dtype="bfloat16", page_size=4)],
        [side_pool(dtype="float16", page_size=4, width=6)],
    ]
    for stored in (False, True):
        for side_pools in others:
            kv = kv_pool("mha", dtype="float32", page_size=4)
            system = make_system(tmp_path, [kv, *side_pools])
            assert system.prefetch() == (NUM_CACHED if stored else 0)
            if not stored:
                system.insert()
            system.close()


def test_reading_a_layer_of_a_side_pool_waits_for_its_load(tmp_path: Path) -> None:
    kv, side = kv_pool("mha", dtype="float32", page_size=4), side_pool(dtype="float16", page_size=4)
    system = make_system(tmp_path, [kv, side])
    written = system.insert()
    system.forget_device()
    hold = threading.Event()
    (_, pair) = system.cache.controller._mover._pairs  # type: ignore[attr-defined]
    load_layer = pair.engine.load_layer

    def load_late(plan: object, layer: int) -> None:
        assert layer == 0 or hold.wait(30.0)
        load_layer(plan, layer)

    pair.engine.load_layer = load_late
    load = system.cache.init_load_back(system.cache.match_prefix(system.key))
    system.counter.set_consumer(system.cache.ready_to_load_host_cache())
    side.get_row_buffer(0)
    late = threading.Timer(0.05, hold.set)
    late.start()
    pages = torch.from_numpy(load.device_pages)
    rows = side.get_row_buffer(1).view(NUM_PAGES, 4, 1, 5)[pages]
    assert hold.is_set()
    assert torch.equal(rows.view(torch.uint8), written[1][1][0])
    late.join()
    system.close()


@pytest.mark.parametrize(("num_pages", "page_size"), [(NUM_PAGES - 1, 4), (NUM_PAGES, 8)])
def test_a_side_pool_of_other_pages_is_refused_and_leaves_nothing(
    num_pages: int, page_size: int, tmp_path: Path
) -> None:
    geometry = RowGeometry(
        name="indexer", width=5, num_layers=3, dtype="float16", page_size=page_size
    )
    side = DeviceRowPool(geometry, num_pages=num_pages, torch_device=CPU)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=f"{num_pages} pages of {page_size} tokens"):
        make_system(tmp_path, [kv_pool("mha", dtype="float32", page_size=4), side])
    assert threading.active_count() == threads


def test_the_size_of_the_host_is_that_of_all_pools_together() -> None:
    kv, side = kv_pool("mha", dtype="float32", page_size=4), side_pool(dtype="float32", page_size=4)
    page_bytes = kv.geometry.page_bytes + side.geometry.page_bytes
    config = HiCacheConfig.from_mapping(
        {"page_size": 4, "host": {"size_bytes": 10 * page_bytes, "huge_pages": False}}
    )
    cache, _ = create_hiradix_cache(
        config,
        device=create_device("cpu"),
        device_pool=kv,
        device_allocator=PageAllocator(NUM_PAGES),
        side_pools=[side],
    )
    assert cache.controller.host_allocator.num_pages == 10
    assert cache.close()
