"""A cache that is put together for use tries failed pages again and leaves a broken store alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from builders import GEOMETRY, config_for, until
from scripted_parts import InjectedFactory, injected

from hicache.clock import MonotonicClock
from hicache.controller.records import PagesResult, PersistJob
from hicache.device import create_device
from hicache.hiradix_cache.build import create_local_mover
from hicache.pools import DeviceKVPool
from hicache.storage.circuit_breaker import CircuitBreakerStorage, CircuitState
from hicache.storage.instrumented import HealthState, InstrumentedStorage
from hicache.storage.memory import MemoryStorage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.wrapper import StorageVerb, storage_layers
from hicache.types import OperationId, PageHash, PageOutcome

if TYPE_CHECKING:
    from hicache.controller import LocalMover
    from hicache.controller.records import Result
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig, Page

OK, FAILED, SKIPPED = PageOutcome.OK, PageOutcome.FAILED, PageOutcome.SKIPPED
HASHES = (PageHash(b"a" * 32), PageHash(b"b" * 32))


class FailingStorage(MemoryStorage):
    """Fails to write as many pages as it is told to, one after the other."""

    num_failing = 0
    num_tried = 0

    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        self.num_tried += 1
        self.num_failing -= 1
        return FAILED if self.num_failing >= 0 else super()._write_page(key, parent_key, page)


class Bench:
    """The moving side of a cache over a store that fails."""

    def __init__(self, **options: object) -> None:
        self.backends: list[FailingStorage] = []
        pool = DeviceKVPool(GEOMETRY, num_pages=2, torch_device=torch.device("cpu"))
        self.mover: LocalMover = create_local_mover(
            config_for(),
            device=create_device("cpu"),
            device_pool=pool,
            num_host_pages=2,
            clock=MonotonicClock(),
            factory=InjectedFactory(self._create),
        )[0]
        self.mover.attach_storage(injected(**options))

    def persist(self) -> list[tuple[PageOutcome, int]]:
        """Store two pages and return what became of them."""
        self.mover.submit_storage(
            PersistJob(
                operation_id=OperationId(0),
                generation=0,
                hashes=HASHES,
                parent_hash=b"",
                host_pages=np.array([0, 1]),
            )
        )
        results: list[Result] = []

        def has_ended() -> bool:
            results.extend(self.mover.poll())
            return bool(results)

        until(has_ended)
        assert isinstance(results[0], PagesResult)
        return list(results[0].outcomes)

    @property
    def layers(self) -> list[HiCacheStorage]:
        backend = self.mover._storage.backend
        assert backend is not None
        return list(storage_layers(backend))

    def _create(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        self.backends.append(FailingStorage(config))
        return self.backends[-1]


def test_instruments_are_outside_and_the_breaker_is_outside_of_the_retries() -> None:
    bench = Bench()
    kinds = [type(layer) for layer in bench.layers]
    assert kinds == [InstrumentedStorage, CircuitBreakerStorage, RetryingStorage, FailingStorage]
    assert bench.mover.close(10.0)


def test_retries_and_the_breaker_can_be_left_out_and_instruments_cannot() -> None:
    bench = Bench(retry_attempts=0, breaker_failures=0)
    assert [type(layer) for layer in bench.layers] == [InstrumentedStorage, FailingStorage]
    bench.backends[0].num_failing = 1
    assert bench.persist() == [(FAILED, 1), (SKIPPED, 1)]
    assert bench.mover.close(10.0)


def test_a_page_that_fails_twice_is_stored_all_the_same() -> None:
    bench = Bench()
    bench.backends[0].num_failing = 2
    assert bench.persist() == [(OK, 2)]
    report = bench.mover.storage_report()
    assert report.snapshot is not None
    assert report.snapshot.health.state is HealthState.GREEN
    assert report.snapshot.verbs[StorageVerb.SET].pages == {OK: 2}
    assert bench.mover.close(10.0)


def test_a_store_that_keeps_failing_is_left_alone_and_its_health_is_red() -> None:
    bench = Bench(retry_attempts=1, breaker_failures=2, breaker_cooldown_seconds=1000.0)
    bench.backends[0].num_failing = 1000
    for num_tried in (2, 4, 4):
        assert bench.persist() == [(FAILED, 1), (SKIPPED, 1)]
        assert bench.backends[0].num_tried == num_tried
    (breaker,) = (layer for layer in bench.layers if isinstance(layer, CircuitBreakerStorage))
    assert breaker.states()[StorageVerb.SET] is CircuitState.OPEN
    report = bench.mover.storage_report()
    assert report.snapshot is not None
    assert report.snapshot.health.state is HealthState.RED
    assert bench.mover.close(10.0)
