"""The device pools: one memory under all views, and who waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch

from hicache.errors import CapacityError, ConfigError
from hicache.layout import DTYPE_BYTES, KVGeometry, MlaGeometry, RowGeometry
from hicache.pools import DeviceKVPool, DeviceMlaPool, DeviceRowPool

if TYPE_CHECKING:
    from hicache.pools import DevicePool

NUM_LAYERS, NUM_PAGES, PAGE_SIZE = 3, 5, 4
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
RANK, ROPE = 5, 2
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]

AnyPool: TypeAlias = DeviceKVPool | DeviceMlaPool | DeviceRowPool


def page_of(dtype: str) -> dict[str, Any]:
    return {"num_layers": NUM_LAYERS, "dtype": dtype, "page_size": PAGE_SIZE}


def kv_pool(
    device: str = "cpu", dtype: str = "float32", num_pages: int = NUM_PAGES
) -> DeviceKVPool:
    geometry = KVGeometry(num_kv_heads=2, head_dim=4, **page_of(dtype))
    return DeviceKVPool(geometry, num_pages=num_pages, torch_device=torch.device(device))


def mla_pool(
    device: str = "cpu", dtype: str = "float32", num_pages: int = NUM_PAGES
) -> DeviceMlaPool:
    geometry = MlaGeometry(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, **page_of(dtype))
    return DeviceMlaPool(geometry, num_pages=num_pages, torch_device=torch.device(device))


def row_pool(
    device: str = "cpu", dtype: str = "float32", num_pages: int = NUM_PAGES
) -> DeviceRowPool:
    geometry = RowGeometry(name="indexer", width=3, **page_of(dtype))
    return DeviceRowPool(geometry, num_pages=num_pages, torch_device=torch.device(device))


MakePool: TypeAlias = Callable[..., AnyPool]
POOLS = pytest.mark.parametrize("make_pool", [kv_pool, mla_pool, row_pool])
ROWS = {kv_pool: [(2, 4), (2, 4)], mla_pool: [(1, RANK + ROPE)], row_pool: [(1, 3)]}


class RecordingCounter:
    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait_until(self, layer: int) -> None:
        self.waited.append(layer)


def buffers(pool: AnyPool, layer: int) -> tuple[torch.Tensor, ...]:
    """What the model reads of a layer, part by part."""
    if isinstance(pool, DeviceKVPool):
        return pool.get_kv_buffer(layer)
    if isinstance(pool, DeviceMlaPool):
        return (pool.get_key_buffer(layer),)
    return (pool.get_row_buffer(layer),)


@POOLS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_new_pool_is_zero_and_shaped_by_its_geometry(
    make_pool: MakePool, device: str, dtype: str
) -> None:
    pool: DevicePool = make_pool(device, dtype)
    for layer in range(NUM_LAYERS):
        parts = pool.layer_parts(layer)
        assert [part.shape for part in parts] == [
            (NUM_PAGES, PAGE_SIZE, *row) for row in ROWS[make_pool]
        ]
        for part in parts:
            assert part.dtype == getattr(torch, dtype)
            assert part.device.type == pool.torch_device.type
            assert part.is_contiguous()
            assert not part.view(torch.uint8).any()


@POOLS
def test_token_buffers_and_page_views_are_the_same_memory_and_no_two_layers_share_any(
    make_pool: MakePool,
) -> None:
    pool = make_pool()
    for layer in range(NUM_LAYERS):
        for number, rows in enumerate(buffers(pool, layer)):
            rows.fill_(2 * layer + number)
    for layer in range(NUM_LAYERS):
        found = zip(buffers(pool, layer), pool.layer_parts(layer), strict=True)
        for number, (rows, part) in enumerate(found):
            assert (part == 2 * layer + number).all()
            assert rows.shape == (NUM_SLOTS, *ROWS[make_pool][number])
            assert rows.data_ptr() == part.data_ptr()


def test_keys_and_values_are_the_parts_of_a_kv_pool() -> None:
    pool = kv_pool()
    for layer in range(NUM_LAYERS):
        keys, values = pool.layer_parts(layer)
        assert pool.key_pages(layer).shape == pool.value_pages(layer).shape == keys.shape
        for view in (pool.key_pages(layer), pool.get_key_buffer(layer)):
            assert view.data_ptr() == keys.data_ptr()
        for view in (pool.value_pages(layer), pool.get_value_buffer(layer)):
            assert view.data_ptr() == values.data_ptr()


def test_the_values_of_latent_rows_are_their_heads() -> None:
    pool = mla_pool()
    for layer in range(NUM_LAYERS):
        rows, latents = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
        assert latents.shape == (NUM_SLOTS, 1, RANK)
        rows.copy_(torch.rand_like(rows))
        assert torch.equal(latents, rows[:, :, :RANK])
        assert latents.data_ptr() == rows.data_ptr()


def slots_and_rows(device: str, *dims: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    slots = torch.tensor([7, 2, 19], device=device)
    return slots, [torch.rand(3, 1, dim, device=device) for dim in dims]


@pytest.mark.parametrize("device", DEVICES)
def test_stored_keys_and_values_are_at_their_slots_and_nothing_else_changes(device: str) -> None:
    pool = kv_pool(device)
    slots = torch.tensor([7, 2, 19], device=device)
    k, v = torch.rand(2, 3, 2, 4, device=device)
    pool.set_kv_buffer(1, slots, k, v)
    for layer in range(NUM_LAYERS):
        expected = torch.zeros(2, NUM_SLOTS, 2, 4, device=device)
        if layer == 1:
            for position, slot in enumerate([7, 2, 19]):
                expected[0, slot], expected[1, slot] = k[position], v[position]
        assert torch.equal(torch.stack(pool.get_kv_buffer(layer)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_stored_latent_rows_are_at_their_slots_and_nothing_else_changes(device: str) -> None:
    pool = mla_pool(device)
    slots, (latent, rope_key) = slots_and_rows(device, RANK, ROPE)
    pool.set_kv_buffer(1, slots, latent, rope_key)
    for layer in range(NUM_LAYERS):
        expected = torch.zeros(NUM_SLOTS, 1, RANK + ROPE, device=device)
        if layer == 1:
            for position, slot in enumerate([7, 2, 19]):
                expected[slot, 0] = torch.cat([latent[position, 0], rope_key[position, 0]])
        assert torch.equal(pool.get_key_buffer(layer), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_stored_rows_are_at_their_slots_and_nothing_else_changes(device: str) -> None:
    pool = row_pool(device)
    slots, (rows,) = slots_and_rows(device, 3)
    pool.set_row_buffer(1, slots, rows)
    for layer in range(NUM_LAYERS):
        expected = torch.zeros(NUM_SLOTS, 1, 3, device=device)
        if layer == 1:
            for position, slot in enumerate([7, 2, 19]):
                expected[slot] = rows[position]
        assert torch.equal(pool.get_row_buffer(layer), expected)


@POOLS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [name for name, size in DTYPE_BYTES.items() if size == 1])
def test_fp8_is_stored_bit_by_bit(make_pool: MakePool, device: str, dtype: str) -> None:
    """Every bit pattern, also those that are no numbers."""
    pool = make_pool(device, dtype)
    slots = torch.tensor([7, 2, 19], device=device)
    patterns = torch.arange(3 * 8, dtype=torch.uint8, device=device).view(3, 2, 4) * 11
    if isinstance(pool, DeviceKVPool):
        rows = [patterns, 255 - patterns]
        pool.set_kv_buffer(1, slots, *(row.view(getattr(torch, dtype)) for row in rows))
    elif isinstance(pool, DeviceMlaPool):
        rows = [patterns.flatten(1)[:, None, : RANK + ROPE].contiguous()]
        whole = rows[0].view(getattr(torch, dtype))
        pool.set_kv_buffer(1, slots, whole[..., :RANK], whole[..., RANK:])
    else:
        rows = [patterns.flatten(1)[:, None, :3].contiguous()]
        pool.set_row_buffer(1, slots, rows[0].view(getattr(torch, dtype)))
    for found, row in zip(buffers(pool, 1), rows, strict=True):
        stored = found.view(torch.uint8)
        assert torch.equal(stored[slots], row)
        others = torch.ones(NUM_SLOTS, dtype=torch.bool, device=device)
        others[slots] = False
        assert not stored[others].any()


def test_every_reader_of_a_layer_waits_for_that_layer() -> None:
    kv, mla, rows = kv_pool(), mla_pool(), row_pool()
    readers: list[tuple[AnyPool, list[Callable[[int], object]]]] = [
        (kv, [kv.get_key_buffer, kv.get_value_buffer, kv.get_kv_buffer]),
        (mla, [mla.get_key_buffer, mla.get_value_buffer]),
        (rows, [rows.get_row_buffer]),
    ]
    for pool, reads in readers:
        counter = RecordingCounter()
        pool.register_layer_transfer_counter(counter)
        for layer, read in enumerate(reads):
            read(layer)
        assert counter.waited == list(range(len(reads)))


def test_copy_engines_and_new_tokens_wait_for_nothing() -> None:
    kv, mla, rows = kv_pool(), mla_pool(), row_pool()
    counter = RecordingCounter()
    for pool in (kv, mla, rows):
        pool.register_layer_transfer_counter(counter)
        pool.layer_parts(0)
    kv.key_pages(0)
    kv.value_pages(0)
    slot = torch.tensor([0])
    kv.set_kv_buffer(0, slot, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    mla.set_kv_buffer(0, slot, torch.zeros(1, 1, RANK), torch.zeros(1, 1, ROPE))
    rows.set_row_buffer(0, slot, torch.zeros(1, 1, 3))
    assert counter.waited == []


@POOLS
def test_an_unregistered_counter_is_not_asked_again(make_pool: MakePool) -> None:
    pool, counter = make_pool(), RecordingCounter()
    pool.register_layer_transfer_counter(counter)
    pool.register_layer_transfer_counter(None)
    buffers(pool, 0)
    assert counter.waited == []


@POOLS
def test_a_pool_has_a_page(make_pool: MakePool) -> None:
    with pytest.raises(ConfigError, match="num_pages must be at least 1"):
        make_pool(num_pages=0)


@POOLS
@pytest.mark.parametrize("device", DEVICES)
def test_more_than_the_device_has_is_refused_with_the_numbers(
    make_pool: MakePool, device: str
) -> None:
    page_bytes = make_pool().geometry.page_bytes
    num_pages = (1 << 50) // page_bytes
    with pytest.raises(CapacityError, match=f"{num_pages * page_bytes} bytes"):
        make_pool(device, num_pages=num_pages)
