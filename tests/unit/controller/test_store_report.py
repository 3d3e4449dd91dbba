"""What is told of a store is what each of its layers has noted, wherever it stands."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.config import StorageConfig
from hicache.controller import resilient_storage
from hicache.controller.store_report import report_on
from hicache.hashing import StorageNamespace
from hicache.storage import HiCacheStorage, HiCacheStorageConfig, StorageBackendFactory
from hicache.storage.instrumented import InstrumentedStorage
from hicache.storage.retrying import RetryCounts
from hicache.storage.split_heads import SplitHeadsStorage
from hicache.storage.wrapper import StorageVerb
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping

OK = PageOutcome.OK
KEYS = [PageHash(bytes([number]) * 32) for number in range(4)]
PARENTS = [b"", *KEYS[:-1]]
PAGE_BYTES = 64
NAMESPACE = StorageNamespace(
    model="model",
    weights_revision="1",
    dtype="float16",
    layout="page_first",
    page_size=16,
    kv_shape="mha:layers=2,heads=2,head_dim=8",
)
MEMORY = {"backend": "memory"}


def tiered(*tiers: Mapping[str, object], **options: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        namespace=NAMESPACE,
        page_bytes=PAGE_BYTES,
        extra_config={"tiers": list(tiers), **options},
        clock=ManualClock(),
    )


def create(config: HiCacheStorageConfig) -> HiCacheStorage:
    return StorageBackendFactory.default().create_backend("tiered", config)


def watch(storage: HiCacheStorage) -> InstrumentedStorage:
    return InstrumentedStorage(storage, clock=ManualClock())


def put(storage: HiCacheStorage) -> list[PageOutcome]:
    sources = [PageBuffer.holding(bytes(PAGE_BYTES)) for _ in KEYS]
    return storage.batch_set(KEYS, PARENTS, [one.page for one in sources], deadline=1e9)


def get(storage: HiCacheStorage) -> list[PageOutcome]:
    targets = [PageBuffer(PAGE_BYTES) for _ in KEYS]
    return storage.batch_get(KEYS, PARENTS, [one.page for one in targets], deadline=1e9)


def test_a_store_with_nothing_around_it_has_neither_retries_nor_tiers() -> None:
    config = dataclasses.replace(tiered(), extra_config={})
    backend = watch(StorageBackendFactory.default().create_backend("memory", config))
    report = report_on(backend, num_abandoned_calls=3)
    assert (report.num_abandoned_calls, report.retries) == (3, None)
    assert (report.tiers, report.fill_outcomes, report.circuits) == ({}, {}, {})
    assert report.snapshot == backend.snapshot()


def test_retries_circuits_and_tiers_are_found_beneath_each_other() -> None:
    storage = StorageConfig.from_mapping(
        {"backend": "tiered", "model_name": "m", "weights_revision": "1"}
    )
    backend = watch(resilient_storage(create(tiered(MEMORY, MEMORY)), storage, ManualClock()))
    assert put(backend) == [OK] * len(KEYS)
    report = report_on(backend, num_abandoned_calls=0)
    assert report.retries == RetryCounts(num_attempts=0, num_recovered_pages=0)
    assert set(report.circuits) >= {StorageVerb.GET, StorageVerb.SET}
    assert list(report.tiers) == ["0 (memory)", "1 (memory)"]
    for tier in report.tiers.values():
        assert tier.verbs[StorageVerb.SET].pages == {OK: len(KEYS)}


@pytest.mark.parametrize("write_to", [1, 2])
def test_tiers_of_tiers_have_the_names_of_both_and_fills_are_added_together(
    write_to: int,
) -> None:
    inner = {
        "backend": "tiered",
        "extra_config": {"tiers": [MEMORY, MEMORY], "write_to": write_to},
    }
    backend = watch(create(tiered(MEMORY, inner)))
    put(backend)
    names = ["0 (memory)", "1 (tiered)", "1 (tiered)/0 (memory)", "1 (tiered)/1 (memory)"]
    report = report_on(backend, num_abandoned_calls=0)
    assert list(report.tiers) == names
    written = [one.verbs[StorageVerb.SET].pages.get(OK, 0) for one in report.tiers.values()]
    assert written == [4, 4, 4, 4 if write_to == 2 else 0]


def test_tiers_of_each_group_of_heads_are_told_apart() -> None:
    config = tiered(MEMORY, MEMORY)
    half = dataclasses.replace(config, page_bytes=PAGE_BYTES // 2)
    groups = [create(half), create(half)]
    for group in groups:
        # Only the slow tier has the pages, so a read fills the fast one.
        slow = group.tiers[1].storage  # type: ignore[attr-defined]
        sources = [PageBuffer.holding(bytes(PAGE_BYTES // 2)) for _ in KEYS]
        slow.batch_set(KEYS, PARENTS, [one.page for one in sources], deadline=1e9)
    backend = watch(SplitHeadsStorage(groups, config=config, pool_bytes=[PAGE_BYTES]))
    assert get(backend) == [OK] * len(KEYS)
    report = report_on(backend, num_abandoned_calls=0)
    assert report.fill_outcomes == {OK: 2 * len(KEYS)}
    assert list(report.tiers) == [
        "group 0/0 (memory)",
        "group 0/1 (memory)",
        "group 1/0 (memory)",
        "group 1/1 (memory)",
    ]
