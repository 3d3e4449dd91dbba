"""Acceptance cases: every wait ends, and no worker dies."""

from __future__ import annotations

import itertools
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, store_with, tokens, until
from case_tools import FileRig
from scripted_parts import GateAt, faulty_storage, injected, memory_storage
from storage_damage import num_stored_pages, remove_stored_pages
from test_prefetch_abort import num_remembered
from test_two_ranks import Rank, run_both

from hicache.config import HiCacheConfig, HostPoolConfig, PrefetchConfig, StorageConfig
from hicache.config.section import options_of
from hicache.layout import HostLayout
from hicache.radix import CopyKind, RadixKey
from hicache.storage import StorageBackendFactory
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import Fault, Gate, Verb
from hicache.types import IoBackend, PageOutcome, PrefetchPolicy, StorageAdmission, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache.storage import HiCacheStorage, HiCacheStorageConfig, Page
    from hicache.types import PageHash

KEY = RadixKey(tokens(1, 2, 3, 4))
WAIT = PrefetchPolicy.WAIT_COMPLETE
WATCHDOG_SECONDS = 2.0


def test_no_allocation_on_the_host_waits_while_nothing_can_be_evicted() -> None:
    """C023: storage still reads all 8 host pages; afterwards the same calls succeed."""
    write = Gate()
    create = faulty_storage(store_with(KEY), gates={Verb.SET: write})
    config = config_for(
        8, write_policy=WritePolicy.WRITE_BACK, prefetch_policy=WAIT, storage=injected()
    )
    other = RadixKey(tokens(31, 32))
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(write)
        rig.insert(RadixKey(tokens(*range(20, 28))))
        rig.cache.evict(8)
        rig.step_until(lambda: write.entered.is_set() and rig.device_pages.num_available == 8)
        node = rig.insert(other).node
        started = time.monotonic()
        assert rig.cache.write_backup(node) == 0
        assert rig.begin_prefetch(KEY)
        rig.step_until(lambda: rig.cache.check_prefetch_progress("p"))
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        assert time.monotonic() - started < WATCHDOG_SECONDS
        assert rig.cache.counters["prefetch_no_host_memory"] == 1
        assert rig.cache.protected_size == 0
        assert rig.hit(KEY) == (0, 0)
        write.open()
        rig.settle()
        assert rig.cache.write_backup(node) == 2
        rig.settle()
        assert rig.prefetch(KEY) == len(KEY)


CHOICES: dict[str, list[Any]] = {
    "write_policy": list(WritePolicy),
    "prefetch_policy": list(PrefetchPolicy),
    "io_backend": list(IoBackend),
    "layout": list(HostLayout),
    "admission": list(StorageAdmission),
    "backend": StorageBackendFactory.default().backend_names,
}


def backend_options(backend: str, path: Path) -> dict[str, object]:
    if backend == "file":
        return {"path": str(path)}
    if backend == "memory":
        return {}
    if backend == "tiered":
        return {"tiers": [{"backend": "memory"}, {"backend": "memory"}]}
    return {
        "backend_name": "plugin",
        "module_path": "hicache.storage.memory",
        "class_name": "MemoryStorage",
    }


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option in CHOICES for value in CHOICES[option]]
)
def test_every_value_of_every_choice_survives_a_full_cycle(
    tmp_path: Path, option: str, value: Any
) -> None:
    """C024: build, fill beyond what memory holds, evict, prefetch, load, close."""
    chosen = {name: values[0] for name, values in CHOICES.items()} | {option: value}
    backend = chosen.pop("backend")
    host = HostPoolConfig(
        layout=chosen.pop("layout"), size_bytes=12 * GEOMETRY.page_bytes, huge_pages=False
    )
    storage = injected(
        admission=chosen.pop("admission"), extra_config=backend_options(backend, tmp_path)
    )
    config = config_for(host=host, storage=storage, **chosen)

    def create(backend_config: HiCacheStorageConfig) -> HiCacheStorage:
        return StorageBackendFactory.default().create_backend(backend, backend_config)

    keys = [RadixKey(tokens(*range(4 * number, 4 * number + 4))) for number in range(8)]
    with Rig(config, create_storage=create) as rig:
        for key in keys:
            # The second use is what the selective policy waits for.
            for request_id in ("first", "second"):
                rig.insert(key, request_id=request_id)
            rig.step()
        rig.settle()
        rig.drop_memory()
        assert rig.begin_prefetch(keys[0])
        rig.settle()
        rig.cache.pop_prefetch_loaded_tokens("p")
        assert rig.hit(keys[0]) == (0, 4)
        rig.load(keys[0])
        assert rig.hit(keys[0]) == (4, 0)


def test_the_choices_of_the_cycle_are_all_there_are() -> None:
    """C024."""
    sections = (HiCacheConfig, HostPoolConfig, StorageConfig, PrefetchConfig)
    options = {name: one for section in sections for name, one in options_of(section).items()}
    enums = {name for name, one in options.items() if issubclass(one.kind, Enum)}
    assert enums == set(CHOICES) - {"backend"}


@pytest.mark.parametrize(
    ("policy", "done", "expired", "terminated"),
    list(itertools.product(PrefetchPolicy, *[[False, True]] * 3)),
)
def test_expiry_and_termination_always_end_the_wait(
    policy: PrefetchPolicy, done: bool, expired: bool, terminated: bool
) -> None:
    """C025: side pools are read with the KV as one page, so there is one transfer to wait for."""
    read = Gate()
    create = faulty_storage(store_with(KEY), gates={Verb.GET: read})
    prefetch = PrefetchConfig(
        threshold_tokens=PAGE, timeout_base_seconds=1.0, timeout_per_ki_token_seconds=0
    )
    config = config_for(storage=injected(), prefetch_policy=policy, prefetch=prefetch)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(read)
        rig.begin_prefetch(KEY)
        rig.step_until(read.entered.is_set)
        if done:
            read.open()
            rig.settle()
        if expired:
            rig.clock.advance(1.5)
        if terminated:
            rig.cache.release_aborted_request("p")
        if policy is PrefetchPolicy.BEST_EFFORT:
            rig.cache.check_prefetch_progress("p")
        rig.step(2)
        ended = done or terminated or policy is PrefetchPolicy.BEST_EFFORT
        # Nothing was computed yet, so `adaptive` goes by the time as well.
        ended |= expired and policy in (PrefetchPolicy.TIMEOUT, PrefetchPolicy.ADAPTIVE)
        assert rig.cache.check_prefetch_progress("p") == ended
        if ended:
            brought = rig.cache.pop_prefetch_loaded_tokens("p")
            assert brought == (len(KEY) if done and not terminated else 0)


class LyingStorage(MemoryStorage):
    """Says that it has every page; while `lies` each read takes a second and brings nothing."""

    def __init__(self, config: HiCacheStorageConfig, store: MemoryPages) -> None:
        super().__init__(config, store=store)
        self.lies = True
        self.num_begun = self.num_ended = 0
        self._seconds = threading.Semaphore(0)

    def pass_second(self) -> None:
        """Let the read that is under way end."""
        ended = self.num_ended
        self._seconds.release()
        until(lambda: self.num_ended > ended)

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        return len(keys) if self.lies else super().batch_exists(keys)

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        if not self.lies:
            return super().batch_get(keys, parent_keys, pages, deadline=deadline)
        self.num_begun += 1
        self._seconds.acquire()
        self.num_ended += 1
        return [PageOutcome.TIMEOUT] + [PageOutcome.SKIPPED] * (len(keys) - 1)


@pytest.mark.parametrize("policy", [WAIT, PrefetchPolicy.TIMEOUT])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_stale_presence_does_not_cost_every_request_a_timeout(
    policy: PrefetchPolicy, at_once: bool
) -> None:
    """C026: 20 requests, the seconds of a few at most; a page stored anew is believed again."""
    storages: list[LyingStorage] = []

    def create(config: HiCacheStorageConfig) -> LyingStorage:
        storages.append(LyingStorage(config, MemoryPages()))
        return storages[-1]

    config = config_for(
        100,
        storage=injected(num_workers=1),
        prefetch_policy=policy,
        prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=100),
    )
    with Rig(config, create_storage=create) as rig:
        (storage,) = storages

        def let_time_pass() -> None:
            while rig.cache.num_in_flight:
                rig.step()
                if storage.num_begun > storage.num_ended:
                    storage.pass_second()
                    until(lambda: len(rig.tier._results) > 0)

        names = [str(number) for number in range(20)]
        for name in names:
            assert rig.begin_prefetch(KEY, request_id=name)
            if not at_once:
                let_time_pass()
        let_time_pass()
        assert all(rig.cache.check_prefetch_progress(name) for name in names)
        assert sum(rig.cache.pop_prefetch_loaded_tokens(name) for name in names) == 0
        assert 1 <= storage.num_ended <= 3
        storage.lies = False
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)


def test_a_prefix_before_a_page_that_did_not_come_is_still_fetched() -> None:
    """C026: only what was missing is doubted."""
    create = faulty_storage(store_with(KEY), faults={Verb.GET: [Fault.HOLE]})
    config = config_for(storage=injected(), prefetch_policy=WAIT)
    with Rig(config, create_storage=create) as rig:
        outcomes = rig.cache.controller.stats[CopyKind.PREFETCH].outcomes
        for num_ok in (3, 5):  # the page behind the hole is read the first time only
            assert rig.prefetch(KEY) == 2 * PAGE
            assert (outcomes["ok"], outcomes["miss"]) == (num_ok, 1)
            rig.drop_memory()
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)


def test_a_read_that_ends_because_of_a_doubt_raises_no_doubt_of_its_own() -> None:
    """C026: two requests read the same pages; the second had not got its first one."""
    second_read = GateAt(1)
    create = faulty_storage(
        store_with(KEY), faults={Verb.GET: [Fault.HOLE]}, gates={Verb.GET: second_read}
    )
    config = config_for(storage=injected(num_workers=1), prefetch_policy=WAIT)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(second_read)
        for name in ("first", "second"):
            rig.begin_prefetch(KEY, request_id=name)
        rig.step_until(second_read.entered.is_set)
        rig.step_until(lambda: rig.cache.check_prefetch_progress("second"))
        assert rig.cache.pop_prefetch_loaded_tokens("first") == 2 * PAGE
        second_read.open()
        rig.drop_memory()
        assert rig.prefetch(KEY) == 2 * PAGE


def test_all_ranks_doubt_the_same_page() -> None:
    """C026: it did not come on one of two ranks."""

    def script(rank: Rank) -> object:
        brought = []
        for name in ("first", "second"):
            rank.rig.begin_prefetch(KEY, request_id=name)
            rank.step(50)
            assert rank.rig.cache.check_prefetch_progress(name)
            brought.append(rank.rig.cache.pop_prefetch_loaded_tokens(name))
        return brought

    create = [
        faulty_storage(store_with(KEY)),
        faulty_storage(store_with(KEY), faults={Verb.GET: [Fault.RAISE]}),
    ]
    assert run_both(script, *create) == [[0, 0], [0, 0]]


def test_files_that_vanish_under_a_prefetch_are_a_miss_and_new_ones_stay(tmp_path: Path) -> None:
    """C027: deleted from outside while the read is on its way, and stored again meanwhile."""
    with FileRig(tmp_path) as rig:
        rig.insert(KEY)
        rig.settle()
    read = Gate()
    with FileRig(tmp_path, gates={Verb.GET: read}, prefetch_policy=WAIT) as rig:
        rig.begin_prefetch(KEY)
        rig.step_until(read.entered.is_set)
        remove_stored_pages(tmp_path)
        rig.insert(KEY.prefix(2 * PAGE))
        rig.step_until(lambda: num_stored_pages(tmp_path) == 2)
        read.open()
        rig.settle()
        assert rig.cache.pop_prefetch_loaded_tokens("p") in (0, 2 * PAGE)
        assert num_stored_pages(tmp_path) == 2
        rig.drop_memory()
        assert rig.prefetch(KEY) == 2 * PAGE


def test_a_request_that_waited_for_its_prefetch_can_store_under_the_same_id() -> None:
    """C029."""
    longer = KEY.extend(tokens(5, 6))
    store = store_with(KEY)
    config = config_for(storage=injected(), prefetch_policy=WAIT)
    with Rig(config, create_storage=memory_storage(store)) as rig:
        assert rig.prefetch(KEY, request_id="one") == len(KEY)
        rig.insert(longer, request_id="one")
        rig.settle()
        rig.step_until(lambda: num_remembered(rig) == 0)
    assert len(store._pages) == 6
