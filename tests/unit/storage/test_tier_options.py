"""Tiers that are named in the options of the backend `tiered`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from storage_fakes import (
    CHAIN,
    KEYS,
    LATER,
    NO_SPACE,
    OK,
    PAGE_BYTES,
    PAGES,
    SKIPPED,
    FlakyStorage,
    make_config,
    pages_in,
    sources,
)

from hicache.config import StorageConfig
from hicache.errors import ClosedError, ConfigError
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryStorage
from hicache.storage.tiered import TieredStorage

if TYPE_CHECKING:
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig


def tiered(*tiers: object, **options: object) -> HiCacheStorageConfig:
    return make_config(tiers=list(tiers), **options)


def create(config: HiCacheStorageConfig) -> TieredStorage:
    storage = StorageBackendFactory.default().create_backend("tiered", config)
    assert isinstance(storage, TieredStorage)
    return storage


def test_tiers_are_named_in_the_options() -> None:
    plugin = {
        "backend_name": "flaky",
        "module_path": "storage_fakes",
        "class_name": "FlakyStorage",
    }
    storage = create(
        tiered(
            {"backend": "memory", "extra_config": {"max_bytes": 3 * PAGE_BYTES}},
            {"backend": "dynamic", "extra_config": plugin},
            {"backend": "tiered", "extra_config": {"tiers": [{"backend": "memory"}]}},
            write_to=2,
        )
    )
    kinds = [type(tier.storage) for tier in storage.tiers]
    assert kinds == [MemoryStorage, FlakyStorage, TieredStorage]
    assert [tier.written for tier in storage.tiers] == [True, True, False]
    assert [tier.required for tier in storage.tiers] == [False, True, False]
    assert storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER) == [OK] * 8
    assert [tier.storage.batch_exists(KEYS) for tier in storage.tiers] == [3, 8, 0]


def test_which_tiers_are_required_can_be_said() -> None:
    memory = {"backend": "memory"}
    storage = create(tiered({**memory, "required": True}, memory, {**memory, "required": False},
                            {**memory, "required": True}))  # fmt: skip
    assert [tier.required for tier in storage.tiers] == [True, False, False, True]


def test_a_frozen_configuration_can_name_tiers() -> None:
    given = StorageConfig(
        backend="tiered",
        extra_config={"tiers": [{"backend": "memory", "extra_config": {"max_bytes": 1000}}]},
        model_name="model",
        weights_revision="1",
    )
    assert len(create(make_config(**given.extra_config)).tiers) == 1


MEMORY = {"backend": "memory"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (make_config(), "has 0 tiers"),
        (make_config(tiers={}), "must be of type list"),
        (tiered(), "has 0 tiers"),
        (tiered(MEMORY, write_to=2), "has 1 tiers and writes to 2"),
        (tiered(MEMORY, write_to=0), "writes to 0"),
        (tiered(MEMORY, max_fill_pages=-1), "max_fill_pages must be at least 0"),
        (tiered(MEMORY, speed=1), "no option 'speed'"),
        (tiered("memory"), "a mapping with the name of a 'backend'"),
        (tiered({"extra_config": {}}), "a mapping with the name of a 'backend'"),
        (tiered({**MEMORY, "speed": 1}), "'speed' of type int"),
        (tiered({**MEMORY, "extra_config": "{}"}), "'extra_config' of type str"),
        (tiered({**MEMORY, "required": 1}), "'required' of type int"),
        (tiered({**MEMORY, "required": False}), "at least one tier that is required"),
        (tiered(MEMORY, {**MEMORY, "required": True}, write_to=1), "required but not written"),
        (tiered({"backend": "fiel"}), "no storage backend 'fiel'"),
        (tiered({"backend": "memory", "extra_config": {"speed": 1}}), "no option 'speed'"),
    ],
)
def test_tiers_that_cannot_work_are_refused(config: HiCacheStorageConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create(config)


def test_a_tier_that_cannot_be_opened_closes_those_that_were() -> None:
    opened: list[FlakyStorage] = []

    class Factory(StorageBackendFactory):
        def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
            if name == "flaky":
                opened.append(FlakyStorage(config))
                return opened[-1]
            return super().create_backend(name, config)

    with pytest.raises(ConfigError, match="no storage backend 'nowhere'"):
        Factory().create_backend("tiered", tiered({"backend": "flaky"}, {"backend": "nowhere"}))
    with pytest.raises(ClosedError):
        opened[0].batch_exists([])


def test_a_full_tier_in_front_costs_nothing_but_its_hits() -> None:
    fast = {"backend": "memory", "extra_config": {"max_bytes": 3 * PAGE_BYTES}}
    storage = create(tiered(fast, MEMORY))
    assert storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER) == [OK] * 8
    for _ in range(2):
        targets = sources(KEYS)
        assert storage.batch_get(KEYS, CHAIN, pages_in(targets), deadline=LATER) == [OK] * 8
    assert [tier.storage.batch_exists(KEYS) for tier in storage.tiers] == [3, 8]
    assert storage.fill_outcomes() == {NO_SPACE: 2, SKIPPED: 8}
