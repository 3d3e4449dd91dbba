"""What each layout makes of each kind of KV, checked against bytes put in order by plain loops.

Device pool, host pool and store are filled through each other, and nothing of theirs says what is
expected: that is computed from the bytes drawn, head by head.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hicache.hashing import StorageNamespace, hash_pages
from hicache.layout import (
    DTYPE_BYTES,
    HostLayout,
    KVGeometry,
    MlaGeometry,
    PageGeometry,
    RowGeometry,
)
from hicache.pools import (
    DeviceKVPool,
    DeviceMlaPool,
    DeviceRowPool,
    HostKVPool,
    create_host_pool,
)
from hicache.storage import HiCacheStorageConfig, Piece
from hicache.storage.memory import MemoryStorage
from hicache.transfer import TorchTransferEngine
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.pools import DevicePool
    from hicache.storage import Page
    from hicache.types import IntArray

CPU = torch.device("cpu")
NUM_PAGES = 12
MOVED = 5
SIDES = {"dsa": ("mla", "indexer"), "draft": ("gqa", "draft"), "fp8 with scales": ("fp8", "scale")}
"""Models with a side pool: the KV, and what stands beside it."""


def geometry_of(kind: str, page_size: int) -> PageGeometry:
    def page(dtype: str, num_layers: int = 3) -> dict[str, Any]:
        return {"num_layers": num_layers, "dtype": dtype, "page_size": page_size}

    kinds: dict[str, PageGeometry] = {
        "mha": KVGeometry(num_kv_heads=3, head_dim=8, **page("float32")),
        "gqa": KVGeometry(num_kv_heads=2, head_dim=6, **page("bfloat16")),
        "one head": KVGeometry(num_kv_heads=1, head_dim=5, **page("float16")),
        "mla": MlaGeometry(kv_lora_rank=9, qk_rope_head_dim=4, **page("bfloat16")),
        "fp8": KVGeometry(num_kv_heads=4, head_dim=8, **page("float8_e4m3fn")),
        "fp8, odd": KVGeometry(num_kv_heads=3, head_dim=7, **page("float8_e5m2")),
        "fp8 latent": MlaGeometry(kv_lora_rank=9, qk_rope_head_dim=2, **page("float8_e4m3fn")),
        "indexer": RowGeometry(name="indexer", width=7, **page("float8_e4m3fn")),
        "scale": RowGeometry(name="scale", width=2, **page("float32")),
        "draft": KVGeometry(num_kv_heads=2, head_dim=6, **page("bfloat16", num_layers=1)),
    }
    return kinds[kind]


def device_pool_of(geometry: PageGeometry) -> DevicePool:
    if isinstance(geometry, KVGeometry):
        return DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)
    if isinstance(geometry, MlaGeometry):
        return DeviceMlaPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)
    assert isinstance(geometry, RowGeometry)
    return DeviceRowPool(geometry, num_pages=NUM_PAGES, torch_device=CPU)


class Side(NamedTuple):
    """A device pool of random bytes, a host pool, and what copies between them."""

    device: DevicePool
    host: HostKVPool
    engine: TorchTransferEngine
    content: npt.NDArray[np.uint8]
    """`[parts, layers, pages, page_size, heads, bytes of a head]`, as drawn."""

    def fill(self, content: npt.NDArray[np.uint8]) -> None:
        for layer in range(self.device.geometry.num_layers):
            for part, view in enumerate(self.device.layer_parts(layer)):
                view.copy_(torch.from_numpy(content[part, layer]).view(view.dtype))

    def held(self) -> npt.NDArray[np.uint8]:
        layers = [
            [part.view(torch.uint8).numpy() for part in self.device.layer_parts(layer)]
            for layer in range(self.device.geometry.num_layers)
        ]
        return np.stack([np.stack(parts) for parts in zip(*layers, strict=True)])

    def copy(self, verb: str, device_pages: IntArray, host_pages: IntArray) -> None:
        plan = self.engine.plan(device_pages, host_pages)
        for layer in range(self.engine.num_layers):
            getattr(self.engine, f"{verb}_layer")(plan, layer)

    def expected_page(self, page: int, layout: HostLayout) -> bytes:
        """The bytes of a page in the order in which `layout` is known, by loops over heads."""
        parts, layers, _, tokens, heads, _ = map(range, self.content.shape)
        order = {
            HostLayout.PAGE_FIRST: itertools.product(parts, tokens, layers, heads),
            HostLayout.PAGE_FIRST_DIRECT: itertools.product(parts, layers, tokens, heads),
            HostLayout.LAYER_FIRST: itertools.product(parts, layers, tokens, heads),
            HostLayout.PAGE_HEAD: itertools.product(heads, parts, layers, tokens),
        }[layout]
        names = {
            HostLayout.PAGE_FIRST: "ptlh",
            HostLayout.PAGE_FIRST_DIRECT: "plth",
            HostLayout.LAYER_FIRST: "plth",
            HostLayout.PAGE_HEAD: "hplt",
        }[layout]
        found = b""
        for place in order:
            at = dict(zip(names, place, strict=True))
            found += self.content[at["p"], at["l"], page, at["t"], at["h"]].tobytes()
        return found


def make_side(kind: str, layout: HostLayout, page_size: int, rng: np.random.Generator) -> Side:
    geometry = geometry_of(kind, page_size)
    device = device_pool_of(geometry)
    host = create_host_pool(
        geometry, num_pages=NUM_PAGES, layout=layout, pinned=False, huge_pages=False
    )
    heads, dim = geometry.row_shape
    shape = (
        geometry.num_parts,
        geometry.num_layers,
        NUM_PAGES,
        page_size,
        heads,
        dim * DTYPE_BYTES[geometry.dtype],
    )
    content = rng.integers(0, 256, shape, dtype=np.uint8)
    side = Side(device, host, TorchTransferEngine(device, host, staging_bytes=256), content)
    side.fill(content)
    return side


KINDS = ["mha", "gqa", "one head", "mla", "fp8", "fp8, odd", "fp8 latent", *SIDES]


@pytest.fixture(params=itertools.product(KINDS, HostLayout, [1, 4]))
def sides(request: pytest.FixtureRequest) -> Iterator[tuple[HostLayout, list[Side]]]:
    kind, layout, page_size = request.param
    rng = np.random.default_rng(5)
    made = [make_side(one, layout, page_size, rng) for one in SIDES.get(kind, (kind,))]
    yield layout, made
    for side in made:
        side.host.close()


def page_of(sides: list[Side], page: int) -> Page:
    return tuple(Piece(*piece) for side in sides for piece in side.host.page_pieces(page))


def test_bytes_come_back_from_host_and_store_and_lie_there_in_the_layouts_order(
    sides: tuple[HostLayout, list[Side]],
) -> None:
    layout, pools = sides
    rng = np.random.default_rng(6)
    device_pages, host_pages, others, back = (rng.permutation(NUM_PAGES)[:MOVED] for _ in range(4))
    for side in pools:
        side.copy("write", device_pages, host_pages)
    for device_page, host_page in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
        found = b"".join(ctypes.string_at(*piece) for piece in page_of(pools, host_page))
        assert found == b"".join(side.expected_page(device_page, layout) for side in pools)

    keys = hash_pages(bytes(4 * MOVED), 1)
    store = MemoryStorage(
        HiCacheStorageConfig(
            namespace=StorageNamespace(
                model="model", weights_revision="1", dtype="any", layout=layout.value,
                page_size=1, kv_shape="any",
            ),
            page_bytes=sum(side.host.geometry.page_bytes for side in pools),
        )
    )  # fmt: skip
    written = [page_of(pools, page) for page in host_pages.tolist()]
    parents = [b"", *keys[:-1]]
    store.batch_set(keys, parents, written, deadline=1e9)
    read = [page_of(pools, page) for page in others.tolist()]
    assert store.batch_get(keys, parents, read, deadline=1e9) == [PageOutcome.OK] * MOVED

    for side in pools:
        side.fill(np.zeros_like(side.content))
        side.copy("load", back, others)
        expected = np.zeros_like(side.content)
        expected[:, :, back] = side.content[:, :, device_pages]
        np.testing.assert_array_equal(side.held(), expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_page_of_all_heads_is_that_of_each_rank_with_fewer_one_after_the_other(
    num_ranks: int,
) -> None:
    """Why ranks of different shares can read each other's heads in `page_head`."""
    rng = np.random.default_rng(8)
    whole = make_side("fp8", HostLayout.PAGE_HEAD, 4, rng)
    pages = np.arange(NUM_PAGES)
    whole.copy("write", pages, pages)
    found = [b""] * NUM_PAGES
    geometry = whole.host.geometry
    assert isinstance(geometry, KVGeometry)
    num_heads = geometry.num_kv_heads // num_ranks
    for rank in range(num_ranks):
        share = KVGeometry(
            num_layers=geometry.num_layers,
            num_kv_heads=num_heads,
            head_dim=geometry.head_dim,
            dtype=geometry.dtype,
            page_size=geometry.page_size,
        )
        device = device_pool_of(share)
        for layer in range(share.num_layers):
            parts = zip(device.layer_parts(layer), whole.device.layer_parts(layer), strict=True)
            for own, of_all in parts:
                own.copy_(of_all[:, :, rank * num_heads : (rank + 1) * num_heads])
        host = create_host_pool(
            share, num_pages=NUM_PAGES, layout=HostLayout.PAGE_HEAD, pinned=False, huge_pages=False
        )
        engine = TorchTransferEngine(device, host)
        side = Side(device, host, engine, whole.content)
        side.copy("write", pages, pages)
        for page in range(NUM_PAGES):
            found[page] += b"".join(ctypes.string_at(*piece) for piece in host.page_pieces(page))
        host.close()
    for page in range(NUM_PAGES):
        assert found[page] == whole.expected_page(page, HostLayout.PAGE_HEAD)
    whole.host.close()
