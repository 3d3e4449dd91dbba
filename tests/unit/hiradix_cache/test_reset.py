"""A reset forgets L1 and L2 at once; what is under way lands nowhere and gives its pages back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from builders import Rig, config_for, hicache_threads, store_with, tokens
from scripted_parts import Barrier, faulty_storage, injected

from hicache.errors import HiCacheError
from hicache.hiradix_cache import LoadStatus
from hicache.radix import CopyKind, RadixKey
from hicache.testing.faulty_storage import Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = RadixKey(tokens(1, 2, 3, 4))
NEW = RadixKey(tokens(1, 2, 13, 14))
STORED = RadixKey(tokens(21, 22, 23, 24))


class ResetRig(Rig):
    """A rig in which every movement can be held."""

    def __init__(self) -> None:
        self.barriers = {verb: Barrier() for verb in Verb}
        super().__init__(
            config_for(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, storage=injected()),
            create_storage=faulty_storage(store_with(STORED), gates=self.barriers),
        )
        self.write_barrier, self.load_barrier = Barrier(), Barrier()
        self.engine.write_gates[1] = self.write_barrier
        self.engine.load_gates[1] = self.load_barrier
        self.gates += [self.write_barrier, self.load_barrier, *self.barriers.values()]


@pytest.fixture
def rig() -> Iterator[ResetRig]:
    with ResetRig() as rig:
        yield rig


def hold_write(rig: ResetRig) -> Barrier:
    rig.write_barrier.shut()
    rig.insert(KEY)
    return rig.write_barrier


def hold_load(rig: ResetRig) -> Barrier:
    rig.insert(KEY)
    rig.settle()
    rig.evict_device()
    rig.load_barrier.shut()
    assert rig.begin_load(KEY).status is LoadStatus.QUEUED
    rig.cache.ready_to_load_host_cache()
    return rig.load_barrier


def hold_persist(rig: ResetRig) -> Barrier:
    rig.barriers[Verb.SET].shut()
    rig.insert(KEY)
    return rig.barriers[Verb.SET]


def hold_query(rig: ResetRig) -> Barrier:
    rig.barriers[Verb.EXISTS].shut()
    rig.begin_prefetch(STORED)
    return rig.barriers[Verb.EXISTS]


def hold_read(rig: ResetRig) -> Barrier:
    rig.barriers[Verb.GET].shut()
    rig.begin_prefetch(STORED)
    return rig.barriers[Verb.GET]


def test_an_idle_cache_is_reset_at_once_and_keeps_its_threads(rig: ResetRig) -> None:
    """C070: twenty times, and storage keeps what it has."""
    rig.insert(KEY)
    rig.settle()
    threads = hicache_threads()
    started = time.monotonic()
    for _ in range(20):
        rig.cache.reset()
        rig.check()
    assert (time.monotonic() - started) / 20 < 0.5
    assert hicache_threads() == threads
    assert (rig.device_pages.num_available, rig.host_pages.num_available) == (8, 16)
    assert rig.hit(KEY) == (0, 0)
    assert rig.prefetch(KEY) == len(KEY)


@pytest.mark.parametrize("hold", [hold_write, hold_load, hold_persist, hold_query, hold_read])
@pytest.mark.parametrize("num_resets", [1, 3])
def test_a_reset_in_the_middle_of_a_movement_takes_new_work_and_nothing_old_lands(
    rig: ResetRig, hold: Callable[[ResetRig], Barrier], num_resets: int
) -> None:
    """C070, C071."""
    barrier = hold(rig)
    rig.step_until(barrier.entered.is_set)
    for _ in range(num_resets):
        rig.cache.reset()
        rig.check()
    assert rig.hit(KEY) == (0, 0)
    result = rig.insert(NEW)
    assert rig.hit(NEW) == (4, 0)
    rig.step(5)
    barrier.open()
    rig.settle()
    assert rig.cache.held_pages() == ([], [])
    assert rig.hit(KEY) == (2, 0)
    assert rig.hit(NEW) == (4, 0)
    assert rig.device_pages.num_available == 4
    assert rig.host_pages.num_available == 12
    assert result.node.persisted
    assert rig.prefetch(STORED) == len(STORED)


def test_pages_that_a_copy_reads_are_held_over_a_reset_until_it_has_ended(rig: ResetRig) -> None:
    barrier = hold_write(rig)
    rig.step_until(barrier.entered.is_set)
    rig.cache.reset()
    assert [len(pages) for pages in rig.cache.held_pages()[0]] == [4]
    assert (rig.device_pages.num_available, rig.host_pages.num_available) == (4, 12)
    barrier.open()
    rig.settle()
    assert (rig.device_pages.num_available, rig.host_pages.num_available) == (8, 16)


def test_pages_that_two_copies_read_are_held_until_both_have_ended(rig: ResetRig) -> None:
    """A persist and a load of the same host pages."""
    persist = hold_persist(rig)
    rig.step_until(persist.entered.is_set)
    rig.cache.evict(8)
    rig.load_barrier.shut()
    assert rig.begin_load(KEY).status is LoadStatus.QUEUED
    rig.cache.ready_to_load_host_cache()
    rig.step_until(rig.load_barrier.entered.is_set)
    rig.cache.reset()
    rig.load_barrier.open()
    rig.step_until(lambda: rig.cache.num_in_flight == 1)
    assert (rig.device_pages.num_available, rig.host_pages.num_available) == (8, 12)
    persist.open()
    rig.settle()
    assert rig.host_pages.num_available == 16


def test_copies_that_are_only_queued_are_dropped_by_a_reset(rig: ResetRig) -> None:
    rig.insert(KEY)
    rig.settle()
    rig.evict_device()
    assert rig.begin_load(KEY).status is LoadStatus.QUEUED
    rig.cache.reset()
    assert rig.cache.num_in_flight == 0
    assert rig.cache.ready_to_load_host_cache() == -1
    assert (rig.device_pages.num_available, rig.host_pages.num_available) == (8, 16)


def test_a_reset_after_an_abort_empties_the_budget_too(rig: ResetRig) -> None:
    """C071: the release of the pages is on its way when the reset comes."""
    read = hold_read(rig)
    rig.step_until(read.entered.is_set)
    rig.cache.release_aborted_request("p")
    rig.step()
    rig.cache.reset()
    assert rig.cache.controller.num_prefetch_pages == 0
    assert rig.host_pages.num_available == 12
    read.open()
    rig.settle()
    assert rig.host_pages.num_available == 16
    assert rig.prefetch(STORED) == len(STORED)


def test_a_request_of_before_the_reset_is_not_waited_for(rig: ResetRig) -> None:
    read = hold_read(rig)
    rig.step_until(read.entered.is_set)
    rig.cache.reset()
    assert rig.cache.check_prefetch_progress("p")
    read.open()
    rig.settle()
    assert rig.cache.pop_prefetch_loaded_tokens("p") == 0


def test_a_reset_under_a_request_is_refused_and_changes_nothing(rig: ResetRig) -> None:
    node = rig.insert(KEY).node
    rig.cache.inc_lock_ref(node)
    with pytest.raises(HiCacheError, match="1 request lock"):
        rig.cache.reset()
    rig.settle()
    assert rig.hit(KEY) == (4, 0)
    rig.cache.dec_lock_ref(node)
    rig.cache.reset()
    assert rig.hit(KEY) == (0, 0)


def test_a_copy_from_before_a_reset_that_fails_gives_its_pages_back_too(rig: ResetRig) -> None:
    rig.engine.broken_writes.add(1)
    barrier = hold_write(rig)
    rig.step_until(barrier.entered.is_set)
    rig.cache.reset()
    barrier.open()
    rig.settle()
    assert (rig.device_pages.num_available, rig.host_pages.num_available) == (8, 16)


def test_a_read_from_before_a_reset_ends_before_its_next_call() -> None:
    read = Barrier()
    create = faulty_storage(store_with(STORED), gates={Verb.GET: read})
    with Rig(config_for(storage=injected(batch_pages=1)), create_storage=create) as rig:
        rig.gates.append(read)
        read.shut()
        rig.begin_prefetch(STORED)
        rig.step_until(read.entered.is_set)
        rig.cache.reset()
        read.open()
        rig.settle()
        assert rig.cache.controller.stats[CopyKind.PREFETCH].outcomes == {"ok": 1}
        assert rig.host_pages.num_available == 16
