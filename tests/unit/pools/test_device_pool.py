"""The device pool: one memory under all views, and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hicache.errors import CapacityError, ConfigError
from hicache.layout import KVGeometry
from hicache.pools.device import DeviceKVPool

if TYPE_CHECKING:
    from hicache.pools.base import DevicePool

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", page_size=4)
NUM_PAGES = 5
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


def make_pool(device: str = "cpu", geometry: KVGeometry = GEOMETRY) -> DeviceKVPool:
    return DeviceKVPool(geometry, num_pages=NUM_PAGES, torch_device=torch.device(device))


class RecordingCounter:
    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait_until(self, layer: int) -> None:
        self.waited.append(layer)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_new_pool_is_zero_and_shaped_by_its_geometry(device: str, dtype: str) -> None:
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype, page_size=4)
    pool: DevicePool = make_pool(device, geometry)
    for layer in range(3):
        for pages in (pool.key_pages(layer), pool.value_pages(layer)):
            assert pages.shape == (NUM_PAGES, 4, 2, 4)
            assert pages.dtype == getattr(torch, dtype)
            assert pages.device.type == pool.torch_device.type
            assert pages.is_contiguous()
            assert not pages.any()


def test_token_buffers_and_page_views_are_the_same_memory_and_no_two_layers_share_any() -> None:
    pool = make_pool()
    for layer in range(3):
        pool.get_key_buffer(layer).fill_(2 * layer)
        pool.get_value_buffer(layer).fill_(2 * layer + 1)
    for layer in range(3):
        assert (pool.key_pages(layer) == 2 * layer).all()
        assert (pool.value_pages(layer) == 2 * layer + 1).all()
        key, value = pool.get_kv_buffer(layer)
        assert key.shape == value.shape == (NUM_PAGES * 4, 2, 4)
        assert key.data_ptr() == pool.key_pages(layer).data_ptr()
        assert value.data_ptr() == pool.value_pages(layer).data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_stored_tokens_are_at_their_slots_and_nothing_else_changes(device: str) -> None:
    pool = make_pool(device)
    slots = torch.tensor([7, 2, 19], device=device)
    k, v = torch.rand(2, 3, 2, 4, device=device)
    pool.set_kv_buffer(1, slots, k, v)
    for layer in range(3):
        expected = torch.zeros(2, NUM_PAGES * 4, 2, 4, device=device)
        if layer == 1:
            for position, slot in enumerate([7, 2, 19]):
                expected[0, slot], expected[1, slot] = k[position], v[position]
        assert torch.equal(torch.stack(pool.get_kv_buffer(layer)), expected)


def test_every_reader_of_a_layer_waits_for_that_layer() -> None:
    pool, counter = make_pool(), RecordingCounter()
    pool.register_layer_transfer_counter(counter)
    pool.get_key_buffer(0)
    pool.get_value_buffer(1)
    pool.get_kv_buffer(2)
    assert counter.waited == [0, 1, 2]


def test_copy_engines_and_new_tokens_wait_for_nothing() -> None:
    pool, counter = make_pool(), RecordingCounter()
    pool.register_layer_transfer_counter(counter)
    pool.key_pages(0)
    pool.value_pages(0)
    row = torch.zeros(1, 2, 4)
    pool.set_kv_buffer(0, torch.tensor([0]), row, row)
    assert counter.waited == []


def test_an_unregistered_counter_is_not_asked_again() -> None:
    pool, counter = make_pool(), RecordingCounter()
    pool.register_layer_transfer_counter(counter)
    pool.register_layer_transfer_counter(None)
    pool.get_kv_buffer(0)
    assert counter.waited == []


def test_a_pool_has_a_page() -> None:
    with pytest.raises(ConfigError, match="num_pages must be at least 1"):
        DeviceKVPool(GEOMETRY, num_pages=0, torch_device=torch.device("cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_the_device_has_is_refused_with_the_numbers(device: str) -> None:
    num_pages = (1 << 50) // GEOMETRY.page_bytes
    with pytest.raises(CapacityError, match=f"{num_pages * GEOMETRY.page_bytes} bytes"):
        DeviceKVPool(GEOMETRY, num_pages=num_pages, torch_device=torch.device(device))
