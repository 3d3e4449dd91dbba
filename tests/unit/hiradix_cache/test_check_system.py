"""The checker of whole-cache invariants finds each kind of lost or shared page."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Rig, config_for, tokens

from hicache.errors import ConfigError
from hicache.radix import RadixKey
from hicache.testing.invariants import check_system

KEY = RadixKey(tokens(1, 2, 3))


def test_a_sound_cache_has_no_violation_whoever_owns_the_pages() -> None:
    with Rig() as rig:
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.insert(KEY)
        request = rig.device_pages.alloc(2)
        assert request is not None
        assert check_system(rig.cache, request_device_pages=[request]) == []
        rig.cache.reset()
        assert check_system(rig.cache, request_device_pages=[request]) == []
        rig.device_pages.free(request)
        gate.open()


@pytest.mark.parametrize("pool", ["device", "host"])
def test_a_page_that_nobody_owns_is_found(pool: str) -> None:
    with Rig() as rig:
        allocator = rig.device_pages if pool == "device" else rig.host_pages
        lost = allocator.alloc(2)
        assert lost is not None
        assert check_system(rig.cache) == [f"2 {pool} page(s) have no owner: 0, 1"]
        allocator.free(lost)


def test_a_page_with_two_owners_is_found() -> None:
    with Rig(config_for()) as rig:
        node = rig.insert(KEY).node
        rig.settle()
        assert node.device_pages is not None
        assert node.host_pages is not None
        shared = node.device_pages[:1]
        assert check_system(rig.cache, request_device_pages=[shared]) == [
            f"device page {shared[0]} belongs to the tree and to a request"
        ]
        rig.host_pages.free(node.host_pages[1:2])
        page = node.host_pages[1]
        assert check_system(rig.cache) == [
            f"host page {page} belongs to the free list and to the tree"
        ]
        assert rig.host_pages.alloc(1) == [page]


def test_a_page_that_the_pool_does_not_have_is_found() -> None:
    with Rig() as rig:
        foreign = np.array([8])
        assert check_system(rig.cache, request_device_pages=[foreign]) == [
            "device page 8 of a request is not in the pool"
        ]


def test_what_the_tree_says_against_itself_is_found() -> None:
    with Rig() as rig:
        node = rig.insert(KEY).node
        rig.settle()
        node.host_lock_ref = -1
        assert any("negative lock" in violation for violation in check_system(rig.cache))
        node.host_lock_ref = 0


def test_a_free_list_that_cannot_be_looked_into_is_refused() -> None:
    class Opaque:
        num_pages = num_available = 8

    with Rig() as rig:
        rig.cache.controller.device_allocator = Opaque()  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="device pool is a Opaque; build the cache on"):
            check_system(rig.cache)
        rig.cache.controller.device_allocator = rig.device_pages
