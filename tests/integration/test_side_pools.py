"""What a model keeps beside its KV: it moves, is stored, is found and is lost with its KV page."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pairwise import pairwise
from pool_systems import (
    CPU,
    NUM_CACHED,
    NUM_PAGES,
    draft_pool,
    kv_pool,
    make_system,
    side_pool,
    verify_equal,
)
from storage_damage import flip

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.errors import ConfigError
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import HostLayout, RowGeometry
from hicache.pools import DeviceRowPool, PageAllocator
from hicache.storage.page_store import list_pages

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.pools import DevicePool

WAYS = pairwise(
    {
        "kv": ["mha", "mla"],
        "kv_dtype": ["float32", "bfloat16", "float8_e4m3fn"],
        "side": ["indexer", "draft"],
        "side_dtype": ["float16", "float32", "float8_e5m2"],
        "layout": [layout.value for layout in HostLayout],
        "page_size": [1, 16, 64],
        "side_layers": [3, 1, 5],
    }
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_both_pools_come_back_from_the_host_and_from_storage_bit_by_bit(
    way: dict[str, Any], tmp_path: Path
) -> None:
    def make_pools() -> list[DevicePool]:
        make_side_pool = draft_pool if way["side"] == "draft" else side_pool
        return [
            kv_pool(way["kv"], dtype=way["kv_dtype"], page_size=way["page_size"]),
            make_side_pool(
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
