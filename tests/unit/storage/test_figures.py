"""Figures of a store are taken when it is called, and told without calling it."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
from storage_fakes import (
    CHAIN,
    FAILED,
    KEYS,
    LATER,
    OK,
    PAGE_BYTES,
    PAGES,
    FlakyStorage,
    make_config,
    pages_in,
    sources,
)

from hicache.clock import ManualClock
from hicache.errors import StorageError
from hicache.storage import StorageFigures
from hicache.storage.instrumented import HealthState, InstrumentedStorage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.split_heads import SplitHeadsStorage
from hicache.storage.tiered import BackendTier, TieredStorage
from hicache.storage.wrapper import StorageVerb

if TYPE_CHECKING:
    from hicache.storage import HiCacheStorage

GUARD_SECONDS = 10.0


class CountingStorage(FlakyStorage):
    """Tells how many pages it has, and how often it was asked; `answer` takes their place."""

    def __init__(self, **others: int) -> None:
        super().__init__()
        self.others = others
        self.num_asked = 0
        self.answer: Any = None

    def figures(self) -> StorageFigures:
        self.num_asked += 1
        if self.answer is None:
            return StorageFigures(num_pages=len(self.held), **self.others)
        if isinstance(self.answer, Exception):
            raise self.answer
        figures: StorageFigures = self.answer
        return figures


def put(storage: HiCacheStorage, num_pages: int) -> None:
    storage.batch_set(KEYS[:num_pages], CHAIN[:num_pages], PAGES[:num_pages], deadline=LATER)


def get(storage: HiCacheStorage, num_pages: int) -> None:
    pages = pages_in(sources(KEYS[:num_pages]))
    storage.batch_get(KEYS[:num_pages], CHAIN[:num_pages], pages, deadline=LATER)


def watch(storage: HiCacheStorage) -> InstrumentedStorage:
    return InstrumentedStorage(storage, clock=ManualClock())


def test_a_backend_that_says_nothing_has_no_figures() -> None:
    storage = watch(FlakyStorage())
    put(storage, 3)
    assert storage.snapshot().figures == StorageFigures()
    assert StorageFigures().known() == {}
    assert StorageFigures(num_pages=0).known() == {"num_pages": 0}


@pytest.mark.parametrize("value", ["3", 3.5, True])
def test_a_figure_is_an_integer(value: Any) -> None:
    with pytest.raises(StorageError, match="used_bytes of a store must be an int"):
        StorageFigures(used_bytes=value)


def test_figures_are_those_after_the_newest_call_that_can_have_changed_them() -> None:
    backend = CountingStorage()
    storage = watch(RetryingStorage(backend, max_attempts=0, clock=ManualClock()))
    assert storage.snapshot().figures.num_pages is None
    storage.register_memory([])
    assert storage.snapshot().figures.num_pages == 0
    put(storage, 3)
    assert storage.snapshot().figures.num_pages == 3
    backend.damage(KEYS[1])
    get(storage, 3)
    assert storage.snapshot().figures.num_pages == 2
    storage.clear()
    assert storage.snapshot().figures.num_pages == 0
    assert pickle.loads(pickle.dumps(storage.snapshot())) == storage.snapshot()


def test_neither_a_snapshot_nor_a_look_up_asks_for_figures() -> None:
    backend = CountingStorage()
    storage = watch(backend)
    for _ in range(3):
        storage.batch_exists(KEYS)
        storage.snapshot()
    assert backend.num_asked == 0


@pytest.mark.parametrize("answer", [None, {"num_pages": 3}, OSError("gone")])
def test_a_backend_that_breaks_this_part_of_the_contract_does_its_work_all_the_same(
    answer: object,
) -> None:
    backend = CountingStorage()
    storage = watch(backend)
    put(storage, 2)
    backend.answer = answer
    put(storage, 4)
    snapshot = storage.snapshot()
    assert snapshot.verbs[StorageVerb.SET].pages[OK] == 4
    assert snapshot.verbs[StorageVerb.SET].num_broken_calls == 0
    assert snapshot.health.state is HealthState.GREEN
    # What was known before stays; without an answer of the test it is 4.
    assert snapshot.figures.num_pages == (4 if answer is None else 2)
    error = "figures: OSError: gone" if isinstance(answer, OSError) else None
    assert snapshot.health.last_error == error


def test_a_snapshot_waits_for_no_backend_that_hangs_whatever_it_hangs_in() -> None:
    hangs, let_go = threading.Event(), threading.Event()

    class Hanging(CountingStorage):
        def figures(self) -> StorageFigures:
            if self.held:
                hangs.set()
                assert let_go.wait(GUARD_SECONDS)
            return super().figures()

    tiered = TieredStorage(
        [BackendTier(name="only", storage=Hanging())], config=make_config(ManualClock())
    )
    storage = watch(tiered)
    storage.register_memory([])
    worker = threading.Thread(target=put, args=(storage, 1))
    worker.start()
    try:
        assert hangs.wait(GUARD_SECONDS)
        assert tiered.tier_snapshots()["only"].figures.num_pages == 0
        assert tiered.tier_snapshots()["only"].verbs[StorageVerb.SET].pages == {OK: 1}
        assert storage.snapshot().verbs[StorageVerb.SET].num_calls == 0
    finally:
        let_go.set()
        worker.join(GUARD_SECONDS)
    assert tiered.tier_snapshots()["only"].figures.num_pages == 1


def test_figures_that_hang_keep_no_other_call_waiting() -> None:
    hangs, let_go = threading.Event(), threading.Event()

    class HangsAtFirst(CountingStorage):
        def figures(self) -> StorageFigures:
            figures = super().figures()
            if self.num_asked == 1:
                hangs.set()
                assert let_go.wait(GUARD_SECONDS)
            return figures

    storage = watch(HangsAtFirst())
    first = threading.Thread(target=put, args=(storage, 1))
    first.start()
    try:
        assert hangs.wait(GUARD_SECONDS)
        put(storage, 2)
        assert storage.snapshot().figures.num_pages is None
    finally:
        let_go.set()
        first.join(GUARD_SECONDS)
    put(storage, 3)
    assert storage.snapshot().figures.num_pages == 3


def test_of_groups_of_heads_the_largest_figure_counts_as_they_share_a_store() -> None:
    groups = [
        CountingStorage(used_bytes=5),
        CountingStorage(used_bytes=7, limit_bytes=9),
        FlakyStorage(),
    ]
    for group, num_pages in zip(groups, (3, 2, 1), strict=True):
        group.hold(KEYS[:num_pages])
    config = dataclasses.replace(make_config(), page_bytes=99)
    storage = SplitHeadsStorage(groups, config=config, pool_bytes=[99])
    assert storage.figures() == StorageFigures(used_bytes=7, limit_bytes=9, num_pages=3)


def test_each_tier_has_counters_and_a_colour_of_its_own() -> None:
    fast, slow = CountingStorage(), CountingStorage()
    slow.hold(KEYS[:5])
    tiered = TieredStorage(
        [
            BackendTier(name="fast", storage=fast, required=False),
            BackendTier(name="slow", storage=slow),
        ],
        config=make_config(ManualClock()),
    )
    get(tiered, 5)
    assert tiered.fill_outcomes() == {OK: 5}
    snapshots = tiered.tier_snapshots()
    assert snapshots["fast"].verbs[StorageVerb.SET].pages == {OK: 5}
    assert snapshots["slow"].verbs[StorageVerb.GET].pages == {OK: 5}
    assert snapshots["slow"].verbs[StorageVerb.GET].num_bytes == 5 * PAGE_BYTES
    assert snapshots["fast"].figures.num_pages == 5

    fast.writes = {key: [FAILED] * 9 for key in KEYS}
    put(tiered, 8)
    snapshots = tiered.tier_snapshots()
    assert tiered.stats().set_outcomes[OK] == 3
    assert snapshots["fast"].verbs[StorageVerb.SET].pages[FAILED] == 1
    fast.error = OSError("gone")
    get(tiered, 5)
    snapshots = tiered.tier_snapshots()
    assert snapshots["fast"].verbs[StorageVerb.GET].num_broken_calls == 1
    assert snapshots["fast"].health.state is HealthState.RED
    assert snapshots["slow"].health.state is HealthState.GREEN
