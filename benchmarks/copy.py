"""Copies between device pool and host pool, beside memcpy of as many equal pieces.

`memcpy` is one call of numpy for each run of pages, on memory in the same two layouts: it copies as
many pieces of the same size, which a layout that is not the device's makes short. `memcpy-block`
copies as many bytes with K or V of a layer in one piece, which no copy into another order reaches.

On one thread. The bytes on the host are compared with those that the layout puts there by its
definition, the bytes back on the device with what was there before, and pages that are not part of
a copy must stay as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.harness import Bar, Result, Step, alternate, check, summarise
from benchmarks.prompt import one_torch_thread
from hicache.layout import DTYPE_BYTES, Axis, HostLayout, KVGeometry, host_shape
from hicache.pools import DeviceKVPool, create_host_pool
from hicache.storage.base import Piece
from hicache.storage.page_memory import page_views
from hicache.transfer import TorchTransferEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from hicache.storage.base import Page
    from hicache.transfer import TransferEngine, TransferPlan
    from hicache.types import IntArray

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Sizes", "steps"]

_UNTOUCHED = 0xEE
"""What is in every byte that no copy may have written."""

_SPARE = 2
"""Pools have so many times the pages of a copy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        copy_bytes: bytes of one copy, all layers together; more than caches hold.
        geometries: whose pages are copied.
        samples: copies timed of each kind.
    """

    copy_bytes: int = 128 << 20
    geometries: tuple[KVGeometry, ...]
    samples: int = 20

    @classmethod
    def full(cls) -> Sizes:
        """Return the geometries of a small and of a large model, with small and large pages."""
        small: dict[str, Any] = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
        large: dict[str, Any] = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
        return cls(
            geometries=tuple(
                KVGeometry(**shape, dtype=dtype, page_size=page_size)
                for (shape, dtype), page_size in itertools.product(
                    ((small, "float32"), (large, "bfloat16")), (16, 64)
                )
            )
        )


def steps(
    *,
    quick: bool,
    peers: frozenset[str] = frozenset(),
    sizes: Sizes | None = None,
    create_engine: Callable[..., TransferEngine] = TorchTransferEngine,
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: smaller copies and fewer of them.
        peers: beside memcpy there are none.
        sizes: instead of those that `quick` means.
        create_engine: from a device pool and a host pool, what is measured.
    """
    if sizes is None:
        sizes = Sizes.full()
        if quick:
            sizes = dataclasses.replace(sizes, copy_bytes=32 << 20, samples=5)
    return [
        Step(
            f"{layout.value} {geometry.kv_shape} page_size={geometry.page_size}",
            partial(_copies, sizes, geometry, layout, create_engine),
        )
        for geometry in sizes.geometries
        for layout in HostLayout
    ]


def _copies(
    sizes: Sizes,
    geometry: KVGeometry,
    layout: HostLayout,
    create_engine: Callable[..., TransferEngine],
) -> list[Result]:
    """Measure both directions, of pages in one run and of pages anywhere."""
    with one_torch_thread():
        pools = _Pools(geometry, layout, sizes.copy_bytes, create_engine)
        try:
            return [
                result
                for pages in ("contiguous", "random")
                for direction in ("write", "load")
                for result in _copy(pools, direction, pages, samples=sizes.samples)
            ]
        finally:
            pools.close()


def _copy(pools: _Pools, direction: str, pages: str, *, samples: int) -> list[Result]:
    device_pages, host_pages = pools.choose(pages)
    pools.check_copies(device_pages, host_pages)
    peers = {"memcpy": pools.layout}
    if pools.layout is not HostLayout.LAYER_FIRST and pages == "contiguous":
        peers["memcpy-block"] = HostLayout.LAYER_FIRST
    plan = pools.engine.plan(device_pages, host_pages)
    num_bytes = len(device_pages) * pools.geometry.page_bytes
    geometry, results = pools.geometry, []
    for peer, layout in peers.items():
        pieces = pools.memcpy_pieces(direction, device_pages, host_pages, layout)
        mine, others = alternate(
            lambda count: _speeds(lambda: pools.copy(direction, plan), num_bytes, count),
            lambda count, pieces=pieces: _speeds(  # type: ignore[misc]
                lambda: _memcpy(pieces), num_bytes, count
            ),
            samples=samples,
            rounds=samples,
        )
        bar = Bar(0.8 if pages == "contiguous" else 0.2, "ratio")
        result = summarise(
            direction,
            mine,
            params={
                "layout": pools.layout.value,
                "pages": pages,
                "shape": f"{geometry.num_layers}x{geometry.num_kv_heads}x{geometry.head_dim}",
                "dtype": geometry.dtype,
                "page_size": geometry.page_size,
            },
            unit="GB/s",
            better="higher",
            bars=(bar,) if peer == "memcpy" else (),
        )
        results.append(result.beside(peer, others))
    return results


def _speeds(call: Callable[[], object], num_bytes: int, count: int) -> list[float]:
    speeds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        speeds.append(num_bytes / (time.perf_counter() - begin) / 1e9)
    return speeds


def _memcpy(pieces: list[tuple[Bytes, Bytes]]) -> None:
    for target, source in pieces:
        np.copyto(target, source)


class _Pools:
    """A device pool with known content, a host pool, and memory of the same size for memcpy.

    Attributes:
        content: bytes of the device pool, `[2, layers, pages, page_size, bytes of a row]`.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: HostLayout,
        copy_bytes: int,
        create_engine: Callable[..., TransferEngine],
    ) -> None:
        self.geometry, self.layout = geometry, layout
        self._num_moved = max(2, copy_bytes // geometry.page_bytes)
        self._num_pages = num_pages = _SPARE * self._num_moved
        self._device = DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch.device("cpu"))
        self._host = create_host_pool(
            geometry, num_pages=num_pages, layout=layout, pinned=False, huge_pages=True
        )
        self.engine = create_engine(self._device, self._host)
        shape = (2, geometry.num_layers, num_pages, geometry.page_size, geometry.row_bytes)
        self._rng = np.random.default_rng(0)
        self.content: Bytes = self._rng.integers(256, size=shape, dtype=np.uint8)
        self._target = np.empty(self.content.size, dtype=np.uint8)
        self._target.fill(0)

    def choose(self, pages: str) -> tuple[IntArray, IntArray]:
        """Return pages of the device and of the host: in one run each, or anywhere."""
        if pages == "contiguous":
            run = np.arange(self._num_moved, dtype=np.int64)
            return run, run + self._num_moved // 2
        device, host = (self._rng.permutation(self._num_pages) for _ in range(2))
        return device[: self._num_moved], host[: self._num_moved]

    def copy(self, direction: str, plan: TransferPlan) -> None:
        """Copy all layers."""
        copy_layer = getattr(self.engine, f"{direction}_layer")
        for layer in range(self.geometry.num_layers):
            copy_layer(plan, layer)

    def memcpy_pieces(
        self, direction: str, device_pages: IntArray, host_pages: IntArray, layout: HostLayout
    ) -> list[tuple[Bytes, Bytes]]:
        """Return (target, source) of each run of pages in each part of a layer."""
        *shape, head_dim = host_shape(self.geometry, layout, self._num_pages)
        head_bytes = head_dim * DTYPE_BYTES[self.geometry.dtype]
        host = self._target.reshape(*shape, head_bytes)
        host = host.transpose([layout.axes.index(axis) for axis in Axis])
        content = self.content.reshape(host.shape)
        breaks = (np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(device_pages)]
        runs = [
            (slice(host_pages[start], host_pages[start] + end - start),
             slice(device_pages[start], device_pages[start] + end - start))
            for start, end in itertools.pairwise(starts)
        ]  # fmt: skip
        pairs = [
            (host[part, layer, there], content[part, layer, here])
            for part in range(2)
            for layer in range(self.geometry.num_layers)
            for there, here in runs
        ]
        return pairs if direction == "write" else [(device, far) for far, device in pairs]

    def check_copies(self, device_pages: IntArray, host_pages: IntArray) -> None:
        """Copy there and back, and compare every byte of both pools."""
        plan = self.engine.plan(device_pages, host_pages)
        self._fill_device(self.content)
        for page in range(self._num_pages):
            for view in page_views(self._pieces(page)):
                np.asarray(view).fill(_UNTOUCHED)
        self.copy("write", plan)
        self._check_host(device_pages, host_pages)
        self._fill_device(np.full_like(self.content, _UNTOUCHED))
        self.copy("load", plan)
        expected = np.full_like(self.content, _UNTOUCHED)
        expected[:, :, device_pages] = self.content[:, :, device_pages]
        for layer in range(self.geometry.num_layers):
            for part, rows in enumerate(self._device.get_kv_buffer(layer)):
                right = np.array_equal(_as_bytes(rows), expected[part, layer].reshape(-1))
                check(right, f"a load leaves other bytes in layer {layer} than it has to")

    def _check_host(self, device_pages: IntArray, host_pages: IntArray) -> None:
        source_of = dict(zip(host_pages.tolist(), device_pages.tolist(), strict=True))
        for page in range(self._num_pages):
            found = b"".join(page_views(self._pieces(page)))
            source = source_of.get(page)
            expected = bytes([_UNTOUCHED]) * self.geometry.page_bytes
            if source is not None:
                expected = self._in_order(self.content[:, :, source]).tobytes()
            check(found == expected, f"a write leaves other bytes in host page {page}")

    def _in_order(self, rows: Bytes) -> Bytes:
        """Return `[2, layers, page_size, bytes of a row]` of a page in the layout's order."""
        if self.layout is HostLayout.PAGE_FIRST:
            return rows.transpose(0, 2, 1, 3)
        if self.layout is HostLayout.PAGE_HEAD:
            heads = rows.reshape(*rows.shape[:3], self.geometry.num_kv_heads, -1)
            return heads.transpose(3, 0, 1, 2, 4)
        return rows

    def _pieces(self, page: int) -> Page:
        return tuple(Piece(*piece) for piece in self._host.page_pieces(page))

    def _fill_device(self, content: Bytes) -> None:
        heads = (self.geometry.num_kv_heads, self.geometry.head_dim)
        dtype = getattr(torch, self.geometry.dtype)
        slots = torch.arange(self._num_pages * self.geometry.page_size)
        for layer in range(self.geometry.num_layers):
            keys, values = (
                torch.from_numpy(content[part, layer]).view(dtype).reshape(-1, *heads)
                for part in range(2)
            )
            self._device.set_kv_buffer(layer, slots, keys, values)

    def close(self) -> None:
        """Give the host memory back."""
        self._host.close()


def _as_bytes(rows: torch.Tensor) -> Bytes:
    flat: Bytes = rows.reshape(-1).view(torch.uint8).numpy()
    return flat
