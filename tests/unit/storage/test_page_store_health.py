"""Trouble of the page store is a miss, shows in its health, and passes by itself.

Here is all that a controller has around the store: retries, breaker, instruments and workers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb
import numpy as np
import pytest
from http_rig import GUARD_SECONDS, STARTED_WITH, STORAGE, HttpRig
from page_store_tools import NO_SPACE, OK, PRESENT, break_moves, chain

from hicache.clock import ManualClock
from hicache.config import StorageConfig
from hicache.controller import StorageTier
from hicache.controller.records import PagesResult, PersistJob, PrefetchJob, QueryJob, QueryResult
from hicache.controller.store_opening import resilient_storage
from hicache.layout import HostLayout, KVGeometry
from hicache.pools import create_host_pool
from hicache.storage import StorageBackendFactory
from hicache.storage.circuit_breaker import CircuitState
from hicache.storage.instrumented import HealthState
from hicache.storage.page_store import PageStore, segments
from hicache.storage.wrapper import StorageVerb, storage_layers
from hicache.types import OperationId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache.controller.records import StorageResult
    from hicache.controller.workers import Work
    from hicache.storage.instrumented import StorageHealth
    from hicache.storage.page_store.index import Index
    from hicache.types import PageHash, PageOutcome

KEYS = chain(1, 4)
COOLDOWN = 10.0
MAX_FAILURES = 3
GEOMETRY = KVGeometry(num_layers=2, dtype="float32", page_size=4, num_kv_heads=2, head_dim=4)
GREEN, RED = HealthState.GREEN, HealthState.RED
EXISTS, GET, SET = StorageVerb.EXISTS, StorageVerb.GET, StorageVerb.SET


class AtOnce:
    """An executor without threads."""

    num_abandoned = 0

    def submit(self, work: Work) -> None:
        while work.step():
            pass

    def poll(self) -> None:
        pass

    def close(self, _timeout_seconds: float) -> bool:
        return True


class Bench:
    """The store of a rank, asked as a controller asks: it reads only what a look-up has found."""

    def __init__(self, backend: str, **extra_config: object) -> None:
        self.clock = ManualClock()
        self.pool = create_host_pool(
            GEOMETRY, num_pages=8, layout=HostLayout.PAGE_HEAD, pinned=False, huge_pages=False
        )
        self.tier = StorageTier(
            host_pools=[self.pool],
            factory=StorageBackendFactory.default(),
            clock=self.clock,
            create_executor=lambda _config, _clock: AtOnce(),
            wrap_backend=resilient_storage,
        )
        self.tier.attach(
            StorageConfig(
                backend=backend,
                model_name="model",
                weights_revision="1",
                extra_config=extra_config,
                breaker_failures=MAX_FAILURES,
                breaker_cooldown_seconds=COOLDOWN,
                # Too short for the pause before pages are tried again, which is not on this clock.
                call_timeout_seconds=0.01,
            )
        )

    def read(self, keys: Sequence[PageHash]) -> tuple[int, list[PageOutcome]]:
        """Return how many pages were found, and what became of reading those."""
        [query] = self._run(QueryJob(OperationId(1), 1, tuple(keys)))
        assert isinstance(query, QueryResult)
        found = tuple(keys[: query.num_pages])
        places = np.arange(len(found))
        results = self._run(PrefetchJob(OperationId(2), 1, found, b"", places)) if found else []
        return len(found), _outcomes(results)

    def write(self, keys: Sequence[PageHash]) -> list[PageOutcome]:
        places = np.arange(len(keys))
        return _outcomes(self._run(PersistJob(OperationId(3), 1, tuple(keys), b"", places)))

    @property
    def health(self) -> StorageHealth:
        snapshot = self.tier.report().snapshot
        assert snapshot is not None
        return snapshot.health

    @property
    def open_circuits(self) -> set[StorageVerb]:
        states = self.tier.report().circuits
        return {verb for verb, state in states.items() if state is not CircuitState.CLOSED}

    @property
    def index(self) -> Index:
        """Of the page store."""
        assert self.tier.backend is not None
        *_, store = storage_layers(self.tier.backend)
        assert isinstance(store, PageStore)
        access = store._access._access
        assert access is not None
        return access.store.index

    def close(self) -> None:
        assert self.tier.detach(timeout_seconds=10.0)
        self.pool.close()

    def _run(self, job: QueryJob | PrefetchJob | PersistJob) -> list[StorageResult]:
        self.tier.submit(job)
        return self.tier.poll()


def _outcomes(results: list[StorageResult]) -> list[PageOutcome]:
    pages = [result for result in results if isinstance(result, PagesResult)]
    return [one for result in pages for one, count in result.outcomes for _ in range(count)]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(backend: str, **extra_config: object) -> Bench:
        benches.append(Bench(backend, **extra_config))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


class Scene(NamedTuple):
    """What a fault is given: the store, its directory, and changes that end with the fault."""

    bench: Bench
    path: Path
    patch: pytest.MonkeyPatch
    full_disk: Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def directory_removed(scene: Scene) -> Iterator[None]:
    elsewhere = scene.path.with_name("elsewhere")
    scene.path.rename(elsewhere)
    yield
    elsewhere.rename(scene.path)


@contextlib.contextmanager
def reads_fail(scene: Scene) -> Iterator[None]:
    break_moves(scene.patch, "read", errno.EIO)
    yield


@contextlib.contextmanager
def writes_fail(scene: Scene) -> Iterator[None]:
    break_moves(scene.patch, "write", errno.EIO)
    yield


@contextlib.contextmanager
def disk_full(scene: Scene) -> Iterator[None]:
    break_moves(scene.patch, "write", errno.ENOSPC)
    yield


@contextlib.contextmanager
def device_full(scene: Scene) -> Iterator[None]:
    with scene.full_disk():
        yield


class BrokenEnvironment:
    """An LMDB environment whose transactions fail, or only those that write."""

    def __init__(self, environment: Any, error: lmdb.Error, *, reads_too: bool) -> None:
        self._environment = environment
        self._error = error
        self._reads_too = reads_too

    def begin(self, *, write: bool = False) -> Any:
        if write or self._reads_too:
            raise self._error
        return self._environment.begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


@contextlib.contextmanager
def read_only(scene: Scene) -> Iterator[None]:
    break_moves(scene.patch, "write", errno.EROFS)
    error = lmdb.ReadonlyError("Read-only file system")
    environment = BrokenEnvironment(scene.bench.index._env, error, reads_too=False)
    scene.patch.setattr(scene.bench.index, "_env", environment)
    yield


@contextlib.contextmanager
def index_unusable(scene: Scene) -> Iterator[None]:
    error = lmdb.CorruptedError("located page was wrong type")
    environment = BrokenEnvironment(scene.bench.index._env, error, reads_too=True)
    scene.patch.setattr(scene.bench.index, "_env", environment)
    yield


class Fault(NamedTuple):
    """What goes wrong, the verbs that fail by it, and what is said of it."""

    begin: Callable[[Scene], AbstractContextManager[None]]
    verbs: set[StorageVerb]
    text: str


FAULTS = [
    Fault(directory_removed, {EXISTS, SET}, "No such file or directory"),
    Fault(reads_fail, {GET}, "Input/output error"),
    Fault(writes_fail, {SET}, "Input/output error"),
    Fault(disk_full, {SET}, "No space left on device"),
    Fault(device_full, {SET}, "No space left on device"),
    Fault(read_only, {SET}, "Read-only file system"),
    Fault(index_unusable, {EXISTS, SET}, "located page was wrong type"),
]


@pytest.mark.usefixtures("either_io")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.begin.__name__)
def test_a_fault_is_a_miss_that_shows_and_passes_by_itself(
    make_bench: Callable[..., Bench],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full_disk: Callable[[], AbstractContextManager[None]],
    fault: Fault,
) -> None:
    path = tmp_path / "store"
    bench = make_bench("file", path=str(path), min_free_bytes=0)
    assert bench.write(KEYS) == [OK] * 4
    assert bench.read(KEYS) == (4, [OK] * 4)
    assert bench.health.state is GREEN
    with monkeypatch.context() as patch, fault.begin(Scene(bench, path, patch, full_disk)):
        for attempt in range(2 * MAX_FAILURES):
            found, read = bench.read(KEYS)
            written = bench.write(chain(2 + attempt, 3))
            if EXISTS in fault.verbs:
                assert found == 0
            elif GET in fault.verbs:
                assert OK not in read
            else:
                assert read == [OK] * 4
            assert (written == [OK] * 3) == (SET not in fault.verbs)
            assert (OK in written) == (SET not in fault.verbs)
            assert bench.health.state is RED
            assert fault.text in str(bench.health.last_error)
        assert bench.open_circuits == fault.verbs
    bench.clock.advance(COOLDOWN)
    again = chain(99, 3)
    assert bench.read(KEYS) == (4, [OK] * 4)
    assert bench.write(again) == [OK] * 3
    assert bench.read(again) == (3, [OK] * 3)
    assert bench.health.state is GREEN
    assert bench.open_circuits == set()


def test_look_ups_alone_turn_the_health_red_and_green_again(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """A controller that finds nothing reads nothing, and may have nothing to write."""
    path = tmp_path / "store"
    bench = make_bench("file", path=str(path), min_free_bytes=0)
    bench.write(KEYS)
    path.rename(tmp_path / "elsewhere")
    for _ in range(10):
        assert bench.read(KEYS) == (0, [])
        assert bench.health.state is RED
        assert "No such file or directory" in str(bench.health.last_error)
    (tmp_path / "elsewhere").rename(path)
    bench.clock.advance(COOLDOWN)
    assert bench.read(KEYS) == (4, [OK] * 4)
    assert bench.health.state is GREEN


def test_a_disk_without_any_space_from_the_start_is_used_when_it_has_some(
    make_bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where space is reserved, before anything is written."""

    def reserve(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    bench = make_bench("file", path=str(tmp_path), min_free_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "reserve_range", reserve)
        for attempt in range(MAX_FAILURES):
            assert bench.open_circuits == set()
            assert bench.write(chain(attempt, 3))[0] is NO_SPACE
            assert bench.health.state is RED
        assert bench.open_circuits == {SET}
    bench.clock.advance(COOLDOWN)
    assert bench.write(KEYS) == [OK] * 4
    assert bench.read(KEYS) == (4, [OK] * 4)
    assert (bench.health.state, bench.open_circuits) == (GREEN, set())


def test_a_store_that_is_full_by_its_own_limit_makes_room_and_is_well(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    bench = make_bench("file", path=str(tmp_path), min_free_bytes=0, max_bytes=1 << 20)
    for name in range(200):
        keys = chain(name, 8)
        assert bench.write(keys) == [OK] * 8
        assert bench.health.state is GREEN
    assert bench.open_circuits == set()


@pytest.mark.parametrize("vanished", [0, 1])
def test_a_tier_that_fails_costs_what_no_other_has_and_is_named(
    make_bench: Callable[..., Bench], tmp_path: Path, vanished: int
) -> None:
    paths = [tmp_path / "fast", tmp_path / "large"]
    options = [{"path": str(path), "min_free_bytes": 0} for path in paths]
    tiers = [{"backend": "file", "extra_config": one} for one in options]
    bench = make_bench("tiered", tiers=tiers)
    bench.write(KEYS)
    paths[vanished].rename(tmp_path / "elsewhere")
    assert bench.read([*KEYS, *chain(2, 1)]) == (4, [OK] * 4)
    assert bench.health.state is GREEN
    if vanished == 0:
        # It is not required, and the other has what it had.
        assert bench.write(chain(2, 3)) == [OK] * 3
        assert bench.health.state is GREEN
    else:
        assert OK not in bench.write(chain(2, 3))
        assert bench.health.state is RED
    assert f"tier {vanished} (file): " in str(bench.health.last_error)
    assert "No such file or directory" in str(bench.health.last_error)
    (tmp_path / "elsewhere").rename(paths[vanished])
    assert set(bench.write(chain(2, 3))) <= {OK, PRESENT}
    assert bench.health.state is GREEN


def test_the_server_says_degraded_while_the_directory_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "store"
    started_with = StorageConfig(
        backend="file",
        model_name="tiny",
        weights_revision="0",
        extra_config={"path": str(path), "min_free_bytes": 0},
        call_timeout_seconds=STARTED_WITH.call_timeout_seconds,
        breaker_failures=1,
        breaker_cooldown_seconds=0.01,
    )
    with HttpRig(started_with=started_with) as rig:
        assert rig.call("PUT", STORAGE, {"hicache_storage_backend": "file"}).status == 200
        first = rig.run(1)
        assert rig.call("GET", "/health").json == {"status": "ok", "reasons": []}
        rig.drop_memory()
        path.rename(tmp_path / "elsewhere")
        lost = rig.run(1)
        assert (lost.storage_hit_tokens, lost.output_ids) == (0, first.output_ids)
        health = rig.call("GET", "/health")
        assert (health.status, health.json["status"]) == (200, "degraded")
        assert "calls to storage backend 'file' fail" in health.json["reasons"]
        (tmp_path / "elsewhere").rename(path)
        end = time.monotonic() + GUARD_SECONDS
        seed = 2
        while rig.call("GET", "/health").json["status"] != "ok":
            assert time.monotonic() < end, "the health does not come back"
            # Writes are found to work when there is something new to write.
            rig.run(seed)
            seed += 1
        rig.drop_memory()
        again = rig.run(1)
        assert (again.storage_hit_tokens > 0, again.output_ids) == (True, first.output_ids)
