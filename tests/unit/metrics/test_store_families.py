"""What a store and its tiers have done is shown, from a cache to the text, by as much as it was."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import prometheus_client.parser
from builders import GEOMETRY, Rig, config_for, tokens
from scripted_parts import Barrier, injected

from hicache.hiradix_cache import snapshot_of
from hicache.metrics import StoreUse, TierUse
from hicache.metrics.prometheus import exposition
from hicache.metrics.store_families import store_families
from hicache.radix import RadixKey
from hicache.storage import StorageBackendFactory, StorageFigures
from hicache.storage.memory import MemoryStorage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.tiered import BackendTier, TieredStorage
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hicache.hiradix_cache import HiRadixCache
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig, Page

FIRST = RadixKey(tokens(1, 2, 3, 4))
SECOND = RadixKey(tokens(11, 12, 13))
SECRET = "hunter2"
FAST, FILE = "0 (memory)", "1 (file)"
METHODS = ("batch_exists", "batch_get", "batch_set", "clear", "figures", "stats")
STORE = StoreUse(
    state="attached",
    backend="memory",
    model_name="m",
    healthy=True,
    num_abandoned_calls=0,
    circuits={},
    calls={},
)


class FailingStorage(MemoryStorage):
    """Fails to write as many pages as it is told to, and raises while it is broken."""

    num_failing = 0
    broken = False

    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        if self.broken:
            raise OSError(SECRET)
        self.num_failing -= 1
        if self.num_failing >= 0:
            return PageOutcome.FAILED
        return super()._write_page(key, parent_key, page)


def read(cache: HiRadixCache) -> dict[str, float]:
    """Return the samples about the store by name and values of labels, in the labels' order."""
    text = exposition(snapshot_of(cache))[0].decode()
    assert SECRET not in text
    samples: dict[str, float] = {}
    for family in prometheus_client.parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for _, value in sorted(sample.labels.items())]
            name = sample.name.removeprefix("hicache_storage_")
            samples["|".join([name, *labels])] = sample.value
    return samples


class Watched(Rig):
    """A cache over retries over a tier in memory, that can fail, and a page store."""

    def __init__(self, path: Path, *, fast_is_required: bool = False, **options: object) -> None:
        self.options = {"path": str(path), "min_free_bytes": 0, **options}
        self.fast_is_required = fast_is_required
        super().__init__(config_for(8, storage=injected()), create_storage=self._create)

    def _create(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        self.fast = FailingStorage(config)
        store = StorageBackendFactory.default().create_backend(
            "file", dataclasses.replace(config, extra_config=self.options)
        )
        tiers = [
            BackendTier(name=FAST, storage=self.fast, required=self.fast_is_required),
            BackendTier(name=FILE, storage=store),
        ]
        tiered = TieredStorage(tiers, config=config)
        return RetryingStorage(tiered, max_attempts=3, clock=self.clock, sleep=lambda _: None)

    def persist(self, key: RadixKey) -> None:
        self.insert(key)
        self.settle()

    def read(self) -> dict[str, float]:
        return read(self.cache)


def test_writes_fills_and_a_clear_move_the_figures_of_their_tier(fast_path: Path) -> None:
    with Watched(fast_path) as rig:
        before = rig.read()
        assert before[f"stored_pages|{FILE}"] == 0
        rig.persist(FIRST)
        after = rig.read()
        assert after[f"stored_pages|{FILE}"] == 4
        assert after[f"used_bytes|{FILE}"] > before[f"used_bytes|{FILE}"]
        assert after[f"spare_bytes|{FILE}"] > 0
        for tier in (FAST, FILE):
            assert after[f"tier_call_pages_total|batch_set|ok|{tier}"] == 4
            assert after[f"tier_call_bytes_total|batch_set|{tier}"] == 4 * GEOMETRY.page_bytes
        assert (after["retries_total"], after["recovered_pages_total"]) == (0, 0)
        assert "fill_pages_total|ok" not in after

        assert rig.fast.clear() == 4
        rig.drop_memory()
        assert rig.prefetch(FIRST) == len(FIRST)
        filled = rig.read()
        assert filled["fill_pages_total|ok"] == 4
        assert filled[f"tier_call_pages_total|batch_set|ok|{FAST}"] == 8
        assert filled[f"tier_call_pages_total|batch_get|ok|{FILE}"] == 4

        assert rig.cache.clear_storage_backend() == 4
        cleared = rig.read()
        assert cleared[f"stored_pages|{FILE}"] == 0
        assert cleared[f"evicted_pages_total|{FILE}"] == 0


def test_retries_and_what_they_brought_are_counted(fast_path: Path) -> None:
    with Watched(fast_path, fast_is_required=True) as rig:
        rig.fast.num_failing = 2
        rig.persist(FIRST)
        samples = rig.read()
        # The first page fails twice, those behind it wait for it.
        assert samples["retries_total"] == 2
        assert samples["recovered_pages_total"] == 1
        assert samples["call_pages_total|batch_set|ok"] == 4
        assert samples[f"tier_call_pages_total|batch_set|failed|{FAST}"] == 2


def test_a_tier_that_fails_is_seen_also_where_nobody_needs_it(fast_path: Path) -> None:
    with Watched(fast_path) as rig:
        rig.fast.broken = True
        rig.persist(FIRST)
        samples = rig.read()
        assert samples[f"tier_healthy|{FAST}"] == 0
        assert samples[f"tier_broken_calls_total|batch_set|{FAST}"] == 1
        assert samples[f"tier_healthy|{FILE}"] == samples["healthy"] == 1
        assert samples[f"stored_pages|{FILE}"] == 4
        rig.fast.broken = False
        rig.persist(SECOND)
        assert rig.read()[f"tier_healthy|{FAST}"] == 1


def test_a_store_that_is_full_shows_its_limit_and_what_made_room(fast_path: Path) -> None:
    max_bytes = 600_000
    with Watched(fast_path, max_bytes=max_bytes) as rig:
        for number in range(60):
            rig.persist(RadixKey(tokens(*range(100 * number, 100 * number + 4))))
            rig.drop_memory()
        samples = rig.read()
        assert samples[f"limit_bytes|{FILE}"] == max_bytes
        assert 0 < samples[f"used_bytes|{FILE}"] <= max_bytes
        num_evicted = samples[f"evicted_pages_total|{FILE}"]
        assert num_evicted > 0
        num_written = samples[f"tier_call_pages_total|batch_set|ok|{FILE}"]
        assert samples[f"stored_pages|{FILE}"] == num_written - num_evicted


def test_a_scrape_waits_for_no_method_of_a_backend() -> None:
    barrier = Barrier()

    def hanging(name: str) -> Callable[..., object]:
        def method(*arguments: object, **options: object) -> object:
            barrier.pass_through()
            return getattr(MemoryStorage, name)(*arguments, **options)

        return method

    hanging_class = type("Hanging", (MemoryStorage,), {name: hanging(name) for name in METHODS})
    config = config_for(8, storage=injected())
    with Rig(config, create_storage=lambda config: hanging_class(config)) as rig:
        rig.gates.append(barrier)
        barrier.shut()
        rig.insert(FIRST)
        rig.step_until(barrier.entered.is_set)
        assert read(rig.cache)["healthy"] == 1
        assert barrier.entered.is_set()


def test_every_figure_that_a_backend_can_know_is_shown_of_the_store_and_of_each_tier() -> None:
    fields = [one.name for one in dataclasses.fields(StorageFigures)]
    figures = {name: number for number, name in enumerate(fields)}
    store = dataclasses.replace(
        STORE,
        figures=figures,
        tiers={FAST: TierUse(healthy=True, calls={}, figures=figures)},
    )
    for tier in ("", FAST):
        shown = [
            sample.value
            for family in store_families(store)
            for sample in family.samples
            if sample.labels == {"tier": tier} and family.name != "hicache_storage_tier_healthy"
        ]
        assert shown == list(figures.values())


def test_what_is_not_known_is_not_shown() -> None:
    names = {family.name.removeprefix("hicache_storage_") for family in store_families(STORE)}
    assert names == {
        "abandoned_calls",
        "broken_calls",
        "call_bytes",
        "call_duration_seconds",
        "call_pages",
        "circuit_open",
        "healthy",
        "info",
        "state",
    }
