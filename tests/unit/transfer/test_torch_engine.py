"""The laws of copies: what moves is exact, and nothing else changes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hicache.errors import ConfigError, OwnershipError
from hicache.layout import HostLayout, KVGeometry, MlaGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool, HostKVPool, create_host_pool
from hicache.transfer.torch_engine import TorchTransferEngine, TransferEngine, TransferPlan

if TYPE_CHECKING:
    from hicache.pools import DevicePool, LayerCounter

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn"]
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [
    "cpu",
    pytest.param("cuda", marks=CUDA),
    pytest.param("cuda pinned", marks=CUDA),
]
KINDS = ["mha", "mla"]
# Enough pages that a run can be long enough to be copied on its own, whatever the page size.
NUM_PAGES = {1: 2000, 16: 96, 64: 32}


@dataclasses.dataclass(frozen=True)
class Bench:
    """Two pools of random bytes, and the engine between them."""

    device: DeviceKVPool | DeviceMlaPool
    host: HostKVPool
    engine: TransferEngine
    rng: np.random.Generator

    def snapshot(self, pool: DevicePool | HostKVPool) -> npt.NDArray[np.uint8]:
        """All bytes of `pool` as `[num_parts, num_layers, num_pages, bytes of a row]`."""
        layers = [pool.layer_parts(layer) for layer in range(pool.geometry.num_layers)]
        return np.array(
            [[bytes_of_pages(part) for part in parts] for parts in zip(*layers, strict=True)]
        )

    def write(self, plan: TransferPlan) -> None:
        for layer in range(self.engine.num_layers):
            self.engine.write_layer(plan, layer)
        self.synchronize()

    def load(self, plan: TransferPlan) -> None:
        for layer in range(self.engine.num_layers):
            self.engine.load_layer(plan, layer)
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def random_plan(self) -> TransferPlan:
        """Half of the pools as one run, an eighth as single pages, the rest left alone."""
        num_pages = self.device.num_pages
        half, eighth = num_pages // 2, num_pages // 8
        device = np.append(np.arange(half), half + self.rng.permutation(half)[:eighth])
        host = np.append(half + np.arange(half), self.rng.permutation(half)[:eighth])
        order = self.rng.permutation(len(host))
        return self.engine.plan(device[order], host[order])


def bytes_of_pages(pages: torch.Tensor) -> npt.NDArray[np.uint8]:
    return pages.cpu().contiguous().view(torch.uint8).flatten(1).numpy()


def fill_randomly(pool: DevicePool | HostKVPool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(pool.geometry.num_layers):
        for view in pool.layer_parts(layer):
            shape = (*view.shape[:-1], view.shape[-1] * view.element_size())
            noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            view.copy_(noise.view(view.dtype))


def device_pool(
    kind: str, *, row_elements: int, dtype: str, page_size: int, place: str
) -> DeviceKVPool | DeviceMlaPool:
    """A pool of either kind, with as many elements in a row."""
    num_pages, torch_device = NUM_PAGES[page_size], torch.device(place)
    if kind == "mha":
        geometry = KVGeometry(
            num_layers=2,
            num_kv_heads=3,
            head_dim=row_elements // 3,
            dtype=dtype,
            page_size=page_size,
        )
        return DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch_device)
    latent = MlaGeometry(
        num_layers=2,
        kv_lora_rank=row_elements - 2,
        qk_rope_head_dim=2,
        dtype=dtype,
        page_size=page_size,
    )
    return DeviceMlaPool(latent, num_pages=num_pages, torch_device=torch_device)


MakeBench: TypeAlias = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    benches: list[Bench] = []

    def make(
        *,
        kind: str = "mha",
        layout: HostLayout = HostLayout.PAGE_FIRST,
        place: str = "cpu",
        dtype: str = "float32",
        page_size: int = 16,
        row_elements: int = 48,
        staging_bytes: int = 8 << 10,
        seed: int = 11,
    ) -> Bench:
        name, _, pinned = place.partition(" ")
        device = device_pool(
            kind, row_elements=row_elements, dtype=dtype, page_size=page_size, place=name
        )
        host = create_host_pool(
            device.geometry,
            num_pages=device.num_pages,
            layout=layout,
            pinned=bool(pinned),
            huge_pages=False,
        )
        fill_randomly(device, seed)
        fill_randomly(host, seed + 1)
        engine = TorchTransferEngine(device, host, staging_bytes=staging_bytes)
        benches.append(Bench(device, host, engine, np.random.default_rng(seed)))
        return benches[-1]

    yield make
    for bench in benches:
        bench.host.close()


@pytest.fixture(
    params=itertools.product(KINDS, HostLayout, DTYPES, NUM_PAGES),
    ids=lambda case: f"{case[0]}-{case[1].value}-{case[2]}-page{case[3]}",
)
def bench(request: pytest.FixtureRequest, make_bench: MakeBench, place: str) -> Bench:
    kind, layout, dtype, page_size = request.param
    return make_bench(kind=kind, layout=layout, place=place, dtype=dtype, page_size=page_size)


@pytest.mark.parametrize("place", PLACES)
def test_a_write_moves_exactly_its_pages_and_leaves_the_source(bench: Bench) -> None:
    plan = bench.random_plan()
    source, expected = bench.snapshot(bench.device), bench.snapshot(bench.host)
    expected[:, :, plan.host_pages] = source[:, :, plan.device_pages]
    bench.write(plan)
    np.testing.assert_array_equal(bench.snapshot(bench.host), expected)
    np.testing.assert_array_equal(bench.snapshot(bench.device), source)


@pytest.mark.parametrize("place", PLACES)
def test_a_load_moves_exactly_its_pages_and_leaves_the_source(bench: Bench) -> None:
    plan = bench.random_plan()
    expected, source = bench.snapshot(bench.device), bench.snapshot(bench.host)
    expected[:, :, plan.device_pages] = source[:, :, plan.host_pages]
    bench.load(plan)
    np.testing.assert_array_equal(bench.snapshot(bench.device), expected)
    np.testing.assert_array_equal(bench.snapshot(bench.host), source)


@pytest.mark.parametrize("place", PLACES)
def test_what_was_written_comes_back_to_other_pages(bench: Bench) -> None:
    plan = bench.random_plan()
    written = bench.snapshot(bench.device)[:, :, plan.device_pages]
    bench.write(plan)
    others = bench.rng.permutation(bench.device.num_pages)[: len(plan.host_pages)]
    bench.load(bench.engine.plan(others, plan.host_pages))
    np.testing.assert_array_equal(bench.snapshot(bench.device)[:, :, others], written)


@pytest.mark.parametrize("page_size", NUM_PAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plans_of_these_tests_have_pages_of_both_kinds(
    make_bench: MakeBench, dtype: str, page_size: int
) -> None:
    plan = make_bench(dtype=dtype, page_size=page_size).random_plan()
    assert len(plan.runs) >= 1
    assert len(plan.scattered_host) >= 1


@pytest.mark.parametrize("layout", HostLayout)
def test_a_copy_of_one_layer_leaves_the_others(make_bench: MakeBench, layout: HostLayout) -> None:
    bench = make_bench(layout=layout)
    plan = bench.random_plan()
    source, expected = bench.snapshot(bench.device), bench.snapshot(bench.host)
    expected[:, 1, plan.host_pages] = source[:, 1, plan.device_pages]
    bench.engine.write_layer(plan, 1)
    np.testing.assert_array_equal(bench.snapshot(bench.host), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize(
    ("dtype", "row_bytes"),
    [("float16", 30), ("bfloat16", 30), ("float8_e4m3fn", 15), ("float8_e5m2", 15)],
)
def test_rows_of_odd_size_are_copied_too(
    make_bench: MakeBench, layout: HostLayout, dtype: str, row_bytes: int, kind: str
) -> None:
    bench = make_bench(kind=kind, layout=layout, dtype=dtype, row_elements=15, page_size=1)
    assert bench.device.geometry.row_bytes == row_bytes
    plan = bench.random_plan()
    source, expected = bench.snapshot(bench.device), bench.snapshot(bench.host)
    expected[:, :, plan.host_pages] = source[:, :, plan.device_pages]
    bench.write(plan)
    np.testing.assert_array_equal(bench.snapshot(bench.host), expected)


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("staging_bytes", [0, 1 << 10, 1 << 26])
def test_the_size_of_the_buffer_changes_nothing_that_is_copied(
    make_bench: MakeBench, layout: HostLayout, staging_bytes: int
) -> None:
    bench = make_bench(layout=layout, staging_bytes=staging_bytes)
    plan = bench.random_plan()
    expected, source = bench.snapshot(bench.device), bench.snapshot(bench.host)
    expected[:, :, plan.device_pages] = source[:, :, plan.host_pages]
    bench.load(plan)
    np.testing.assert_array_equal(bench.snapshot(bench.device), expected)


@pytest.mark.parametrize("layout", HostLayout)
def test_copies_allocate_no_memory_for_bytes(make_bench: MakeBench, layout: HostLayout) -> None:
    bench = make_bench(layout=layout, page_size=1)
    plan = bench.random_plan()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        bench.write(plan)
        bench.load(plan)
    allocated_bytes = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert "aten::copy_" in allocated_bytes
    assert "aten::index_copy_" in allocated_bytes
    page_layer_bytes = bench.host.geometry.page_layer_bytes
    assert {op: n for op, n in allocated_bytes.items() if n >= page_layer_bytes} == {}


@pytest.mark.parametrize("layout", HostLayout)
def test_a_write_and_a_load_at_the_same_time_do_not_disturb_each_other(
    make_bench: MakeBench, layout: HostLayout
) -> None:
    bench = make_bench(layout=layout, page_size=1)
    num_pages = bench.device.num_pages
    half = num_pages // 2
    device, host = bench.rng.permutation(num_pages), bench.rng.permutation(num_pages)
    write = bench.engine.plan(device[:half], host[:half])
    load = bench.engine.plan(device[half:], host[half:])
    on_device, on_host = bench.snapshot(bench.device), bench.snapshot(bench.host)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            for done in [threads.submit(bench.write, write), threads.submit(bench.load, load)]:
                done.result(timeout=60)
    on_host[:, :, host[:half]] = on_device[:, :, device[:half]]
    on_device[:, :, device[half:]] = on_host[:, :, host[half:]]
    np.testing.assert_array_equal(bench.snapshot(bench.device), on_device)
    np.testing.assert_array_equal(bench.snapshot(bench.host), on_host)


@pytest.mark.parametrize("layout", HostLayout)
def test_no_pages_can_be_copied(make_bench: MakeBench, layout: HostLayout) -> None:
    bench = make_bench(layout=layout)
    nothing = np.empty(0, dtype=np.int64)
    before = bench.snapshot(bench.host)
    plan = bench.engine.plan(nothing, nothing)
    bench.write(plan)
    assert bench.engine.layer_bytes(plan) == 0
    np.testing.assert_array_equal(bench.snapshot(bench.host), before)


@pytest.mark.parametrize(("kind", "num_parts"), [("mha", 2), ("mla", 1)])
def test_layer_bytes_are_those_of_all_parts_of_one_layer(
    make_bench: MakeBench, kind: str, num_parts: int
) -> None:
    bench = make_bench(kind=kind, dtype="bfloat16", page_size=64)
    plan = bench.engine.plan(np.array([3, 9, 1]), np.array([0, 1, 2]))
    assert bench.engine.layer_bytes(plan) == num_parts * 3 * 64 * (48 * 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", HostLayout)
def test_pages_of_one_token_are_not_copied_one_by_one(
    make_bench: MakeBench, layout: HostLayout, kind: str
) -> None:
    bench = make_bench(kind=kind, layout=layout, page_size=1, staging_bytes=1 << 20)
    num_pages = bench.device.num_pages
    plan = bench.engine.plan(bench.rng.permutation(num_pages), bench.rng.permutation(num_pages))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bench.write(plan)
        bench.load(plan)
    assert sum(event.count for event in profile.key_averages()) < num_pages / 4


class ForeignPool:
    """An engine's own pool: a tensor for each layer, by token."""

    def __init__(self, geometry: KVGeometry, num_pages: int) -> None:
        self.geometry = geometry
        self.num_pages = num_pages
        self.torch_device = torch.device("cpu")
        shape = (num_pages * geometry.page_size, geometry.num_kv_heads, geometry.head_dim)
        self.k, self.v = [[torch.rand(shape) for _ in range(geometry.num_layers)] for _ in "kv"]

    def layer_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            rows.view(self.num_pages, -1, *rows.shape[1:])
            for rows in (self.k[layer], self.v[layer])
        )

    def register_layer_transfer_counter(self, counter: LayerCounter | None) -> None:
        del counter


@pytest.mark.parametrize("layout", HostLayout)
def test_an_engines_own_pool_can_be_a_side(make_bench: MakeBench, layout: HostLayout) -> None:
    host = make_bench(layout=layout).host
    assert isinstance(host.geometry, KVGeometry)
    pool = ForeignPool(host.geometry, num_pages=7)
    device: DevicePool = pool
    engine = TorchTransferEngine(device, host)
    engine.write_layer(engine.plan(np.array([6, 0]), np.array([1, 90])), 0)
    keys, values = host.layer_parts(0)
    assert torch.equal(keys[90], pool.k[0][:16])
    assert torch.equal(values[1], pool.v[0][6 * 16 :])


def test_pools_of_different_geometry_are_refused(make_bench: MakeBench) -> None:
    mha, mla = make_bench(kind="mha"), make_bench(kind="mla")
    assert isinstance(mha.host.geometry, KVGeometry)
    other = dataclasses.replace(mha.host.geometry, num_layers=3)
    for device in (ForeignPool(other, num_pages=2), mla.device):
        with pytest.raises(ConfigError, match="device pool and host pool differ"):
            TorchTransferEngine(device, mha.host)


@pytest.mark.parametrize("wrong", [-1, NUM_PAGES[16]])
@pytest.mark.parametrize("side", ["device", "host"])
def test_a_page_outside_its_pool_is_refused(make_bench: MakeBench, wrong: int, side: str) -> None:
    sides = {"device": np.array([0, 1]), "host": np.array([0, 1])}
    sides[side][1] = wrong
    with pytest.raises(OwnershipError, match=f"1 pages are not in the {side} pool .*{wrong}"):
        make_bench().engine.plan(sides["device"], sides["host"])
