"""When a rank is lost, or ranks are not equal, the others end alike, in time, and leak nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import GUARD_SECONDS, tokens
from scripted_parts import Barrier, faulty_storage, injected
from test_two_ranks import Rank, run_both, stores

from hicache.controller import AttachmentState
from hicache.errors import HiCacheError, RanksDivergedError, RanksLostError, TransferError
from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Verb
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

KEY, OTHER, THIRD = (RadixKey(tokens(*pages)) for pages in ((1, 2, 3), (1, 2, 7), (5, 6)))


def lose(rank: Rank) -> None:
    """Let a third rank die; both others notice in the next step."""
    rank.ranks.is_lost = True
    rank.step()
    cache = rank.rig.cache
    assert cache.ranks_lost
    assert cache.counters["ranks_lost"] == 1
    assert cache.num_in_flight == 0
    on_host = [node for node in cache.tree.nodes() if node.host_pages is not None]
    assert [node for node in on_host if not node.lock_ref] == []
    num_held = sum(node.num_pages for node in on_host)
    assert rank.rig.host_pages.num_available == rank.rig.host_pages.num_pages - num_held


def run(
    script: Callable[[Rank], object], *, write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
) -> None:
    """Run `script` on two ranks with stores that hold nothing; they answer alike."""
    create = map(faulty_storage, stores())
    first, second = run_both(script, *create, write_policy=write_policy)
    assert first == second


@pytest.mark.parametrize("policy", WritePolicy)
def test_after_the_loss_the_device_pages_serve_alone(policy: WritePolicy) -> None:
    def script(rank: Rank) -> object:
        rig, cache = rank.rig, rank.rig.cache
        node = rig.insert(KEY).node
        cache.inc_lock_ref(node)
        rank.settle()
        lose(rank)
        assert rig.hit(KEY) == (3, 0)
        cache.dec_lock_ref(node)
        rig.insert(OTHER)
        cache.evict(1)
        rank.step()
        assert rig.hit(OTHER)[0] + rig.hit(KEY)[0] < 6
        assert not cache.prefetch_from_storage("q", THIRD)
        assert not cache.reserve_write("q", rig.match(KEY).device_pages)
        assert cache.init_load_back(rig.match(OTHER)).status is LoadStatus.NOTHING
        assert cache.write_backup(rig.match(KEY).last_device_node) == 0
        assert cache.flush(0.01) == 0
        rank.step(5)
        cache.evict(8)
        assert list(cache.tree.nodes()) == []
        assert rig.device_pages.num_available == 8
        return dict(cache.counters)

    run(script, write_policy=policy)


@pytest.mark.parametrize("verb", Verb)
def test_what_a_call_that_hangs_holds_is_ended_at_once(verb: Verb) -> None:
    """The call goes on to use its memory, which is not unmapped before it returns."""
    barriers = [Barrier(), Barrier()]

    def script(rank: Rank) -> None:
        rig = rank.rig
        barrier = barriers[rank.number]
        rig.gates.append(barrier)
        # On one rank alone; the other's call has ended and waits for it.
        if rank.number == 1:
            barrier.shut()
        rig.insert(THIRD)
        rig.begin_prefetch(KEY)
        rank.step(150)
        assert rig.cache.num_in_flight == 1
        lose(rank)
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        assert rig.hit(THIRD) == (2, 0)
        assert rig.cache.close(0.05) == (rank.number == 0)
        barrier.open()
        assert rig.cache.close(GUARD_SECONDS)

    create = [
        faulty_storage(store, gates={verb: barrier})
        for store, barrier in zip(stores(KEY), barriers, strict=True)
    ]
    run_both(script, *create)


def test_a_write_in_flight_has_failed_and_its_pages_are_free() -> None:
    def script(rank: Rank) -> object:
        rig = rank.rig
        gate = rig.gate()
        if rank.number == 1:
            rig.engine.write_gates[1] = gate
        rig.insert(KEY)
        rank.step(10)
        assert rig.cache.num_in_flight == 1
        lose(rank)
        rig.cache.evict(8)
        assert rig.device_pages.num_available == 8
        gate.open()
        rank.step(5)
        return rig.hit(KEY)

    run(script)


@pytest.mark.parametrize("hangs", [False, True])
def test_what_a_load_in_flight_brings_stays_in_the_page_table_of_its_request(hangs: bool) -> None:
    """On one rank the copy has ended, on the other not yet; nobody waits for it."""

    def script(rank: Rank) -> object:
        rig, cache = rank.rig, rank.rig.cache
        gate = rig.gate()
        rig.insert(KEY)
        rank.settle()
        rig.evict_device()
        if rank.number == 1 and hangs:
            rig.engine.load_gates[1] = gate
        load = rig.begin_load(KEY)
        cache.inc_lock_ref(load.node)
        producer = cache.ready_to_load_host_cache()
        lose(rank)
        gate.open()
        rig.await_load(KEY, load, 0, producer)
        # Nobody gets these pages, whatever is evicted; then the tree has them, and lets them go.
        cache.evict(8)
        assert rig.device_pages.num_available == 5
        rig.check()
        cache.insert(KEY, load.device_pages, request_id="r", chunked=False)
        rig.check()
        assert rig.hit(KEY) == (3, 0)
        cache.dec_lock_ref(load.node)
        cache.evict(8)
        assert rig.device_pages.num_available == 8
        rank.step()
        assert list(cache.tree.nodes()) == []
        return rig.hit(KEY)

    run(script)


def test_pages_of_a_load_that_no_request_inserts_come_back_with_the_close() -> None:
    def script(rank: Rank) -> None:
        rig, cache = rank.rig, rank.rig.cache
        rig.insert(KEY)
        rank.settle()
        rig.evict_device()
        load = rig.begin_load(KEY)
        cache.ready_to_load_host_cache()
        lose(rank)
        rig.insert(KEY)
        assert rig.hit(KEY) == (3, 0)
        rig.evict_device(5)
        assert not set(load.device_pages) & set(rig.device_pages.free_pages())
        assert cache.close(GUARD_SECONDS)
        rig.check()
        held, _ = cache.held_pages()
        assert sum(map(len, held)) == 0

    run(script)


def test_a_load_that_is_queued_or_fails_brings_nothing() -> None:
    def script(rank: Rank) -> object:
        rig, cache = rank.rig, rank.rig.cache
        rig.insert(KEY)
        rig.insert(THIRD)
        rank.settle()
        cache.evict(8)
        rig.engine.broken_loads.add(0)
        load = rig.begin_load(KEY)
        with pytest.raises(TransferError):
            rig.await_load(KEY, load, 0, cache.ready_to_load_host_cache())
        rig.counter.set_consumer(())
        assert rig.begin_load(THIRD).status is LoadStatus.QUEUED
        lose(rank)
        assert cache.ready_to_load_host_cache() == -1
        # Those of the queued one are free; those of the broken one are kept.
        assert rig.device_pages.num_available == 5
        return rig.hit(KEY), rig.hit(THIRD)

    run(script)


def test_a_reset_before_the_loss_leaves_nothing_held() -> None:
    def script(rank: Rank) -> None:
        rig = rank.rig
        gate = rig.gate()
        rig.engine.write_gates[1] = gate
        rig.insert(KEY)
        rank.step()
        rig.cache.reset()
        assert rig.device_pages.num_available < 8
        lose(rank)
        assert rig.device_pages.num_available == 8
        gate.open()

    run(script)


def test_the_store_takes_no_work_and_can_be_closed_but_not_attached_again() -> None:
    def script(rank: Rank) -> None:
        cache = rank.rig.cache
        rank.step()
        lose(rank)
        status = cache.storage_status
        assert status.state is AttachmentState.DETACHING
        assert "a third rank has died" in status.reasons[0]
        with pytest.raises(HiCacheError):
            cache.clear_storage_backend()
        cache.detach_storage_backend()
        assert cache.storage_status.state is AttachmentState.DETACHED
        with pytest.raises(RanksLostError):
            cache.attach_storage_backend(injected())

    run(script)


@pytest.mark.parametrize("call", ["attach", "detach", "clear"])
def test_a_loss_that_a_call_to_the_store_notices_is_told_and_switches_off(call: str) -> None:
    def script(rank: Rank) -> object:
        rig, cache = rank.rig, rank.rig.cache
        rig.insert(KEY)
        rank.settle()
        if call == "attach":
            cache.detach_storage_backend()
        rank.ranks.is_lost = True
        calls: dict[str, Callable[[], object]] = {
            "attach": lambda: cache.attach_storage_backend(injected()),
            "detach": cache.detach_storage_backend,
            "clear": cache.clear_storage_backend,
        }
        with pytest.raises(RanksLostError):
            calls[call]()
        assert cache.ranks_lost
        assert rig.hit(KEY) == (3, 0)
        assert rig.tier.backend is None or call != "attach"
        return rig.host_pages.num_available

    run(script)


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_requests_that_wait_need_not_wait_any_longer(policy: PrefetchPolicy) -> None:
    barrier = Barrier()
    barrier.shut()

    def script(rank: Rank) -> object:
        rank.rig.gates.append(barrier)
        rank.rig.begin_prefetch(KEY)
        rank.step(5)
        assert not rank.rig.cache.check_prefetch_progress("p")
        lose(rank)
        barrier.open()
        return rank.rig.cache.check_prefetch_progress("p")

    create = [faulty_storage(store, gates={Verb.EXISTS: barrier}) for store in stores(KEY)]
    assert run_both(script, *create, prefetch_policy=policy) == [True, True]


def test_trees_that_differ_are_found_in_the_same_step_on_both_and_nothing_goes_on() -> None:
    def script(rank: Rank) -> object:
        rig, cache = rank.rig, rank.rig.cache
        rank.step(3)
        rig.insert(KEY if rank.number else OTHER)
        for _ in range(3):
            with pytest.raises(RanksDivergedError, match="what their trees hold"):
                cache.check_hicache_events()
            rig.check()
        assert cache.counters["ranks_diverged"] == 1
        assert not cache.ranks_lost
        assert rig.host_pages.num_available == rig.host_pages.num_pages
        assert cache.close(GUARD_SECONDS)
        return cache.controller.meeting.num_agreements

    run(script)
