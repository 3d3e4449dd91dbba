"""The moving side on a simulated device: what runs in which order, and what comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from controller_fakes import ScriptedStorage, until

from hicache.clock import ManualClock
from hicache.config import StorageConfig
from hicache.controller import LocalMover, PoolPair, StorageTier
from hicache.controller.records import LoadJob, PersistJob, Phase, PrefetchJob, QueryJob, WriteJob
from hicache.device.simulated import SimulatedDevice
from hicache.layout import HostLayout, KVGeometry
from hicache.pools import create_host_pool
from hicache.storage import StorageBackendFactory
from hicache.transfer import LayerDoneCounter, TransferPlan
from hicache.types import OperationId, PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.controller.records import Result, StorageJob
    from hicache.pools import HostKVPool
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig, Page
    from hicache.types import IntArray

PAGES = np.array([3, 1])


class LoggingEngine:
    """Copies nothing and notes what it was asked for."""

    def __init__(self, name: str, num_layers: int, log: list[str], broken: set[str]) -> None:
        self.num_layers = num_layers
        self._name = name
        self._log = log
        self._broken = broken

    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        return TransferPlan.pair(device_pages, host_pages, min_run_pages=9)

    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        self._note(f"write {self._name}{layer}")

    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        self._note(f"load {self._name}{layer}")

    def layer_bytes(self, plan: TransferPlan) -> int:
        return 10 * len(plan.host_pages)

    def _note(self, what: str) -> None:
        self._log.append(what)
        if what in self._broken:
            raise RuntimeError(what)


class OneBackend(StorageBackendFactory):
    """Answers every name with the backend of the test."""

    def __init__(self, backend: HiCacheStorage) -> None:
        super().__init__()
        self._backend = backend

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        self.config = config
        return self._backend


def host_pool(num_layers: int) -> HostKVPool:
    geometry = KVGeometry(
        num_layers=num_layers, num_kv_heads=1, head_dim=8, dtype="float32", page_size=4
    )
    return create_host_pool(
        geometry, num_pages=4, layout=HostLayout.PAGE_FIRST, pinned=False, huge_pages=False
    )


class Bench:
    """A mover over the model's KV with 3 layers and a side pool with 1."""

    def __init__(self, backend: HiCacheStorage | None = None) -> None:
        self.log: list[str] = []
        self.broken: set[str] = set()
        self.device = SimulatedDevice()
        self.pools = [host_pool(3), host_pool(1)]
        self.counter = LayerDoneCounter(self.device, num_layers=3, num_slots=1)
        self.factory = OneBackend(backend or ScriptedStorage())
        clock = ManualClock()
        tier = StorageTier(host_pools=self.pools, factory=self.factory, clock=clock)
        self.mover = LocalMover(
            device=self.device,
            pairs=[
                PoolPair("kv", LoggingEngine("kv", 3, self.log, self.broken), self.pools[0]),
                PoolPair("side", LoggingEngine("side", 1, self.log, self.broken), self.pools[1]),
            ],
            counter=self.counter,
            storage=tier,
            clock=clock,
        )

    def write(self, number: int = 0) -> None:
        self.mover.submit_write(
            WriteJob(
                operation_id=OperationId(number),
                generation=5,
                device_pages=PAGES,
                host_pages=PAGES,
                node_ids=(),
            )
        )

    def load(self, number: int = 0) -> int:
        return self.mover.submit_load(
            LoadJob(
                operation_id=OperationId(number),
                generation=5,
                device_pages=PAGES,
                host_pages=PAGES,
                node_ids=(),
            )
        )

    def run(self, stream: str) -> None:
        while self.device.step(stream):
            pass


def test_a_write_moves_every_layer_of_every_pool_as_one_operation() -> None:
    bench = Bench()
    bench.write(number=7)
    assert (bench.mover.poll(), bench.log) == ([], [])
    bench.run("write")
    assert bench.log == ["write kv0", "write side0", "write kv1", "write kv2"]
    (result,) = bench.mover.poll()
    assert (result.operation_id, result.generation) == (7, 5)
    assert getattr(result, "good", None) is True
    assert getattr(result, "num_bytes", None) == 2 * 10 * (3 + 1)
    assert bench.mover.poll() == []


def test_a_layer_of_a_load_is_done_when_every_pool_has_it() -> None:
    bench = Bench()
    load = bench.counter.event(bench.load())
    done_after: dict[str, int] = {}
    while bench.device.step("load"):
        if bench.log:
            done_after.setdefault(bench.log[-1], 0)
            done_after[bench.log[-1]] = sum(event.query() for event in load._layer_events)
    assert done_after == {"load kv0": 0, "load side0": 1, "load kv1": 2, "load kv2": 3}


@pytest.mark.parametrize("broken", ["write kv1", "write side0"])
def test_a_write_fails_as_a_whole_when_one_layer_of_one_pool_does(broken: str) -> None:
    bench = Bench()
    bench.broken.add(broken)
    bench.write()
    bench.run("write")
    bench.broken.clear()
    bench.write(number=1)
    bench.run("write")
    failed, sound = bench.mover.poll()
    assert (getattr(failed, "good", None), getattr(sound, "good", None)) == (False, True)
    assert failed.error == f"RuntimeError: {broken}"
    assert getattr(failed, "num_bytes", None) == 0


def test_a_load_without_a_free_slot_is_not_begun() -> None:
    bench = Bench()
    assert bench.load() == 0
    pending = bench.device.pending
    assert bench.load() == -1
    assert bench.device.pending == pending
    bench.run("load")
    assert bench.load() == 0


class PageStorage(ScriptedStorage):
    """Notes where the pages lie."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[Page] = []

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        return len(keys)

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self.pages += pages
        return [PageOutcome.OK] * len(keys)


def test_a_page_in_storage_is_the_page_of_every_pool_one_after_the_other() -> None:
    backend = PageStorage()
    bench = Bench(backend)
    bench.mover.attach_storage(StorageConfig(backend="any", model_name="m", weights_revision="1"))
    assert bench.factory.config.page_bytes == (3 + 1) * 2 * 4 * 8 * 4
    assert bench.factory.config.namespace.kv_shape == "+".join(
        pool.geometry.kv_shape for pool in bench.pools
    )
    expected = [
        tuple(piece for pool in bench.pools for piece in pool.page_pieces(page))
        for page in PAGES.tolist()
    ]
    bench.mover.submit_storage(
        PrefetchJob(
            operation_id=OperationId(1),
            generation=0,
            hashes=(PageHash(b"a" * 32), PageHash(b"b" * 32)),
            parent_hash=b"",
            host_pages=PAGES,
        )
    )
    until(lambda: bool(bench.mover.poll()))
    assert backend.pages == expected
    assert bench.mover.close(10.0)


NOTHING: list[StorageJob] = [
    QueryJob(operation_id=OperationId(1), generation=2, hashes=()),
    PrefetchJob(
        operation_id=OperationId(1), generation=2, hashes=(), parent_hash=b"", host_pages=PAGES
    ),
    PersistJob(
        operation_id=OperationId(1), generation=2, hashes=(), parent_hash=b"", host_pages=PAGES
    ),
]


@pytest.mark.parametrize("job", NOTHING, ids=lambda job: type(job).__name__)
def test_a_storage_job_without_a_store_ends_at_once_with_nothing(job: StorageJob) -> None:
    bench = Bench()
    bench.mover.submit_storage(job)
    results: list[Result] = bench.mover.poll()
    assert [(getattr(one, "phase", None), one.operation_id) for one in results] == [
        (Phase.ENDED, 1)
    ]
    assert results[0].error == "no storage backend is attached"
