"""What the simulation knows of bytes, against the pools and the storage themselves."""

from __future__ import annotations

import numpy as np
import pytest
from sim_builders import ROOMY, key_of, rank

from hicache.layout import HostLayout
from hicache.sim.faults import TightAllocator
from hicache.sim.options import GEOMETRY
from hicache.storage import Piece
from hicache.storage.page_memory import page_views
from hicache.testing.stamped_kv import read_pages, stamp_of

KEY = key_of(1, 2, 3)


@pytest.mark.parametrize("layout", HostLayout)
def test_stored_bytes_are_those_of_the_host_pool(layout: HostLayout) -> None:
    system, _ = rank(layout=layout)
    rows, pages = system.stamps.rows(KEY), np.array([4, 0, 7])
    system.host_bytes.put(pages, rows)
    for page, page_hash in zip(pages.tolist(), system.stamps.hashes(KEY), strict=True):
        pieces = [Piece(*piece) for piece in system.host_pools[0].page_pieces(page)]
        held = b"".join(page_views(tuple(pieces)))
        assert held == system.stamps.stored_bytes(page_hash)
    system.abandon()


def test_rows_hold_the_stamps_of_a_key_and_are_shared_by_prefixes() -> None:
    system, _ = rank()
    rows = system.stamps.rows(KEY)
    assert system.stamps.rows(key_of(1, 2, 9))[:2] == rows[:2]
    assert system.stamps.rows(key_of(1, 2, 3, cache_salt="a")) != rows
    assert system.stamps.known_rows(KEY.namespace, KEY.prefix(4).data) == rows[:2]
    assert system.stamps.known_rows(b"other", KEY.data) is None
    assert system.stamps.rows(key_of()) == []
    system.device_bytes.put(np.array([5, 1, 2]), rows)
    held = read_pages(system.pools[0], np.array([5, 1, 2]))
    assert held.equal(stamp_of(KEY, GEOMETRY))
    system.abandon()


def test_many_rows_stay_what_they_are_when_the_table_grows() -> None:
    system, _ = rank()
    keys = [key_of(page, page + 1) for page in range(100)]
    rows = [system.stamps.rows(key) for key in keys]
    for key, (first, second) in zip(keys, rows, strict=True):
        system.device_bytes.put(np.array([3, 4]), [first, second])
        assert read_pages(system.pools[0], np.array([3, 4])).equal(stamp_of(key, GEOMETRY))
    system.abandon()


@pytest.mark.parametrize("layer", range(GEOMETRY.num_layers))
def test_one_element_that_differs_is_found_in_its_layer(layer: int) -> None:
    system, _ = rank()
    rows, pages = system.stamps.rows(KEY), np.array([2, 6, 3])
    system.device_bytes.put(pages, rows)
    assert system.device_bytes.wrong(pages, rows) == []
    system.pools[0].layer_parts(layer)[1][6, 1, 0, 5] += 1
    assert system.device_bytes.wrong(pages, rows) == [1]
    assert system.device_bytes.wrong(pages, rows, layer=layer) == [1]
    assert system.device_bytes.wrong(pages, rows, layer=1 - layer) == []
    system.abandon()


def test_a_broken_copy_leaves_garbage_in_its_layer_alone() -> None:
    system, _ = rank()
    rows, pages = system.stamps.rows(KEY), np.array([2, 6, 3])
    system.device_bytes.put(pages, rows)
    system.device_bytes.scribble(pages[:1], 1)
    assert system.device_bytes.wrong(pages, rows, layer=0) == []
    assert system.device_bytes.wrong(pages, rows, layer=1) == [0]
    system.abandon()


def test_withheld_pages_are_not_given_and_freed_pages_are_poisoned() -> None:
    poisoned: list[int] = []
    allocator = TightAllocator(4, poison=lambda pages: poisoned.extend(pages.tolist()))
    assert sorted(poisoned) == [0, 1, 2, 3]
    allocator.num_withheld = 3
    assert allocator.num_available == 1
    assert allocator.alloc(2) is None
    taken = allocator.alloc(1)
    assert taken is not None
    assert allocator.num_available == 0
    allocator.num_withheld = 0
    poisoned.clear()
    allocator.free(taken)
    assert poisoned == taken.tolist()
    assert allocator.num_available == 4


def test_a_store_notices_wrong_bytes_and_the_backend_damaged_ones() -> None:
    system, _ = rank(max_store_pages=ROOMY.max_store_pages)
    store = system.store
    store.fill(KEY)
    first, second, third = store.keys
    assert store.violations == []
    stored = store.find(store.namespace_digest, first)
    assert stored is not None
    store.put(store.namespace_digest, second, stored, max_bytes=None)
    assert store.violations == [f"page {second.hex()[:8]} was stored with other bytes"]
    store.lose(third)
    assert store.keys == [first, second]
    store.damage(first, truncate=True)
    cut = store.find(store.namespace_digest, first)
    assert cut is not None
    assert len(cut.payload) == GEOMETRY.page_bytes - 1
    system.abandon()
