"""Sizes of KV, and where the bytes of a page are."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import ConfigError, OwnershipError
from hicache.layout import (
    DTYPE_BYTES,
    Axis,
    HeadRange,
    HostLayout,
    KVGeometry,
    MlaGeometry,
    PageGeometry,
    RowGeometry,
    host_shape,
    pieces,
)

if TYPE_CHECKING:
    from hicache.types import IntArray

SMOLLM: dict[str, Any] = {
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "dtype": "float32",
    "page_size": 16,
}

DEEPSEEK: dict[str, Any] = {
    "num_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "dtype": "bfloat16",
    "page_size": 64,
}
INDEXER: dict[str, Any] = {
    "name": "indexer",
    "num_layers": 61,
    "width": 128,
    "dtype": "float16",
    "page_size": 64,
}

small = st.integers(1, 4)
common = {
    "num_layers": small,
    "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
    "page_size": small,
}
geometries: st.SearchStrategy[PageGeometry] = st.one_of(
    st.builds(KVGeometry, num_kv_heads=small, head_dim=small, **common),
    st.builds(MlaGeometry, kv_lora_rank=small, qk_rope_head_dim=small, **common),
    st.builds(RowGeometry, name=st.just("indexer"), width=small, **common),
)


def test_sizes_of_a_known_model() -> None:
    geometry = KVGeometry(**SMOLLM)
    assert geometry.row_shape == (3, 64)
    assert geometry.row_bytes == 768
    assert geometry.token_bytes == 2 * 30 * 768
    assert geometry.page_layer_bytes == 16 * 768
    assert geometry.page_bytes == 16 * 2 * 30 * 768
    assert geometry.kv_shape == "mha:layers=30,heads=3,head_dim=64"


def test_sizes_of_a_known_model_with_latent_attention() -> None:
    geometry = MlaGeometry(**DEEPSEEK)
    assert geometry.row_shape == (1, 576)
    assert geometry.row_bytes == 1152
    assert geometry.token_bytes == 61 * 1152
    assert geometry.page_layer_bytes == 64 * 1152
    assert geometry.page_bytes == 64 * 61 * 1152
    assert geometry.kv_shape == "mla:layers=61,latent=512,rope=64"


def test_sizes_of_rows_beside_the_kv() -> None:
    geometry = RowGeometry(**INDEXER)
    assert geometry.row_shape == (1, 128)
    assert geometry.page_bytes == 64 * 61 * 128 * 2
    assert geometry.kv_shape == "indexer:layers=61,width=128"


def test_geometries_of_different_kinds_are_never_equal() -> None:
    page: dict[str, Any] = {"num_layers": 1, "dtype": "float32", "page_size": 1}
    mla: PageGeometry = MlaGeometry(kv_lora_rank=6, qk_rope_head_dim=2, **page)
    rows: PageGeometry = RowGeometry(name="mla", width=8, **page)
    assert mla.page_bytes == rows.page_bytes
    assert mla != rows
    assert mla.kv_shape != rows.kv_shape


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
    ],
)
def test_a_row_has_the_bytes_of_its_type(dtype: str, size: int) -> None:
    assert KVGeometry(**{**SMOLLM, "dtype": dtype}).row_bytes == 192 * size


SIZES = [
    (kind, fields, field)
    for kind, fields in ((KVGeometry, SMOLLM), (MlaGeometry, DEEPSEEK), (RowGeometry, INDEXER))
    for field in fields
    if field not in ("dtype", "name")
]


@pytest.mark.parametrize(("kind", "fields", "field"), SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_a_size_that_is_no_positive_int_is_refused_by_name(
    kind: type[PageGeometry], fields: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{field} must be"):
        kind(**{**fields, field: value})


@pytest.mark.parametrize("heads", [(-1, 2, 4), (2, 5, 4), (0, 1, 4), (0, 2, 4), (3, 0, 4)])
def test_the_heads_of_a_pool_are_as_many_as_it_has_and_among_the_models(
    heads: tuple[int, int, int],
) -> None:
    with pytest.raises(ConfigError, match=r"kv_heads must be num_kv_heads = 3 heads within"):
        KVGeometry(**SMOLLM, kv_heads=HeadRange(*heads))


@pytest.mark.parametrize("first_layer", [-1, 1.0, True, "0"])
@pytest.mark.parametrize(
    ("kind", "fields"), [(KVGeometry, SMOLLM), (MlaGeometry, DEEPSEEK), (RowGeometry, INDEXER)]
)
def test_a_first_layer_that_is_no_number_of_a_layer_is_refused_by_name(
    kind: type[PageGeometry], fields: dict[str, Any], first_layer: object
) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.first_layer must be an int"):
        kind(**{**fields, "first_layer": first_layer})


@pytest.mark.parametrize("name", ["", "a+b", "a:b", "a b"])
def test_rows_are_named_by_an_identifier_so_that_shapes_can_be_joined(name: str) -> None:
    with pytest.raises(ConfigError, match="must be an identifier"):
        RowGeometry(**{**INDEXER, "name": name})


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'int3'.*bfloat16, float8_e4m3fn, float8_e5m2"):
        KVGeometry(**{**SMOLLM, "dtype": "int3"})


def test_layouts_are_found_by_name() -> None:
    assert HostLayout("page_first") is HostLayout.PAGE_FIRST
    assert HostLayout("page_first_direct") is HostLayout.PAGE_FIRST_DIRECT
    assert HostLayout("layer_first") is HostLayout.LAYER_FIRST
    assert HostLayout("page_head") is HostLayout.PAGE_HEAD


@pytest.mark.parametrize("name", ["page_last", "", "PAGE_FIRST", 3, None])
def test_an_unknown_layout_is_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown host layout .*: page_first, page_first_direct, lay"
    ):
        HostLayout(name)


@pytest.mark.parametrize("layout", HostLayout)
def test_every_layout_orders_every_axis_once(layout: HostLayout) -> None:
    assert len(layout.axes) == len(Axis)
    assert set(layout.axes) == set(Axis)


def test_shapes_are_those_the_layouts_are_known_by() -> None:
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float16", page_size=4)
    assert host_shape(geometry, HostLayout.PAGE_FIRST, 5) == (5, 2, 4, 3, 2, 8)
    assert host_shape(geometry, HostLayout.PAGE_FIRST_DIRECT, 5) == (5, 2, 3, 4, 2, 8)
    assert host_shape(geometry, HostLayout.LAYER_FIRST, 5) == (2, 3, 5, 4, 2, 8)
    assert host_shape(geometry, HostLayout.PAGE_HEAD, 5) == (5, 2, 2, 3, 4, 8)


def test_latent_attention_is_stored_as_if_it_had_neither_parts_nor_heads() -> None:
    geometry = MlaGeometry(**{**DEEPSEEK, "num_layers": 3})

    def extents(layout: HostLayout) -> list[int]:
        shape = host_shape(geometry, layout, 5)
        named = zip(layout.axes, shape, strict=True)
        assert {extent for axis, extent in named if axis in (Axis.PART, Axis.HEAD)} == {1}
        return [extent for extent in shape if extent > 1]

    assert extents(HostLayout.PAGE_FIRST) == [5, 64, 3, 576]
    assert extents(HostLayout.PAGE_FIRST_DIRECT) == [5, 3, 64, 576]
    assert extents(HostLayout.LAYER_FIRST) == [3, 5, 64, 576]
    assert extents(HostLayout.PAGE_HEAD) == [5, 3, 64, 576]


@given(geometry=geometries, num_pages=small)
@settings(deadline=None, max_examples=40)
def test_a_page_has_one_piece_page_first_and_one_for_each_layer_and_part_layer_first(
    geometry: PageGeometry, num_pages: int
) -> None:
    num_parts = 2 if isinstance(geometry, KVGeometry) else 1
    for layout in set(HostLayout) - {HostLayout.LAYER_FIRST}:
        assert len(pieces(geometry, layout, 0, num_pages)) == 1
    assert (
        len(pieces(geometry, HostLayout.LAYER_FIRST, 0, num_pages))
        == num_parts * geometry.num_layers
    )


@given(geometry=geometries, num_pages=small, layout=st.sampled_from(HostLayout))
@settings(deadline=None, max_examples=60)
def test_the_pieces_of_all_pages_tile_the_pool(
    geometry: PageGeometry, num_pages: int, layout: HostLayout
) -> None:
    spans = sorted(
        piece for page in range(num_pages) for piece in pieces(geometry, layout, page, num_pages)
    )
    end = 0
    for offset, size in spans:
        assert offset == end
        end += size
    assert end == num_pages * geometry.page_bytes


def page_of_each_byte(geometry: PageGeometry, layout: HostLayout, num_pages: int) -> IntArray:
    """The layouts once more, written out by hand and without `HostLayout.axes`."""
    row = (geometry.row_bytes,)
    layers, page_size = geometry.num_layers, geometry.page_size
    parts = 2 if isinstance(geometry, KVGeometry) else 1
    token_slots = np.arange(num_pages * page_size)
    if layout is HostLayout.LAYER_FIRST:
        of_slot = (token_slots // page_size)[None, None, :, None]
        return np.broadcast_to(of_slot, (parts, layers, num_pages * page_size, *row)).reshape(-1)
    of_page = np.arange(num_pages)[:, None, None, None, None]
    return np.broadcast_to(of_page, (num_pages, parts, page_size, layers, *row)).reshape(-1)


@given(geometry=geometries, num_pages=small, layout=st.sampled_from(HostLayout))
@settings(deadline=None, max_examples=60)
def test_pieces_hold_exactly_the_bytes_of_their_page(
    geometry: PageGeometry, num_pages: int, layout: HostLayout
) -> None:
    owner = page_of_each_byte(geometry, layout, num_pages)
    for page in range(num_pages):
        inside = np.zeros(len(owner), dtype=bool)
        for offset, size in pieces(geometry, layout, page, num_pages):
            inside[offset : offset + size] = True
        np.testing.assert_array_equal(inside, owner == page)


@pytest.mark.parametrize("page", [-1, 4, 1 << 40])
def test_a_page_outside_the_pool_has_no_pieces(page: int) -> None:
    with pytest.raises(OwnershipError, match=f"page {page} is not in a pool of 4"):
        pieces(KVGeometry(**SMOLLM), HostLayout.PAGE_FIRST, page, 4)


def test_the_arithmetic_needs_no_torch() -> None:
    code = "import sys, hicache.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
