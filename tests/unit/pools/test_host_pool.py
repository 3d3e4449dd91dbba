"""The host pool: pieces and views are the same bytes, and how large it gets."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from hicache.device.host_memory import HostMemory
from hicache.errors import CapacityError, ClosedError, ConfigError, OwnershipError
from hicache.layout import DTYPE_BYTES, HostLayout, KVGeometry, MlaGeometry, PageGeometry
from hicache.pools.host import HostKVPool, create_host_pool, host_pool_pages

NUM_PAGES = 5


def make_geometry(dtype: str = "float32", page_size: int = 4) -> KVGeometry:
    return KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype, page_size=page_size)


def make_mla_geometry(dtype: str = "float32", page_size: int = 4) -> MlaGeometry:
    return MlaGeometry(
        num_layers=3, kv_lora_rank=7, qk_rope_head_dim=4, dtype=dtype, page_size=page_size
    )


GEOMETRIES = pytest.mark.parametrize("geometry_of", [make_geometry, make_mla_geometry])
GeometryOf: TypeAlias = Callable[..., PageGeometry]


def make_pool(layout: HostLayout, geometry: PageGeometry | None = None) -> HostKVPool:
    return create_host_pool(
        geometry or make_geometry(),
        num_pages=NUM_PAGES,
        layout=layout,
        pinned=False,
        huge_pages=False,
    )


def bytes_of_page(pool: HostKVPool, page: int) -> bytes:
    return b"".join(ctypes.string_at(address, size) for address, size in pool.page_pieces(page))


def heads_in_order(geometry: PageGeometry, layout: HostLayout) -> list[tuple[int, int, int, int]]:
    """(part, layer, token, head) of each head of a page as its pieces go, written by hand."""
    layers, tokens = range(geometry.num_layers), range(geometry.page_size)
    parts, heads = ((0, 1), (0, 1)) if isinstance(geometry, KVGeometry) else ((0,), (0,))
    if layout is HostLayout.PAGE_FIRST:
        order = itertools.product(parts, tokens, layers, heads)
        return [(part, layer, token, head) for part, token, layer, head in order]
    if layout is HostLayout.PAGE_HEAD:
        order = itertools.product(heads, parts, layers, tokens)
        return [(part, layer, token, head) for head, part, layer, token in order]
    return list(itertools.product(parts, layers, tokens, heads))


@GEOMETRIES
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("layout", HostLayout)
def test_the_pieces_of_a_page_are_its_heads_in_the_order_of_the_layout(
    layout: HostLayout, dtype: str, page_size: int, geometry_of: GeometryOf
) -> None:
    geometry = geometry_of(dtype, page_size)
    pool = make_pool(layout, geometry)
    rng = np.random.default_rng(7)
    num_parts = len(pool.layer_parts(0))
    num_heads = geometry.row_shape[0]
    head_bytes = geometry.row_bytes // num_heads
    shape = (num_parts, geometry.num_layers, NUM_PAGES, page_size, num_heads, head_bytes)
    expected = rng.integers(0, 256, shape, dtype=np.uint8)
    for layer in range(geometry.num_layers):
        for part, view in enumerate(pool.layer_parts(layer)):
            view.copy_(torch.from_numpy(expected[part, layer]).view(view.dtype))
    for page in range(NUM_PAGES):
        heads = [
            expected[part, layer, page, token, head].tobytes()
            for part, layer, token, head in heads_in_order(geometry, layout)
        ]
        assert bytes_of_page(pool, page) == b"".join(heads)
    pool.close()


@pytest.mark.parametrize("layout", HostLayout)
def test_bytes_written_to_a_piece_are_seen_in_the_views(layout: HostLayout) -> None:
    pool = make_pool(layout)
    for address, size in pool.page_pieces(3):
        ctypes.memset(address, 0xFF, size)
    for layer in range(3):
        for view in pool.layer_parts(layer):
            assert view.isnan().flatten(1).all(1).tolist() == [
                page == 3 for page in range(NUM_PAGES)
            ]
            assert not view[[0, 1, 2, 4]].any()
    pool.close()


@GEOMETRIES
@pytest.mark.parametrize("layout", HostLayout)
def test_heads_and_elements_of_a_token_are_contiguous_unless_heads_are_stored_apart(
    layout: HostLayout, geometry_of: GeometryOf
) -> None:
    pool = make_pool(layout, geometry_of())
    for layer in range(3):
        for part in pool.layer_parts(layer):
            assert part.shape in [(NUM_PAGES, 4, 2, 8), (NUM_PAGES, 4, 1, 11)]
            assert part[0, 0, 0].is_contiguous()
            if layout is not HostLayout.PAGE_HEAD or geometry_of is make_mla_geometry:
                assert part[0, 0].is_contiguous()
    pool.close()


@GEOMETRIES
@pytest.mark.parametrize("layout", HostLayout)
def test_the_pieces_of_many_pages_are_those_of_each(
    layout: HostLayout, geometry_of: GeometryOf
) -> None:
    pool = make_pool(layout, geometry_of())
    pages = [3, 0, 3, 4]
    by_piece = [
        [(address, size) for address in addresses.tolist()]
        for addresses, size in pool.pieces_by_page(np.array(pages))
    ]
    assert list(zip(*by_piece, strict=True)) == [pool.page_pieces(page) for page in pages]
    for wrong in (-1, NUM_PAGES):
        with pytest.raises(OwnershipError, match="not all in this host pool"):
            pool.pieces_by_page(np.array([0, wrong, 1]))
    pool.close()
    with pytest.raises(ClosedError):
        pool.pieces_by_page(np.array(pages))


@GEOMETRIES
@pytest.mark.parametrize("layout", HostLayout)
def test_all_pieces_lie_inside_the_regions_and_fill_them(
    layout: HostLayout, geometry_of: GeometryOf
) -> None:
    pool = make_pool(layout, geometry_of())
    [(start, num_bytes)] = pool.regions()
    covered = np.zeros(num_bytes, dtype=np.int64)
    for page in range(NUM_PAGES):
        for address, size in pool.page_pieces(page):
            covered[address - start : address - start + size] += 1
    assert (covered == 1).all()
    pool.close()


def test_neighbouring_heads_of_a_page_are_one_run_of_bytes_head_by_head() -> None:
    geometry = make_geometry()
    pool = make_pool(HostLayout.PAGE_HEAD, geometry)
    [(_, num_bytes)] = pool.page_pieces(3)
    for head in (0, 1):
        for layer in range(geometry.num_layers):
            for part in pool.layer_parts(layer):
                part[3, :, head] = head + 1
    found = np.frombuffer(bytes_of_page(pool, 3), dtype=np.float32)
    assert num_bytes == geometry.page_bytes
    assert found.tolist() == [1.0] * (len(found) // 2) + [2.0] * (len(found) // 2)
    pool.close()


@pytest.mark.parametrize("page", [-1, NUM_PAGES])
def test_a_page_outside_the_pool_has_no_address(page: int) -> None:
    pool = make_pool(HostLayout.PAGE_FIRST)
    with pytest.raises(OwnershipError, match=f"page {page}"):
        pool.page_pieces(page)
    pool.close()


def test_a_closed_pool_gives_nothing_and_closes_again() -> None:
    pool = make_pool(HostLayout.PAGE_FIRST)
    pool.close()
    pool.close()
    for use in (
        lambda: pool.layer_parts(0),
        lambda: pool.page_pieces(0),
        pool.regions,
    ):
        with pytest.raises(ClosedError):
            use()


def test_closing_the_pool_closes_its_memory() -> None:
    geometry = make_geometry()
    memory = HostMemory(geometry.page_bytes, pinned=False, huge_pages=False)
    HostKVPool(geometry, num_pages=1, layout=HostLayout.PAGE_FIRST, memory=memory).close()
    with pytest.raises(ClosedError):
        _ = memory.tensor


def test_memory_may_be_larger_than_the_pool_but_not_smaller() -> None:
    geometry = make_geometry()
    memory = HostMemory(geometry.page_bytes * 3 - 1, pinned=False, huge_pages=False)
    with pytest.raises(CapacityError, match="3 pages need"):
        HostKVPool(geometry, num_pages=3, layout=HostLayout.PAGE_FIRST, memory=memory)
    pool = HostKVPool(geometry, num_pages=2, layout=HostLayout.PAGE_FIRST, memory=memory)
    assert pool.regions() == [(memory.address, 2 * geometry.page_bytes)]
    pool.close()


def test_a_pool_has_a_page() -> None:
    memory = HostMemory(1 << 20, pinned=False, huge_pages=False)
    with pytest.raises(ConfigError, match="num_pages must be at least 1"):
        HostKVPool(make_geometry(), num_pages=0, layout=HostLayout.PAGE_FIRST, memory=memory)
    memory.close()


@pytest.mark.parametrize(
    ("size", "num_pages"),
    [
        ({"ratio": 2.0}, 200),
        ({"ratio": 0.019}, 1),
        ({"ratio": 1}, 100),
        ({"size_bytes": make_geometry().page_bytes}, 1),
        ({"size_bytes": make_geometry().page_bytes * 8 - 1}, 7),
    ],
    ids=str,
)
def test_a_host_pool_is_sized_by_ratio_or_by_bytes_and_rounded_down(
    size: dict[str, Any], num_pages: int
) -> None:
    page_bytes = make_geometry().page_bytes
    assert host_pool_pages(page_bytes, device_pages=100, **size) == num_pages


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({}, "as ratio or as size_bytes"),
        ({"ratio": 2.0, "size_bytes": 1 << 30}, "as ratio or as size_bytes"),
        ({"ratio": 0}, "ratio must be a finite number above 0"),
        ({"ratio": -1.0}, "ratio must be a finite number above 0"),
        ({"ratio": float("nan")}, "ratio must be a finite number above 0"),
        ({"ratio": float("inf")}, "ratio must be a finite number above 0"),
        ({"ratio": 0.009}, "does not hold one page"),
        ({"size_bytes": make_geometry().page_bytes - 1}, "does not hold one page"),
        ({"size_bytes": 0}, "does not hold one page"),
        ({"size_bytes": -5}, "does not hold one page"),
    ],
    ids=str,
)
def test_a_size_that_holds_no_page_is_refused(size: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        host_pool_pages(make_geometry().page_bytes, device_pages=100, **size)
