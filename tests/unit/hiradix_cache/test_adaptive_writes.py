"""What the write policy `adaptive` writes, and what `storage.admission` lets pass.

What the history of a tree has learnt is tested there; here it is set.
"""

from __future__ import annotations

import dataclasses

import pytest
from builders import PAGE, Rig, config_for, tokens
from scripted_parts import injected, memory_storage

from hicache.controller import StoragePolicies
from hicache.radix import CopyKind, EvictionPolicy, LruPolicy, RadixKey
from hicache.radix.adaptive_policy import AdaptivePolicy
from hicache.radix.reuse_statistics import NUM_CELLS
from hicache.storage.memory import MemoryPages
from hicache.types import StorageAdmission, WritePolicy

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(5, 6))
ADAPTIVE = WritePolicy.ADAPTIVE
TAKES_ALL = StorageAdmission.ALL
TAKES_SOME = StorageAdmission.ADAPTIVE
EVICTION_POLICIES = pytest.mark.parametrize("eviction_policy", ["lru", "adaptive"])


def num_written(rig: Rig) -> int:
    return rig.cache.controller.stats[CopyKind.WRITE].num_bytes // rig.pool.geometry.page_bytes


def keeps_history(rig: Rig) -> bool:
    return rig.cache.tree.history is not None


def let_the_host_have_better(rig: Rig) -> None:
    rig.cache.tree.keep_history().host_floor = 1e9


def let_everything_be_hopeless(rig: Rig) -> None:
    rig.cache.tree.keep_history().statistics.hopeless = [True] * NUM_CELLS


@EVICTION_POLICIES
def test_what_is_evicted_is_written_while_the_host_has_nothing_better(eviction_policy: str) -> None:
    config = config_for(write_policy=ADAPTIVE, eviction_policy=eviction_policy, write_watermark=0)
    with Rig(config) as rig:
        rig.insert(KEY)
        rig.step(3)
        assert num_written(rig) == 0
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)
        assert rig.cache.counters["refused_write_pages"] == 0


@pytest.mark.parametrize("refuse", [let_the_host_have_better, let_everything_be_hopeless])
@EVICTION_POLICIES
def test_what_is_not_worth_its_place_is_dropped_at_once_and_counted(
    refuse: object, eviction_policy: str
) -> None:
    config = config_for(write_policy=ADAPTIVE, eviction_policy=eviction_policy, write_watermark=0)
    with Rig(config) as rig:
        rig.insert(KEY)
        assert callable(refuse)
        refuse(rig)
        assert rig.cache.evict(4) == (4, 0)
        assert rig.hit(KEY) == (0, 0)
        assert num_written(rig) == 0
        assert rig.cache.counters["refused_write_pages"] == 4


def test_nothing_is_written_ahead_that_eviction_would_not_write() -> None:
    with Rig(config_for(write_policy=ADAPTIVE, write_watermark=1.0)) as rig:
        let_the_host_have_better(rig)
        rig.insert(KEY)
        rig.step(3)
        assert num_written(rig) == 0
        rig.cache.tree.keep_history().host_floor = 0.0
        rig.step(3)
        rig.settle()
        assert num_written(rig) == 4


def test_with_a_store_that_takes_all_everything_that_is_evicted_gets_there() -> None:
    config = config_for(write_policy=ADAPTIVE, write_watermark=0, storage=injected())
    with Rig(config) as rig:
        rig.insert(KEY)
        let_the_host_have_better(rig)
        let_everything_be_hopeless(rig)
        rig.drop_memory()
        assert rig.cache.counters["refused_write_pages"] == 0
        assert rig.prefetch(KEY) == 4 * PAGE


def test_with_a_store_that_takes_all_what_is_inserted_is_stored_before_anything_is_evicted() -> (
    None
):
    with Rig(config_for(write_policy=ADAPTIVE, write_watermark=0, storage=injected())) as rig:
        let_everything_be_hopeless(rig)
        rig.insert(KEY)
        rig.settle()
        assert all(node.persisted for node in rig.cache.tree.nodes())
        assert rig.hit(KEY) == (4, 0)


def test_a_store_that_takes_some_gets_what_may_be_used_again_whatever_the_host_has() -> None:
    config = config_for(
        write_policy=ADAPTIVE, write_watermark=0, storage=injected(admission=TAKES_SOME)
    )
    with Rig(config) as rig:
        rig.insert(KEY)
        let_the_host_have_better(rig)
        rig.drop_memory()
        assert rig.prefetch(KEY) == 4 * PAGE
        rig.insert(OTHER)
        let_everything_be_hopeless(rig)
        rig.drop_memory()
        assert rig.prefetch(OTHER) == 0


@pytest.mark.parametrize("admission", StorageAdmission)
def test_what_was_written_through_is_persisted_as_the_store_takes_it(
    admission: StorageAdmission,
) -> None:
    with Rig(config_for(storage=injected(admission=admission))) as rig:
        let_everything_be_hopeless(rig)
        rig.insert(KEY)
        rig.settle()
        is_stored = admission is TAKES_ALL
        assert all(node.persisted == is_stored for node in rig.cache.tree.nodes())
        assert rig.cache.counters["refused_persist_pages"] == (0 if is_stored else 4)


def test_of_a_hopeless_end_the_beginning_that_others_use_is_persisted() -> None:
    with Rig(config_for(storage=injected(admission=TAKES_SOME)), device_pages=16) as rig:
        rig.insert(KEY.prefix(2 * PAGE), request_id="a")
        statistics = rig.cache.tree.keep_history().statistics
        once = range(NUM_CELLS // 6)
        statistics.hopeless = [cell in once for cell in range(NUM_CELLS)]
        for request_id in "bc":
            rig.insert(KEY.prefix(2 * PAGE), request_id=request_id)
        rig.insert(KEY, request_id="d")
        rig.settle()
        persisted = [node.num_pages for node in rig.cache.tree.nodes() if node.persisted]
        assert persisted == [2]
        assert rig.cache.counters["refused_persist_pages"] == 2


@pytest.mark.parametrize("write_policy", [WritePolicy.WRITE_THROUGH, ADAPTIVE])
def test_flush_stores_everything_whatever_the_store_takes_otherwise(
    write_policy: WritePolicy,
) -> None:
    store = MemoryPages()
    config = config_for(
        write_policy=write_policy, write_watermark=0, storage=injected(admission=TAKES_SOME)
    )
    with Rig(config, create_storage=memory_storage(store)) as rig:
        let_the_host_have_better(rig)
        let_everything_be_hopeless(rig)
        rig.insert(KEY)
        rig.insert(OTHER)
        rig.settle()
        assert rig.cache.flush() == 0
        assert all(node.persisted for node in rig.cache.tree.nodes())
        rig.insert(KEY.extend(tokens(7)))
        rig.settle()
        assert [node.num_pages for node in rig.cache.tree.nodes() if not node.persisted] == [1]


def test_a_policy_that_becomes_adaptive_later_keeps_a_history_from_then_on() -> None:
    with Rig(config_for(storage=injected(), write_policy=WritePolicy.WRITE_BACK)) as rig:
        rig.insert(KEY)
        assert not keeps_history(rig)
        policies = dataclasses.replace(StoragePolicies.of(rig.config), write_policy=ADAPTIVE)
        rig.cache.attach_storage_backend(injected(), policies=policies)
        assert keeps_history(rig)


def test_what_a_store_is_to_get_is_written_at_once_and_not_again_when_it_is_evicted() -> None:
    with Rig(config_for(storage=injected(), write_policy=ADAPTIVE)) as rig:
        rig.insert(KEY)
        rig.settle()
        assert all(node.persisted for node in rig.cache.tree.nodes())
        assert rig.cache.tree.host_size == 4 * PAGE
        rig.cache.evict_host(4)
        rig.evict_device()
        assert rig.hit(KEY) == (0, 0)
        assert rig.cache.controller.stats[CopyKind.WRITE].num_pages == 4
        assert rig.prefetch(KEY) == 4 * PAGE


@pytest.mark.parametrize(("name", "queue"), [("lru", LruPolicy), ("adaptive", AdaptivePolicy)])
def test_a_cache_that_is_put_together_by_hand_evicts_as_configured(
    name: str, queue: type[EvictionPolicy]
) -> None:
    with Rig(config_for(eviction_policy=name)) as rig:
        assert type(rig.cache.tree.residency.device) is queue
        assert type(rig.cache.tree.residency.soles) is queue
