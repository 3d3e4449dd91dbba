"""L2 -> L1 in part: the leading pages come with their bytes, the rest stays where it is."""

from __future__ import annotations

import random

import pytest
from builders import PAGE, Rig, config_for, tokens

from hicache.hiradix_cache import LoadBack, LoadStatus
from hicache.radix import RadixKey

NUM_PAGES = 6
KEY = RadixKey(tokens(1, 2, 3, 4, 5, 6))
LINK_SECONDS = {1: 5.0, 2: 2.0, 3: 1.0, 4: 0.5, 5: 0.26, 6: 0.1}
"""Of a page, so that of six pages that take 1 s each to compute so many are loaded."""


def measure(rig: Rig, *, link: float) -> None:
    """Let a page take 1 s to compute, and `link` seconds to load."""
    rig.cache.note_prefill(PAGE, 1.0)
    rig.cache.controller.costs.note_load(1, link)


def put_on_host(rig: Rig, *keys: RadixKey) -> None:
    """Leave `keys` on the host alone."""
    for key in keys:
        rig.insert(key)
        rig.settle()
    rig.evict_device()


def begin(rig: Rig, key: RadixKey, *, mem_quota: int | None = None) -> LoadBack:
    found = rig.match(key)
    return rig.cache.init_load_back(found, mem_quota=mem_quota, num_tokens=len(key))


@pytest.mark.parametrize("num_loaded", LINK_SECONDS)
@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 5)], ids=str)
def test_a_leading_part_of_any_length_arrives_with_its_bytes(
    num_loaded: int, cuts: tuple[int, ...]
) -> None:
    """Wherever runs end."""
    with Rig() as rig:
        put_on_host(rig, *(KEY.prefix(cut * PAGE) for cut in cuts), KEY)
        measure(rig, link=LINK_SECONDS[num_loaded])
        load = begin(rig, KEY)
        assert (load.status, len(load.device_pages)) == (LoadStatus.QUEUED, num_loaded)
        assert load.node.end == num_loaded
        rig.cache.inc_lock_ref(load.node)
        rig.await_load(KEY, load, 0, rig.cache.ready_to_load_host_cache())
        rig.settle()
        assert rig.hit(KEY) == (num_loaded, NUM_PAGES - num_loaded)
        assert rig.cache.protected_size == num_loaded * PAGE
        assert rig.cache.counters["load_back_partial"] == (num_loaded < NUM_PAGES)
        # What was computed in place of the rest is taken over where the host has it.
        rig.insert(KEY)
        assert rig.hit(KEY) == (NUM_PAGES, 0)
        rig.cache.dec_lock_ref(load.node)


def test_behind_what_the_device_has_the_next_pages_are_loaded() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        rig.insert(KEY.prefix(2 * PAGE))
        measure(rig, link=1.0)
        load = begin(rig, KEY)
        assert len(load.device_pages) == 2
        rig.await_load(KEY, load, 2, rig.cache.ready_to_load_host_cache())
        rig.settle()
        assert rig.hit(KEY) == (4, 2)


def test_what_the_queue_of_the_link_delays_is_computed() -> None:
    other = RadixKey(tokens(11, 12))
    with Rig() as rig:
        put_on_host(rig, KEY, other)
        measure(rig, link=1.0)
        assert len(rig.cache.init_load_back(rig.match(other)).device_pages) == 2
        assert len(begin(rig, KEY).device_pages) == 2
        rig.cache.ready_to_load_host_cache()
        rig.settle()


def test_a_partial_load_that_fails_leaves_all_on_the_host() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        measure(rig, link=1.0)
        rig.engine.broken_loads.add(1)
        assert begin(rig, KEY).status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()
        rig.settle()
        assert rig.hit(KEY) == (0, NUM_PAGES)


def test_a_second_request_waits_for_the_part_that_is_loaded() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        measure(rig, link=1.0)
        gate = rig.engine.load_gates[0] = rig.gate()
        begin(rig, KEY)
        rig.cache.ready_to_load_host_cache()
        assert begin(rig, KEY).status is LoadStatus.BUSY
        gate.open()
        rig.settle()
        assert rig.hit(KEY) == (3, 3)


def test_a_part_below_the_threshold_is_not_loaded() -> None:
    with Rig(config_for(load_back_threshold_tokens=3 * PAGE + 1)) as rig:
        put_on_host(rig, KEY)
        measure(rig, link=1.0)
        assert begin(rig, KEY).status is LoadStatus.NOTHING


def test_a_link_slower_than_computing_everything_loads_nothing_and_is_counted() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        measure(rig, link=100.0)
        load = begin(rig, KEY)
        assert (load.status, load.node) == (LoadStatus.NOTHING, rig.match(KEY).last_device_node)
        assert rig.cache.counters["load_back_not_worth"] == 1


def test_the_quota_is_for_what_is_loaded() -> None:
    with Rig() as rig:
        put_on_host(rig, KEY)
        measure(rig, link=1.0)
        assert begin(rig, KEY, mem_quota=3 * PAGE - 1).status is LoadStatus.NOTHING
        assert begin(rig, KEY, mem_quota=3 * PAGE).status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()


@pytest.mark.parametrize("says_tokens", [False, True])
def test_everything_is_loaded_for_who_does_not_say_what_it_computes_or_has_it_switched_off(
    says_tokens: bool,
) -> None:
    with Rig(config_for(load_cost_estimate=not says_tokens)) as rig:
        put_on_host(rig, KEY)
        measure(rig, link=1.0)
        num_tokens = len(KEY) if says_tokens else None
        load = rig.cache.init_load_back(rig.match(KEY), num_tokens=num_tokens)
        assert len(load.device_pages) == NUM_PAGES
        rig.cache.ready_to_load_host_cache()


@pytest.mark.parametrize("seed", range(12))
def test_loads_of_random_parts_bring_the_beginning_of_each_prompt(seed: int) -> None:
    """Prompts share prefixes; each is brought back again and again over a link of another speed."""
    rng = random.Random(seed)
    keys = [
        RadixKey(tokens(*range(1, shared + 1), *(10 * number + page for page in range(4))))
        for number, shared in enumerate(rng.choices(range(4), k=4), start=1)
    ]
    with Rig(config_for(40)) as rig:
        put_on_host(rig, *keys)
        for _ in range(12):
            key = rng.choice(keys)
            for _ in range(16):
                measure(rig, link=rng.choice(list(LINK_SECONDS.values())))
            device, host = rig.hit(key)
            load = begin(rig, key)
            num_loaded = len(load.device_pages)
            rig.await_load(key, load, device, rig.cache.ready_to_load_host_cache())
            rig.settle()
            if load.status is not LoadStatus.NO_MEMORY:
                assert rig.hit(key) == (device + num_loaded, host - num_loaded)
            if rng.random() < 0.4:
                rig.evict_device(rng.randint(1, 8))
