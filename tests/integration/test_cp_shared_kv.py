"""Ranks that share the pages of a prompt: each copies, stores and restores those that it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from cp_ranks import PAGE_SIZE, CpRank, run_ranks

from hicache.config import HiCacheConfig
from hicache.device import create_device
from hicache.errors import ConfigError
from hicache.hiradix_cache import create_hiradix_cache
from hicache.layout import KVGeometry
from hicache.pools import CpPageAllocator, CpSharedKVLayout, DeviceKVPool, PageAllocator
from hicache.radix import RadixKey

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.pools import Allocator

SIZES = [2, 3, 4]


def key_of(num_pages: int, start: int = 0) -> RadixKey:
    return RadixKey(range(start, start + num_pages * PAGE_SIZE))


def storage(path: Path) -> dict[str, object]:
    return {
        "backend": "file",
        "extra_config": {"path": str(path), "min_free_bytes": 0},
        "model_name": "model",
        "weights_revision": "1",
    }


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_brings_back_its_own_pages_to_pages_of_the_same_owners(size: int) -> None:
    key = key_of(7)

    def script(rank: CpRank) -> list[int]:
        written = rank.insert(key)
        rank.settle()
        assert rank.forget_device() == 7
        loaded = rank.load(key)
        assert loaded is not None
        rank.verify(key, loaded)
        assert rank.owners(loaded) == rank.owners(written)
        return rank.owners(loaded)

    answers = run_ranks(size, script)
    assert all(answer == answers[0] for answer in answers)
    assert set(answers[0]) == set(range(size))


def test_a_rank_that_owns_nothing_of_a_prompt_ends_its_movements_like_the_others(
    tmp_path: Path,
) -> None:
    key = key_of(1)

    def script(rank: CpRank) -> int:
        rank.insert(key)
        rank.settle()
        rank.forget_device()
        loaded = rank.load(key)
        assert loaded is not None
        rank.verify(key, loaded)
        rank.settle()
        rank.forget_device()
        rank.cache.reset()
        assert rank.cache.prefetch_from_storage("two", key)
        rank.settle()
        assert rank.cache.pop_prefetch_loaded_tokens("two") == PAGE_SIZE
        loaded = rank.load(key)
        assert loaded is not None
        rank.verify(key, loaded)
        return rank.owners(loaded).count(rank.layout.cp_rank)

    assert sum(run_ranks(3, script, storage=storage(tmp_path))) == 1


@pytest.mark.parametrize("size", SIZES)
def test_what_ranks_have_stored_comes_back_whoever_owns_it_then(tmp_path: Path, size: int) -> None:
    key = key_of(7)

    def write(rank: CpRank) -> list[int]:
        pages = rank.insert(key)
        rank.settle()
        return rank.owners(pages)

    def read(rank: CpRank) -> list[int]:
        # Somebody was given a page before, so the turns of the owners are others.
        host_allocator = rank.cache.controller.host_allocator
        taken = host_allocator.alloc(1)
        assert taken is not None
        assert rank.cache.prefetch_from_storage("two", key)
        rank.settle()
        assert rank.cache.pop_prefetch_loaded_tokens("two") == len(key)
        loaded = rank.load(key)
        assert loaded is not None
        rank.verify(key, loaded)
        host_allocator.free(taken)
        return rank.owners(loaded)

    before = run_ranks(size, write, storage=storage(tmp_path))[0]
    after = run_ranks(size, read, storage=storage(tmp_path))[0]
    assert before != after


def test_engines_with_another_number_of_ranks_share_what_is_stored(tmp_path: Path) -> None:
    key = key_of(6)

    def write(rank: CpRank) -> None:
        rank.insert(key)
        rank.settle()

    def read(rank: CpRank) -> None:
        assert rank.cache.prefetch_from_storage("two", key)
        rank.settle()
        loaded = rank.load(key)
        assert loaded is not None
        assert len(loaded) == 6
        rank.verify(key, loaded)

    run_ranks(3, write, storage=storage(tmp_path))
    run_ranks(2, read, storage=storage(tmp_path))


def test_a_write_by_layer_copies_what_each_rank_has_of_every_layer() -> None:
    key = key_of(5)

    def script(rank: CpRank) -> None:
        pages = rank.allocator.alloc(5)
        assert pages is not None
        assert rank.cache.reserve_write("one", pages)
        for pool in rank.pools:
            for layer in range(pool.geometry.num_layers):
                rank.compute_layer(pool, layer, key, pages)
                pool.end_layer(layer)
        rank.cache.insert(key, pages, request_id="one", chunked=False)
        rank.settle()
        rank.forget_device()
        loaded = rank.load(key)
        assert loaded is not None
        rank.verify(key, loaded)

    run_ranks(3, script)


def test_a_reservation_that_nobody_uses_gives_its_pages_back_on_every_rank() -> None:
    def script(rank: CpRank) -> int:
        pages = rank.allocator.alloc(3)
        assert pages is not None
        assert rank.cache.reserve_write("one", pages)
        rank.cache.abandon_write("one")
        rank.settle()
        rank.allocator.free(pages)
        return rank.cache.controller.host_allocator.num_available

    assert run_ranks(2, script) == [32, 32]


def test_pages_of_other_owners_are_no_room_for_a_load() -> None:
    """Bytes never go from one rank to another: it is a miss, and nothing is lost."""
    key = key_of(2)

    def script(rank: CpRank) -> bool:
        rank.insert(key)
        rank.settle()
        rank.forget_device()
        # All that one rank has is in use by a request.
        held = rank.allocator.alloc_pages_with_owners(np.zeros(8, dtype=np.int64))
        assert held is not None
        assert rank.allocator.num_available == 8
        nothing = rank.load(key) is None
        rank.allocator.free(held)
        loaded = rank.load(key)
        assert loaded is not None
        rank.verify(key, loaded)
        return nothing

    assert run_ranks(2, script) == [True, True]


def test_a_host_that_is_full_for_one_owner_makes_room_and_stays_right() -> None:
    """Each prompt is one page of the same owner, so the pools fill unevenly."""
    keys = [key_of(1, start=100 * number) for number in range(12)]

    def script(rank: CpRank) -> list[bool]:
        for number, key in enumerate(keys):
            pages = rank.allocator.alloc_pages_with_owners(np.array([1]))
            if pages is None:
                rank.cache.evict(16)
                pages = rank.allocator.alloc_pages_with_owners(np.array([1]))
            assert pages is not None
            rank.compute(key, pages)
            rank.cache.insert(key, pages, request_id=str(number), chunked=False)
            rank.settle()
        rank.forget_device()
        found = []
        for key in keys:
            loaded = rank.load(key)
            found.append(loaded is not None)
            if loaded is not None:
                rank.verify(key, loaded)
                rank.settle()
                rank.forget_device()
        return found

    first, second = run_ranks(2, script, num_pages=4, host={"ratio": 1.0, "huge_pages": False})
    assert first == second
    # As many as the owner's host pool has.
    assert sum(first) == 4


@pytest.mark.parametrize(
    ("allocator", "num_pages", "message"),
    [
        ("plain", 8, "knows their owners"),
        ("cp", 4, "speaks of 4 pages"),
        ("small", 8, "16 logical"),
    ],
)
def test_a_layout_that_does_not_fit_pool_and_free_list_is_refused(
    allocator: str, num_pages: int, message: str
) -> None:
    layout = CpSharedKVLayout(
        cp_rank=0, cp_size=2, num_physical_pages=num_pages, page_size=PAGE_SIZE
    )
    smaller = CpSharedKVLayout(cp_rank=0, cp_size=2, num_physical_pages=2, page_size=PAGE_SIZE)
    geometry = KVGeometry(
        num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_size=PAGE_SIZE
    )
    allocators: dict[str, Allocator] = {
        "plain": PageAllocator(16),
        "cp": CpPageAllocator(layout),
        "small": CpPageAllocator(smaller),
    }
    with pytest.raises(ConfigError, match=message):
        create_hiradix_cache(
            HiCacheConfig(page_size=PAGE_SIZE),
            device=create_device("cpu"),
            device_pool=DeviceKVPool(geometry, num_pages=8, torch_device=torch.device("cpu")),
            device_allocator=allocators[allocator],
            cp_layout=layout,
        )
