"""What is used again is offered to storage again, now and then: it may have been given up there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import PAGE, Rig, config_for, tokens
from scripted_parts import faulty_storage, injected, memory_storage

from hicache.hashing import hash_pages
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages
from hicache.storage.page_store import PageStore
from hicache.testing.faulty_storage import Fault, Verb
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage import HiCacheStorageConfig

REFRESH_SECONDS = 30.0
PREFIX = RadixKey(tokens(1, 2))
KEY = RadixKey(tokens(1, 2, 3))


def rig_with(store: MemoryPages, *faults: Fault | None) -> Rig:
    storage = injected(refresh_seconds=REFRESH_SECONDS)
    create = faulty_storage(store, faults={Verb.SET: faults}) if faults else memory_storage(store)
    return Rig(config_for(storage=storage), create_storage=create)


def use(rig: Rig, key: RadixKey, *, after: float = 0.0) -> None:
    """Serve a prompt again, so many seconds later."""
    rig.clock.advance(after)
    rig.cache.check_hicache_events()
    rig.insert(key)
    rig.settle()


def num_stored(rig: Rig, key: RadixKey) -> int:
    """Return how many pages storage itself has of a prompt."""
    assert rig.tier.backend is not None
    return rig.tier.backend.batch_exists(hash_pages(key.data, PAGE, key.namespace))


def lose(rig: Rig) -> None:
    """Empty the store as another process would."""
    assert rig.tier.backend is not None
    rig.tier.backend.clear()


def num_sets(rig: Rig, outcome: PageOutcome) -> int:
    assert rig.tier.backend is not None
    return rig.tier.backend.stats().set_outcomes.get(outcome, 0)


def test_what_storage_has_lost_comes_back_when_it_is_used_again() -> None:
    with rig_with(MemoryPages()) as rig:
        use(rig, KEY)
        assert num_stored(rig, KEY) == 3
        lose(rig)
        use(rig, KEY, after=REFRESH_SECONDS / 2)
        assert num_stored(rig, KEY) == 0
        use(rig, KEY, after=REFRESH_SECONDS)
        assert num_stored(rig, KEY) == 3
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)


def test_what_is_new_below_a_lost_prefix_brings_the_prefix_with_it() -> None:
    """Else nobody would find it there."""
    with rig_with(MemoryPages()) as rig:
        use(rig, PREFIX)
        lose(rig)
        use(rig, KEY, after=2 * REFRESH_SECONDS)
        assert num_stored(rig, KEY) == 3


def test_what_storage_has_is_offered_no_more_often_than_asked_for() -> None:
    with rig_with(MemoryPages()) as rig:
        use(rig, KEY)
        for _ in range(10):
            use(rig, KEY, after=REFRESH_SECONDS / 5)
        assert num_sets(rig, PageOutcome.OK) == 3
        assert num_sets(rig, PageOutcome.PRESENT) == 3
        assert rig.cache.counters["persist_refreshes"] == 1


def test_what_has_just_come_from_storage_is_not_offered() -> None:
    with rig_with(MemoryPages()) as rig:
        use(rig, KEY)
        rig.drop_memory()
        rig.clock.advance(10 * REFRESH_SECONDS)
        rig.cache.check_hicache_events()
        assert rig.prefetch(KEY) == len(KEY)
        use(rig, KEY)
        assert num_sets(rig, PageOutcome.PRESENT) == 0


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.HOLE])
def test_an_offer_that_fails_is_made_again(fault: Fault) -> None:
    with rig_with(MemoryPages(), None, fault) as rig:
        use(rig, KEY)
        lose(rig)
        use(rig, KEY, after=2 * REFRESH_SECONDS)
        assert num_stored(rig, KEY) < 3
        use(rig, KEY)
        assert num_stored(rig, KEY) == 3


def test_a_prompt_that_memory_serves_stays_in_a_store_that_evicts(fast_path: Path) -> None:
    """C089: hits in L1 and L2 count as uses in L3."""

    def create(config: HiCacheStorageConfig) -> PageStore:
        options = {
            "path": str(fast_path),
            "max_bytes": 1_500_000,
            "min_free_bytes": 0,
            "eviction_policy": "lru",
        }
        return PageStore(
            type(config)(
                namespace=config.namespace,
                page_bytes=config.page_bytes,
                extra_config=options,
                clock=config.clock,
            )
        )

    storage = injected(refresh_seconds=REFRESH_SECONDS)
    with Rig(config_for(host_pages=32, storage=storage), create_storage=create) as rig:
        hot, cold = RadixKey(tokens(1, 2)), RadixKey(tokens(3, 4))
        use(rig, hot)
        use(rig, cold)
        number = 100
        while num_stored(rig, cold):
            use(rig, RadixKey(tokens(number, number + 1)))
            use(rig, hot, after=REFRESH_SECONDS / 8)
            number += 2
        assert num_stored(rig, hot) == 2
