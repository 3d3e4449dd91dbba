"""Close ends in time, whatever hangs, and takes no memory from those who may still write to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from builders import PAGE, Rig, config_for, hicache_threads, store_with, tokens, until
from scripted_parts import Barrier, faulty_storage, injected

from hicache.config import PrefetchConfig
from hicache.controller.records import QueryJob
from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from hicache.controller.records import StorageJob

KEY = RadixKey(tokens(1, 2, 3, 4))
STORED = RadixKey(tokens(21, 22, 23, 24))
AHEAD = RadixKey(tokens(31, 32, 33, 34))
SOON = 0.05


def make_rig(barriers: dict[Verb, Barrier] | None = None, **options: object) -> Rig:
    config = config_for(prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, storage=injected(**options))
    rig = Rig(config, create_storage=faulty_storage(store_with(STORED), gates=barriers))
    rig.gates += (barriers or {}).values()
    return rig


def assert_closed(rig: Rig) -> None:
    """Assert that nothing is left: no thread, no operation, no page, no memory."""
    assert rig.cache.num_in_flight == 0
    assert rig.cache.held_pages() == ([], [])
    rig.check()
    until(lambda: not hicache_threads())
    assert rig.closed


def test_an_idle_cache_closes_and_closes_again() -> None:
    with make_rig() as rig:
        rig.insert(KEY)
        rig.settle()
        assert rig.cache.close()
        assert_closed(rig)
        assert rig.cache.close()


def test_close_lets_copies_end_and_reports_them() -> None:
    with make_rig() as rig:
        rig.insert(KEY)
        assert rig.cache.close()
        assert_closed(rig)
        assert rig.cache.tree.host_size == len(KEY)


def test_a_load_that_was_only_queued_is_dropped() -> None:
    with make_rig() as rig:
        rig.insert(KEY)
        rig.settle()
        rig.evict_device()
        assert rig.begin_load(KEY).status is LoadStatus.QUEUED
        assert rig.cache.close()
        assert_closed(rig)
        assert rig.device_pages.num_available == 8


@pytest.mark.parametrize("verb", [Verb.SET, Verb.EXISTS, Verb.GET])
def test_with_a_storage_call_that_hangs_close_returns_in_time_and_completes_later(
    verb: Verb,
) -> None:
    barriers = {verb: Barrier()}
    with make_rig(barriers) as rig:
        barriers[verb].shut()
        rig.insert(KEY)
        rig.begin_prefetch(STORED)
        rig.step_until(barriers[verb].entered.is_set)
        started = time.monotonic()
        assert not rig.cache.close(SOON)
        assert time.monotonic() - started < 5.0
        assert not rig.closed
        assert len(hicache_threads()) >= 1
        rig.check()
        barriers[verb].open()
        assert rig.cache.close()
        assert_closed(rig)


@pytest.mark.parametrize("direction", ["write", "load"])
def test_with_a_copy_that_hangs_close_returns_in_time_and_completes_later(direction: str) -> None:
    with make_rig() as rig:
        rig.insert(KEY)
        rig.settle()
        rig.evict_device()
        gate = rig.gate()
        if direction == "write":
            rig.engine.write_gates[0] = gate
            rig.insert(RadixKey(tokens(7, 8)))
        else:
            rig.engine.load_gates[0] = gate
            rig.begin_load(KEY)
            rig.cache.ready_to_load_host_cache()
        assert gate.entered.wait(10)
        assert not rig.cache.close(SOON)
        assert rig.cache.num_in_flight == 1
        assert not rig.closed
        rig.check()
        gate.open()
        assert rig.cache.close()
        assert_closed(rig)


def answered(rig: Rig) -> bool:
    """Whether a result waits to be collected."""
    return len(rig.tier._results) > 0


HELD_VERB = {
    "waiting for a worker": Verb.EXISTS,
    "asking": Verb.EXISTS,
    "answered": None,
    "refused beside another": Verb.GET,
    "without room beside another": Verb.GET,
    "reading": Verb.GET,
    "arrived": None,
    "collected": None,
}
"""States of a prefetch, and the calls that stand still meanwhile."""


def bring(rig: Rig, state: str, held: Barrier) -> None:
    """Let a prefetch of `STORED` come into a state; behind another one where it has to wait."""
    if state == "waiting for a worker":
        rig.begin_prefetch(KEY, request_id="ahead")
        rig.step_until(held.entered.is_set)
    elif "beside another" in state:
        rig.begin_prefetch(AHEAD, request_id="ahead")
        if "refused" in state:
            rig.step_until(held.entered.is_set)
    assert rig.begin_prefetch(STORED) != (state == "refused beside another")
    if HELD_VERB[state] is not None:
        rig.step_until(held.entered.is_set)
        rig.step(5)
    elif state == "collected":
        rig.settle()
    else:
        if state == "arrived":
            rig.step_until(lambda: rig.host_pages.num_available < 14)
        until(lambda: answered(rig))
    num_refused = rig.cache.counters["prefetch_rate_limited"]
    assert num_refused == (state == "refused beside another")
    holds_pages = state == "arrived" or HELD_VERB[state] is Verb.GET
    assert rig.cache.controller.num_prefetch_pages == (4 if holds_pages else 0)


@pytest.mark.parametrize("how", ["detach", "close"])
@pytest.mark.parametrize("state", HELD_VERB)
def test_a_prefetch_in_any_state_ends_with_its_store(state: str, how: str) -> None:
    """C073: its budget is exactly free, and nothing of it keeps L1 from being evicted."""
    held = Barrier()
    verb = HELD_VERB[state]
    config = config_for(
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=6),
        storage=injected(num_workers=1 if state == "waiting for a worker" else 2),
    )
    create = faulty_storage(store_with(AHEAD, STORED), gates={verb: held} if verb else None)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(held)
        rig.insert(KEY.prefix(2 * PAGE))
        rig.settle()
        held.shut()
        bring(rig, state, held)
        if how == "close":
            assert rig.cache.close(SOON) == (verb is None)
            held.open()
            assert rig.cache.close()
            assert_closed(rig)
        else:
            rig.clock.advance(1000.0)
            rig.step(3)
            held.open()
            rig.settle()
            rig.cache.detach_storage_backend()
            assert rig.cache.check_prefetch_progress("p")
            rig.evict_device()
        assert rig.cache.controller.num_prefetch_pages == 0
        rig.cache.evict(8)
        assert rig.device_pages.num_available == 8


def test_persists_that_wait_for_a_worker_are_refused_and_their_pages_given_back() -> None:
    barriers = {Verb.SET: Barrier()}
    with make_rig(barriers, num_workers=1) as rig:
        barriers[Verb.SET].shut()
        for page in range(6):
            rig.insert(RadixKey(tokens(100 + page)))
        rig.step_until(lambda: rig.cache.tree.host_size == 6 * 4)
        assert not rig.cache.close(SOON)
        assert rig.cache.num_in_flight == 1
        barriers[Verb.SET].open()
        assert rig.cache.close()
        assert_closed(rig)
        rig.cache.evict_host(16)
        assert rig.host_pages.num_available == 16


def test_no_read_is_begun_on_a_store_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_rig() as rig:
        jobs: list[StorageJob] = []
        submit = rig.mover.submit_storage

        def note_and_submit(job: StorageJob) -> None:
            jobs.append(job)
            submit(job)

        monkeypatch.setattr(rig.mover, "submit_storage", note_and_submit)
        rig.begin_prefetch(STORED)
        until(lambda: answered(rig))
        assert rig.cache.close()
        assert [type(job) for job in jobs] == [QueryJob]
        assert_closed(rig)


def test_what_can_end_ends_with_close_although_another_call_hangs() -> None:
    barriers = {Verb.SET: Barrier()}
    with make_rig(barriers) as rig:
        barriers[Verb.SET].shut()
        rig.insert(KEY)
        rig.step_until(barriers[Verb.SET].entered.is_set)
        rig.begin_prefetch(STORED)
        until(lambda: answered(rig))
        assert not rig.cache.close(SOON)
        assert rig.cache.num_in_flight == 1
        assert rig.host_pages.num_available == 12
        barriers[Verb.SET].open()
        assert rig.cache.close()
        assert_closed(rig)


def test_a_reset_and_a_close_while_a_read_hangs_free_the_pages_at_its_return() -> None:
    barriers = {Verb.GET: Barrier()}
    with make_rig(barriers) as rig:
        barriers[Verb.GET].shut()
        rig.begin_prefetch(STORED)
        rig.step_until(barriers[Verb.GET].entered.is_set)
        rig.cache.reset()
        assert not rig.cache.close(SOON)
        assert rig.host_pages.num_available == 12
        barriers[Verb.GET].open()
        assert rig.cache.close()
        assert_closed(rig)
        assert rig.host_pages.num_available == 16
