"""Attaching the store that is attached changes policies, and only in a cache that is idle."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import GateAt, faulty_storage, injected, memory_storage

from hicache.config import PrefetchConfig
from hicache.controller import StoragePolicies
from hicache.errors import ConfigError, HiCacheError
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from hicache.storage import HiCacheStorageConfig

KEY = RadixKey(tokens(1, 2, 3, 4))
STORED = RadixKey(tokens(21, 22))


def policies_of(rig: Rig, **changes: object) -> StoragePolicies:
    return dataclasses.replace(StoragePolicies.of(rig.cache.config), **changes)  # type: ignore[arg-type]


def test_the_same_store_is_not_opened_again_and_the_rest_of_the_configuration_stays() -> None:
    opened: list[MemoryStorage] = []

    def create(config: HiCacheStorageConfig) -> MemoryStorage:
        opened.append(MemoryStorage(config))
        return opened[-1]

    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        before = rig.cache.config
        rig.insert(KEY)
        rig.settle()
        rig.cache.attach_storage_backend(injected())
        assert rig.cache.config == before
        prefetch = PrefetchConfig(threshold_tokens=3 * PAGE, timeout_base_seconds=7)
        wanted = StoragePolicies(
            write_policy=WritePolicy.WRITE_BEHIND,
            prefetch_policy=PrefetchPolicy.TIMEOUT,
            prefetch=prefetch,
        )
        rig.cache.attach_storage_backend(injected(), policies=wanted)
        assert rig.cache.storage_status.policies == wanted
        assert wanted.applied_to(before) == rig.cache.config
        # What is stored is still known to be: nothing is persisted twice.
        rig.insert(KEY)
        rig.settle()
        assert rig.cache.num_in_flight == 0
        assert opened[0].stats().set_outcomes == {"ok": 4}
    assert len(opened) == 1


@pytest.mark.parametrize("policy", WritePolicy)
def test_a_new_write_policy_is_in_force_at_once(policy: WritePolicy) -> None:
    with Rig(config_for(storage=injected(), write_policy=WritePolicy.WRITE_BACK)) as rig:
        rig.insert(KEY.prefix(2 * PAGE))
        rig.cache.attach_storage_backend(injected(), policies=policies_of(rig, write_policy=policy))
        rig.insert(KEY)
        rig.step()
        rig.settle()
        # What was inserted before is written with what is below it, or because it is used again.
        num_written = {
            WritePolicy.WRITE_THROUGH: 4,
            WritePolicy.WRITE_BEHIND: 4,
            WritePolicy.WRITE_THROUGH_SELECTIVE: 2,
            WritePolicy.WRITE_BACK: 0,
            # All of it is to be stored.
            WritePolicy.ADAPTIVE: 4,
        }
        assert rig.cache.tree.host_size == num_written[policy] * PAGE


def test_what_write_behind_has_not_written_yet_is_not_written_ahead_under_write_back() -> None:
    with Rig(config_for(write_policy=WritePolicy.WRITE_BEHIND)) as rig:
        rig.insert(KEY)
        assert rig.cache.num_in_flight == 0
        wanted = policies_of(rig, write_policy=WritePolicy.WRITE_BACK)
        rig.cache.attach_storage_backend(injected(), policies=wanted)
        rig.step(3)
        assert rig.cache.num_in_flight == 0
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_a_new_prefetch_threshold_and_policy_are_in_force_at_once() -> None:
    get = Gate()
    create = faulty_storage(store_with(STORED), gates={Verb.GET: get})
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.gates.append(get)
        high = PrefetchConfig(threshold_tokens=3 * PAGE)
        rig.cache.attach_storage_backend(injected(), policies=policies_of(rig, prefetch=high))
        assert not rig.begin_prefetch(STORED)
        wanted = policies_of(
            rig,
            prefetch=PrefetchConfig(threshold_tokens=PAGE),
            prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        )
        rig.cache.attach_storage_backend(injected(), policies=wanted)
        assert rig.begin_prefetch(STORED)
        rig.step_until(get.entered.is_set)
        assert not rig.cache.check_prefetch_progress("p")
        rig.step(3)
        # Under best effort, as it was before, the question would have ended it.
        assert not rig.cache.check_prefetch_progress("p")
        get.open()
        rig.settle()
        assert rig.cache.pop_prefetch_loaded_tokens("p") == len(STORED)


def test_no_policy_changes_when_the_attach_is_refused_or_fails() -> None:
    with Rig() as rig:
        before = rig.cache.config
        wanted = policies_of(rig, write_policy=WritePolicy.WRITE_BACK)
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.insert(KEY)
        with pytest.raises(HiCacheError, match=r"cannot attach .* 1 operation\(s\) are in flight"):
            rig.cache.attach_storage_backend(injected(), policies=wanted)
        gate.open()
        rig.settle()
        bad = injected(extra_config={"max_bytes": 0})
        with pytest.raises(ConfigError, match="max_bytes"):
            rig.cache.attach_storage_backend(bad, policies=wanted)
        assert rig.cache.config == before
        assert rig.cache.controller.storage is None
        rig.cache.attach_storage_backend(injected(), policies=wanted)
        assert rig.cache.config.write_policy is WritePolicy.WRITE_BACK


def test_policies_do_not_change_while_something_is_in_flight() -> None:
    with Rig(config_for(storage=injected())) as rig:
        before = rig.cache.config
        gate = rig.engine.write_gates[0] = rig.gate()
        rig.insert(KEY)
        with pytest.raises(HiCacheError, match=r"1 operation\(s\) are in flight"):
            rig.cache.attach_storage_backend(
                injected(), policies=policies_of(rig, write_policy=WritePolicy.WRITE_BACK)
            )
        assert rig.cache.config == before
        gate.open()


def test_what_a_hung_persist_had_stored_before_is_not_believed_of_the_next_store() -> None:
    """Its result comes when the store it speaks of is gone."""
    second_batch = GateAt(1)
    first, second = MemoryPages(), MemoryPages()
    left = [
        faulty_storage(first, gates={Verb.SET: second_batch}),
        memory_storage(second),
    ]
    storage = injected(batch_pages=2)
    with Rig(config_for(storage=storage), create_storage=lambda config: left.pop(0)(config)) as rig:
        rig.gates.append(second_batch)
        rig.insert(KEY)
        rig.step_until(second_batch.entered.is_set)
        rig.clock.advance(100.0)
        rig.step_until(lambda: rig.cache.controller.num_spent == 1)
        with pytest.raises(HiCacheError, match="still runs"):
            rig.cache.detach_storage_backend(0.01)
        second_batch.open()
        rig.cache.detach_storage_backend()
        assert rig.cache.num_in_flight == 1
        rig.settle()
        rig.cache.attach_storage_backend(storage)
        rig.insert(KEY)
        rig.settle()
    assert (len(first._pages), len(second._pages)) == (2, 4)
