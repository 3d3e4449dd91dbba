"""L2 -> L1: all or nothing, only what is worth it, and no layer before its bytes are there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, tokens, until

from hicache.hiradix_cache import LoadStatus
from hicache.pools import expand_pages
from hicache.radix import RadixKey
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.pools import DeviceKVPool

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(11, 12, 13, 14))


def put_on_host(rig: Rig, *keys: RadixKey) -> None:
    """Leave `keys` on the host alone."""
    for key in keys:
        rig.insert(key)
        rig.settle()
        rig.evict_device()
        assert rig.hit(key) == (0, len(key) // PAGE)


def test_a_load_brings_all_pages_behind_those_that_the_device_has() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        rig.insert(KEY.prefix(PAGE))
        load = rig.load(KEY)
        assert (load.status, len(load.device_pages)) == (LoadStatus.QUEUED, 3)
        assert rig.hit(KEY) == (4, 0)


def test_a_host_hit_below_the_threshold_is_not_loaded() -> None:
    with Rig(config_for(load_back_threshold_tokens=2 * PAGE + 1)) as rig:
        put_on_host(rig, KEY)
        assert rig.begin_load(KEY.prefix(2 * PAGE)).status is LoadStatus.NOTHING
        assert rig.begin_load(RadixKey([])).status is LoadStatus.NOTHING
        assert rig.load(KEY.prefix(3 * PAGE)).status is LoadStatus.QUEUED


def test_a_load_takes_no_more_device_tokens_than_the_quota_allows() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        assert rig.begin_load(KEY, mem_quota=4 * PAGE - 1).status is LoadStatus.NOTHING
        assert rig.begin_load(KEY, mem_quota=4 * PAGE).status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()


def test_a_load_that_does_not_fit_takes_nothing() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        request = rig.device_pages.alloc(5)
        assert request is not None
        rig.request_pages.append(request)
        load = rig.begin_load(KEY)
        assert (load.status, len(load.device_pages)) == (LoadStatus.NO_MEMORY, 0)
        assert load.node is rig.match(KEY).last_device_node
        assert rig.device_pages.num_available == 3
        assert rig.cache.counters["load_back_no_memory"] == 1
        rig.device_pages.free(rig.request_pages.pop())
        assert rig.load(KEY).status is LoadStatus.QUEUED


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_room_for_a_load_is_made_by_evicting_others(policy: WritePolicy) -> None:
    """Under write_back room comes one step later, when the victims are written."""
    with Rig(config_for(write_policy=policy)) as rig:
        put_on_host(rig, KEY)
        rig.insert(OTHER)
        rig.insert(RadixKey(tokens(21, 22)))
        rig.settle()
        load = rig.begin_load(KEY)
        if policy is WritePolicy.WRITE_BACK:
            assert load.status is LoadStatus.NO_MEMORY
            rig.settle()
            load = rig.begin_load(KEY)
        assert load.status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()
        rig.settle()
        assert rig.hit(KEY) == (4, 0)


def test_making_room_on_both_tiers_does_not_evict_what_is_loaded() -> None:
    """C053: to write its victims the eviction needs host pages, and only the source's are old."""
    config = config_for(4, write_policy=WritePolicy.WRITE_BACK)
    with Rig(config, device_pages=4) as rig:
        put_on_host(rig, KEY)
        rig.insert(OTHER)
        assert rig.begin_load(KEY).status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()
        rig.settle()
        assert rig.hit(KEY) == (4, 0)
        assert rig.hit(OTHER) == (0, 0)
        assert rig.cache.counters["unwritten_pages"] == 4


def test_pages_that_are_being_loaded_are_no_hit_for_a_second_request() -> None:
    """C046; the second request sees that waiting is worth it."""
    with Rig() as rig:
        put_on_host(rig, KEY)
        gate = rig.engine.load_gates[1] = rig.gate()
        assert rig.begin_load(KEY).status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()
        for key in (KEY, KEY.prefix(2 * PAGE), KEY.extend(tokens(5))):
            found = rig.match(key)
            assert (found.device_hit_tokens, found.loading) == (0, True)
            assert rig.begin_load(key).status is LoadStatus.BUSY
        gate.open()
        rig.settle()
        assert rig.hit(KEY) == (4, 0)
        assert not rig.match(KEY).loading


def test_a_load_waits_while_every_slot_is_taken() -> None:
    with Rig(config_for(num_load_slots=1)) as rig:
        put_on_host(rig, KEY, OTHER)
        gate = rig.engine.load_gates[0] = rig.gate()
        assert rig.begin_load(KEY).status is LoadStatus.QUEUED
        assert rig.cache.ready_to_load_host_cache() == 0
        assert rig.begin_load(OTHER).status is LoadStatus.BUSY
        gate.open()
        rig.settle()
        assert rig.load(OTHER).status is LoadStatus.QUEUED


def test_a_queued_load_starts_later_when_a_consumer_still_names_the_only_slot() -> None:
    with Rig(config_for(num_load_slots=1)) as rig:
        put_on_host(rig, KEY, OTHER)
        rig.begin_load(KEY)
        rig.counter.set_consumer(rig.cache.ready_to_load_host_cache())
        rig.settle()
        assert rig.begin_load(OTHER).status is LoadStatus.QUEUED
        assert rig.cache.ready_to_load_host_cache() == -1
        rig.step(3)
        assert rig.hit(OTHER) == (0, 4)
        rig.counter.set_consumer(())
        assert rig.cache.ready_to_load_host_cache() == 0
        rig.settle()
        assert rig.hit(OTHER) == (4, 0)


def test_loads_of_one_step_are_one_job_with_one_producer() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY, OTHER)
        loads = {key: rig.begin_load(key) for key in (KEY, OTHER)}
        producer = rig.cache.ready_to_load_host_cache()
        assert rig.cache.ready_to_load_host_cache() == -1
        for key, load in loads.items():
            rig.await_load(key, load, 0, producer)
        rig.settle()
        assert (rig.hit(KEY), rig.hit(OTHER)) == ((4, 0), (4, 0))


def test_a_load_moves_the_pages_named_when_it_was_queued() -> None:
    """C054."""
    with Rig() as rig:
        put_on_host(rig, KEY, OTHER)
        gate = rig.engine.load_gates[0] = rig.gate()
        for key in (KEY, OTHER):
            found = rig.match(key)
            load = rig.cache.init_load_back(found)
            rig.cache.ready_to_load_host_cache()
            found.device_pages[:] = 0
            load.device_pages[:] = 0
        gate.open()
        rig.settle()
        assert (rig.hit(KEY), rig.hit(OTHER)) == ((4, 0), (4, 0))


ACCESSORS: dict[str, Callable[[DeviceKVPool, int], object]] = {
    "key": lambda pool, layer: pool.get_key_buffer(layer),
    "value": lambda pool, layer: pool.get_value_buffer(layer),
    "both": lambda pool, layer: pool.get_kv_buffer(layer),
}


@pytest.mark.parametrize("accessor", ACCESSORS)
def test_every_way_to_a_layer_waits_for_that_layer_and_for_no_other(accessor: str) -> None:
    """C055."""
    read = ACCESSORS[accessor]
    with Rig() as rig:
        put_on_host(rig, KEY)
        gate = rig.engine.load_gates[1] = rig.gate()
        rig.begin_load(KEY)
        rig.counter.set_consumer(rig.cache.ready_to_load_host_cache())
        read(rig.pool, 0)
        arrived = threading.Event()

        def read_the_held_layer() -> None:
            read(rig.pool, 1)
            arrived.set()

        thread = threading.Thread(target=read_the_held_layer)
        thread.start()
        assert not arrived.wait(0.02)
        gate.open()
        until(arrived.is_set)
        thread.join()
        rig.counter.set_consumer(())


def test_a_match_that_lost_its_host_pages_since_loads_nothing() -> None:
    """C042."""
    with Rig(config_for(4)) as rig:
        put_on_host(rig, KEY)
        found = rig.match(KEY)
        rig.insert(OTHER)
        rig.settle()
        assert rig.cache.init_load_back(found).status is LoadStatus.NOTHING
        assert rig.hit(KEY) == (0, 0)


def test_the_host_gives_up_a_chain_from_its_end_so_that_no_hole_comes_up() -> None:
    """C044: one run after the other goes, and what is left can always be loaded."""
    with Rig() as rig:
        for end in range(1, 5):
            rig.insert(KEY.prefix(end * PAGE), chunked=end < 4)
        rig.settle()
        rig.evict_device()
        for left in (3, 2, 1):
            rig.cache.evict_host(1)
            assert rig.hit(KEY) == (0, left)
        assert rig.load(KEY).status is LoadStatus.QUEUED
        assert rig.hit(KEY) == (1, 0)


def test_a_request_reads_its_slots_in_order_when_its_pages_are_scattered() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        taken = rig.device_pages.alloc(8)
        assert taken is not None
        rig.device_pages.free(taken[[6, 1, 4, 3]])
        rig.request_pages.append(np.delete(taken, [6, 1, 4, 3]))
        rig.load(KEY)
        found = rig.match(KEY)
        assert found.device_indices.equal(expand_pages(found.device_pages, PAGE))
        assert found.device_hit_tokens == 4 * GEOMETRY.page_size
        rig.device_pages.free(rig.request_pages.pop())
