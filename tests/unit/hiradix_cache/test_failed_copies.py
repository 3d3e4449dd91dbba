"""A copy between device and host that fails is a miss: nothing of it is published."""

from __future__ import annotations

import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, tokens
from scripted_parts import injected, memory_storage

from hicache.errors import TransferError
from hicache.hiradix_cache import LoadStatus
from hicache.radix import CopyKind, RadixKey
from hicache.storage.memory import MemoryPages
from hicache.types import WritePolicy

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(11, 12, 13))
LAYERS = range(GEOMETRY.num_layers)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_write_that_fails_in_one_layer_is_a_miss_and_gives_its_host_pages_back(
    layer: int,
) -> None:
    store = MemoryPages()
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store)) as rig:
        rig.engine.broken_writes.add(layer)
        rig.insert(KEY)
        rig.settle()
        assert rig.host_pages.num_available == 16
        stats = rig.cache.controller.stats
        assert stats[CopyKind.WRITE].outcomes == {"failed": 1}
        assert "InjectedCopyError" in stats[CopyKind.WRITE].last_error
        assert stats[CopyKind.PERSIST].num_operations == 0
        rig.insert(KEY)
        rig.settle()
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_a_failed_write_fails_the_copies_in_flight_below_it_too() -> None:
    with Rig() as rig:
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.engine.broken_writes.add(1)
        for end in range(1, 5):
            rig.insert(KEY.prefix(end * PAGE), chunked=end < 4)
        rig.insert(OTHER)
        gate.open()
        rig.settle()
        assert rig.host_pages.num_available == 16 - 3
        rig.evict_device()
        assert (rig.hit(KEY), rig.hit(OTHER)) == ((0, 0), (0, 3))


def test_pages_whose_eviction_waited_for_a_failed_write_are_free_all_the_same() -> None:
    with Rig(config_for(write_policy=WritePolicy.WRITE_BACK)) as rig:
        rig.engine.broken_writes.add(0)
        rig.insert(KEY)
        assert rig.cache.evict(4).num_pending == 4
        rig.settle()
        assert rig.device_pages.num_available == 8
        assert rig.hit(KEY) == (0, 0)


@pytest.mark.parametrize("broken", LAYERS)
def test_a_load_that_fails_raises_at_its_layer_publishes_nothing_and_gives_its_pages_back(
    broken: int,
) -> None:
    """C031, C046: whoever waits learns of it at once, and the next try is allowed."""
    with Rig() as rig:
        for key in (KEY, OTHER):
            rig.insert(key)
            rig.settle()
            rig.evict_device()
        rig.engine.broken_loads.add(broken)
        loads = [rig.begin_load(key) for key in (KEY, OTHER)]
        rig.counter.set_consumer(rig.cache.ready_to_load_host_cache())
        for layer in range(broken):
            rig.pool.get_kv_buffer(layer)
        for _waiter in loads:
            with pytest.raises(TransferError, match=f"layer {broken}.*computed again"):
                rig.pool.get_key_buffer(broken)
        rig.counter.set_consumer(())
        rig.settle()
        assert rig.device_pages.num_available == 8
        assert (rig.hit(KEY), rig.hit(OTHER)) == ((0, 4), (0, 3))
        assert [rig.load(key).status for key in (KEY, OTHER)] == [LoadStatus.QUEUED] * 2
        assert (rig.hit(KEY), rig.hit(OTHER)) == ((4, 0), (3, 0))


def test_a_lock_on_a_load_that_failed_is_given_back_like_any_other() -> None:
    with Rig() as rig:
        rig.insert(KEY)
        rig.settle()
        rig.evict_device()
        rig.engine.broken_loads.add(0)
        load = rig.begin_load(KEY)
        rig.cache.inc_lock_ref(load.node)
        rig.cache.ready_to_load_host_cache()
        rig.settle()
        assert rig.hit(KEY) == (0, 4)
        rig.cache.dec_lock_ref(load.node)
        assert rig.load(KEY).status is LoadStatus.QUEUED
        assert rig.cache.protected_size == 0
