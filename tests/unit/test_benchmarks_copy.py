"""Laws of the benchmark of copies: a copy that is wrong in any byte is no figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import benchmarks.copy
from benchmarks.harness import CheckFailed
from hicache.layout import KVGeometry
from hicache.transfer import TorchTransferEngine

if TYPE_CHECKING:
    from hicache.transfer import TransferPlan
    from hicache.types import IntArray

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_size=4)
SIZES = benchmarks.copy.Sizes(copy_bytes=8 * GEOMETRY.page_bytes, geometries=(GEOMETRY,), samples=5)


def test_copy_reports_both_directions_of_all_layouts_beside_memcpy() -> None:
    results = [
        result for step in benchmarks.copy.steps(quick=True, sizes=SIZES) for result in step.run()
    ]
    measured = [(one.name, one.params["layout"], one.params["pages"], one.peer) for one in results]
    assert measured == [
        (direction, layout, pages, peer)
        for layout in ("page_first", "page_first_direct", "layer_first", "page_head")
        for pages in ("contiguous", "random")
        for direction in ("write", "load")
        for peer in ("memcpy", "memcpy-block")
        if peer == "memcpy" or (pages == "contiguous" and layout != "layer_first")
    ]
    assert {(one.unit, one.better) for one in results} == {("GB/s", "higher")}
    assert all(one.ratio is not None and one.ratio > 0 for one in results)
    assert all(one.samples == SIZES.samples for one in results)


class LastPageForgotten(TorchTransferEngine):
    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        return super().plan(device_pages[:-1], host_pages[:-1])


class TwoPagesSwapped(TorchTransferEngine):
    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        swapped = device_pages.copy()
        swapped[:2] = device_pages[1::-1]
        return super().plan(swapped, host_pages)


class LayerWrittenTwice(TorchTransferEngine):
    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        super().write_layer(plan, min(layer, 1))


class LayerNotLoaded(TorchTransferEngine):
    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        super().load_layer(plan, min(layer, 1))


class OnePageTooMany(TorchTransferEngine):
    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        device, host = (
            np.append(pages, np.setdiff1d(np.arange(16), pages)[0])
            for pages in (device_pages, host_pages)
        )
        return super().plan(device, host)


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (LastPageForgotten, "write leaves other bytes in host page"),
        (TwoPagesSwapped, "write leaves other bytes in host page"),
        (OnePageTooMany, "write leaves other bytes in host page"),
        (LayerWrittenTwice, "write leaves other bytes in host page"),
        (LayerNotLoaded, "load leaves other bytes in layer 2"),
    ],
)
@pytest.mark.parametrize(
    "layout", [0, 1, 2, 3], ids=["page_first", "page_first_direct", "layer_first", "page_head"]
)
def test_a_copy_that_is_wrong_fails_the_check(
    layout: int, engine: type[TorchTransferEngine], complaint: str
) -> None:
    step = benchmarks.copy.steps(quick=True, sizes=SIZES, create_engine=engine)[layout]
    with pytest.raises(CheckFailed, match=complaint):
        step.run()
