"""The deciding side in this process, the moving side in another: plain records between them.

Here are tree, free lists and queues; there are pools, streams and storage. Whether bytes are right
is looked at there.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from hicache.clock import MonotonicClock
from hicache.config import HiCacheConfig, PrefetchConfig, StorageConfig
from hicache.controller import HiCacheController
from hicache.controller.records import (
    CopyResult,
    LoadJob,
    PagesResult,
    PersistJob,
    Phase,
    PrefetchJob,
    QueryJob,
    QueryResult,
    WriteJob,
)
from hicache.device.cpu import CpuDevice
from hicache.errors import ClosedError, ConfigError, HiCacheError
from hicache.hiradix_cache import HiRadixCache, LoadStatus
from hicache.hiradix_cache.build import create_local_mover
from hicache.layout import KVGeometry
from hicache.pools import DeviceKVPool, PageAllocator
from hicache.radix import RadixKey
from hicache.ranks import SingleRank
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryStorage
from hicache.storage.page_store import list_pages
from hicache.storage.wrapper import StorageVerb
from hicache.testing.faulty_storage import FaultyStorage, Gate, Verb
from hicache.testing.invariants import check_system
from hicache.testing.remote_mover import RemoteMover, serve_mover
from hicache.testing.stamped_kv import fill_pages, read_pages, stamp_of, write_stamps
from hicache.types import NodeId, OperationId, PageHash, PageOutcome, PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from hicache.controller.records import Job, Result
    from hicache.storage import HiCacheStorage, HiCacheStorageConfig
    from hicache.types import IntArray

PAGE, NUM_DEVICE_PAGES, NUM_HOST_PAGES = 4, 8, 16
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=PAGE)
CONFIG = HiCacheConfig(
    page_size=PAGE,
    load_back_threshold_tokens=PAGE,
    prefetch=PrefetchConfig(threshold_tokens=PAGE),
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
)
TOKENS = list(range(5 * PAGE))
GUARD_SECONDS = 60.0
POISON = -7.0


class GatedFactory(StorageBackendFactory):
    """Knows also a memory store whose reads can be held."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.register_backend("file", "hicache.storage.page_store", "PageStore")
        self._gate = gate

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        if name == "gated":
            return FaultyStorage(MemoryStorage(config), gates={Verb.EXISTS: self._gate})
        return super().create_backend(name, config)


def move(connection: Connection[Any, Any]) -> None:
    """The moving process: a whole moving side, and commands for what only it can see."""
    torch.set_num_threads(1)
    gate = Gate()
    device = CpuDevice(wait_timeout_seconds=GUARD_SECONDS)
    pool = DeviceKVPool(GEOMETRY, num_pages=NUM_DEVICE_PAGES, torch_device=device.torch_device)
    mover, counter = create_local_mover(
        CONFIG,
        device=device,
        device_pool=pool,
        num_host_pages=NUM_HOST_PAGES,
        clock=MonotonicClock(),
        factory=GatedFactory(gate),
    )

    def stamp(pages: IntArray, first_page: int) -> None:
        write_stamps(pool, RadixKey(TOKENS), pages, first_page=first_page)

    def holds(pages: IntArray, first_page: int) -> bool:
        expected = stamp_of(RadixKey(TOKENS), GEOMETRY, first_page=first_page)
        return torch.equal(read_pages(pool, pages), expected[:, :, : len(pages)])

    def compute(producer: int) -> None:
        """Wait for the layers of a load, as the model's batch does."""
        counter.set_consumer(producer)
        for layer in range(GEOMETRY.num_layers):
            pool.get_kv_buffer(layer)
        counter.set_consumer(())

    serve_mover(
        connection,
        mover,
        commands={
            "stamp": stamp,
            "holds": holds,
            "compute": compute,
            "poison": lambda pages: fill_pages(pool, pages, POISON),
            "divide": lambda number: 1 / number,
            "await_hung_call": lambda: gate.entered.wait(GUARD_SECONDS),
            "die": lambda: os._exit(3),
        },
    )


class Moving(NamedTuple):
    """A moving process and this side's handle on it."""

    process: BaseProcess
    mover: RemoteMover


def start_moving() -> Moving:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=move, args=(there,), daemon=True)
    process.start()
    there.close()
    return Moving(process, RemoteMover(here, reply_timeout_seconds=GUARD_SECONDS))


class Deciding:
    """Tree, free lists and queues; never a tensor."""

    def __init__(self, mover: RemoteMover) -> None:
        self.mover = mover
        self.device_pages = PageAllocator(NUM_DEVICE_PAGES)
        controller = HiCacheController(
            CONFIG,
            device_allocator=self.device_pages,
            host_allocator=PageAllocator(NUM_HOST_PAGES),
            mover=mover,
            ranks=SingleRank(),
        )
        self.cache = HiRadixCache(controller)

    def insert(self, key: RadixKey) -> None:
        pages = self.device_pages.alloc(len(key) // PAGE)
        assert pages is not None
        self.mover.call("stamp", pages, 0)
        self.cache.insert(key, pages, request_id="r", chunked=False)

    def settle(self) -> None:
        self.step_until(lambda: not self.cache.num_in_flight)

    def step_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + GUARD_SECONDS
        while not condition():
            self.cache.check_hicache_events()
            assert check_system(self.cache) == []
            assert time.monotonic() < end
            time.sleep(0.001)

    def evict_device(self) -> None:
        self.cache.evict(NUM_DEVICE_PAGES)
        assert self.device_pages.num_available == NUM_DEVICE_PAGES
        self.mover.call("poison", self.device_pages.free_pages())

    def holds(self, key: RadixKey) -> tuple[int, bool]:
        """Pages of `key` on the device, and whether their bytes are right."""
        pages = self.cache.match_prefix(key).device_pages
        return len(pages), self.mover.call("holds", pages, 0)


@pytest.fixture(scope="module")
def moving() -> Iterator[Moving]:
    moving = start_moving()
    yield moving
    assert moving.mover.close(GUARD_SECONDS)
    moving.process.join(GUARD_SECONDS)
    assert moving.process.exitcode == 0
    assert not [one for one in threading.enumerate() if one.name.startswith("hicache")]


def test_all_four_movements_bring_the_right_bytes(moving: Moving, tmp_path: Path) -> None:
    key = RadixKey(TOKENS)
    deciding = Deciding(moving.mover)
    cache = deciding.cache
    storage = StorageConfig(
        backend="file",
        extra_config={"path": str(tmp_path)},
        model_name="model",
        weights_revision="1",
        batch_pages=2,
    )
    cache.attach_storage_backend(storage)
    deciding.insert(key)
    deciding.settle()
    assert len(list(list_pages(str(tmp_path)))) == 5
    deciding.evict_device()
    cache.evict_host(NUM_HOST_PAGES)
    assert cache.match_prefix(key).host_hit_tokens == 0
    assert cache.prefetch_from_storage("p", key)
    deciding.settle()
    assert cache.pop_prefetch_loaded_tokens("p") == len(key)
    load = cache.init_load_back(cache.match_prefix(key))
    assert load.status is LoadStatus.QUEUED
    moving.mover.call("compute", cache.ready_to_load_host_cache())
    assert moving.mover.call("holds", load.device_pages, 0)
    deciding.settle()
    assert deciding.holds(key) == (5, True)
    snapshot = cache.storage_status.report.snapshot
    assert snapshot is not None
    assert snapshot.verbs[StorageVerb.SET].pages == {PageOutcome.OK: 5}
    assert cache.clear_storage_backend() == 5
    cache.detach_storage_backend()
    assert cache.controller.storage is None


def test_a_reset_lets_copies_under_way_end_over_there(moving: Moving) -> None:
    deciding = Deciding(moving.mover)
    for _ in range(20):
        deciding.insert(RadixKey(TOKENS))
        deciding.cache.reset()
        assert check_system(deciding.cache) == []
        deciding.settle()
    assert deciding.device_pages.num_available == NUM_DEVICE_PAGES


def test_errors_over_there_are_errors_here_and_change_nothing(moving: Moving) -> None:
    deciding = Deciding(moving.mover)
    nowhere = StorageConfig(backend="nowhere", model_name="model", weights_revision="1")
    with pytest.raises(ConfigError, match="no storage backend 'nowhere'"):
        deciding.cache.attach_storage_backend(nowhere)
    with pytest.raises(HiCacheError, match="ZeroDivisionError"):
        moving.mover.call("divide", 0)
    assert moving.mover.call("divide", 4) == 0.25
    deciding.insert(RadixKey(TOKENS))
    deciding.settle()
    deciding.evict_device()
    assert deciding.cache.match_prefix(RadixKey(TOKENS)).host_hit_tokens == len(TOKENS)


def test_a_hung_call_does_not_hang_close_and_a_dead_process_is_an_error_at_once() -> None:
    process, mover = start_moving()
    deciding = Deciding(mover)
    deciding.cache.attach_storage_backend(
        StorageConfig(backend="gated", model_name="model", weights_revision="1")
    )
    deciding.cache.prefetch_from_storage("p", RadixKey(TOKENS))
    # Before that, closing gives the operation up at once, and nothing hangs.
    assert mover.call("await_hung_call")
    assert not deciding.cache.close(0.05)
    assert deciding.cache.num_in_flight == 1
    with pytest.raises(ClosedError, match="moving process is gone"):
        mover.call("die")
    process.join(GUARD_SECONDS)
    assert process.exitcode == 3
    with pytest.raises(ClosedError, match="moving process is gone"):
        deciding.cache.check_hicache_events()
    with pytest.raises(ClosedError, match="start a new one"):
        deciding.cache.release_aborted_request("p")
    assert deciding.cache.close()
    assert deciding.cache.close()


class PlainUnpickler(pickle.Unpickler):
    """Knows nothing but the records, their enums, and arrays of numbers."""

    def find_class(self, module: str, name: str) -> Any:
        plain = module in ("hicache.controller.records", "hicache.types")
        plain |= module.startswith("numpy") and name in (
            "_reconstruct",
            "ndarray",
            "dtype",
            "_frombuffer",
        )
        assert plain, f"{module}.{name} is no plain record"
        return super().find_class(module, name)


ID = OperationId(7)
PAGES = np.array([4, 0, 2])
HASHES = (PageHash(b"a" * 32), PageHash(b"b" * 32))
RECORDS = [
    WriteJob(
        operation_id=ID,
        generation=3,
        device_pages=PAGES,
        host_pages=PAGES + 1,
        node_ids=(NodeId(1), NodeId(-1)),
    ),
    LoadJob(operation_id=ID, generation=3, host_pages=PAGES, device_pages=PAGES + 1, node_ids=()),
    QueryJob(operation_id=ID, generation=3, hashes=HASHES),
    PrefetchJob(operation_id=ID, generation=3, hashes=HASHES, parent_hash=b"", host_pages=PAGES),
    PersistJob(operation_id=ID, generation=3, hashes=HASHES, parent_hash=b"", host_pages=PAGES),
    CopyResult(
        operation_id=ID,
        generation=3,
        good=False,
        num_pages=0,
        num_bytes=0,
        seconds=0.5,
        error="text",
    ),
    QueryResult(operation_id=ID, generation=3, phase=Phase.OVERDUE, num_pages=2, seconds=0.5),
    PagesResult(
        operation_id=ID,
        generation=3,
        phase=Phase.RUNNING,
        num_good=1,
        outcomes=((PageOutcome.OK, 1), (PageOutcome.MISS, 2)),
        num_bytes=9,
        seconds=0.5,
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_what_the_sides_tell_each_other_is_plain(record: Job | Result) -> None:
    copy = PlainUnpickler(io.BytesIO(pickle.dumps(record))).load()
    assert type(copy) is type(record)
    for name, value in record._asdict().items():
        assert np.array_equal(getattr(copy, name), value) or getattr(copy, name) == value
