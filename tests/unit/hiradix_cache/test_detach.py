"""A detach that meets a call that hangs: nothing new begins, everything else goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from builders import GEOMETRY, Rig, config_for, store_with, tokens, until
from scripted_parts import Barrier, faulty_storage, injected
from test_two_ranks import Rank, run_both, stores

from hicache.controller import AttachmentState
from hicache.errors import HiCacheError, StorageTimeout
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import InjectedFault, Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = RadixKey(tokens(1, 2, 3, 4))
STORED = RadixKey(tokens(21, 22, 23, 24))
HELD = {Verb.GET: 4, Verb.SET: 2}
"""Host pages that a hung call uses, by verb: of the read, or of the node that is persisted."""
SHORT = RadixKey(tokens(11, 12))
SOON = 0.01
OVERDUE_SECONDS = 100.0


def make_rig(barriers: dict[Verb, Barrier], *, num_workers: int = 2) -> Rig:
    config = config_for(
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, storage=injected(num_workers=num_workers)
    )
    rig = Rig(config, create_storage=faulty_storage(store_with(STORED), gates=barriers))
    rig.gates += barriers.values()
    return rig


def begin_call(rig: Rig, verb: Verb, barrier: Barrier) -> None:
    """Let a call of `verb` begin, which then stands still."""
    barrier.shut()
    if verb is Verb.SET:
        rig.insert(SHORT)
    else:
        rig.begin_prefetch(STORED)
    rig.step_until(barrier.entered.is_set)


def give_up(rig: Rig) -> None:
    """Let the time pass after which calls under way count as hung."""
    rig.clock.advance(OVERDUE_SECONDS)
    controller = rig.cache.controller
    rig.step_until(lambda: controller.num_in_flight == controller.num_spent)


def state(rig: Rig) -> AttachmentState:
    """How the store is; asked anew each time."""
    return rig.cache.controller.storage_state


@pytest.mark.parametrize("verb", [Verb.EXISTS, Verb.GET, Verb.SET])
def test_nothing_new_begins_while_a_hung_call_keeps_a_store_open(verb: Verb) -> None:
    """C073: and the detach completes when the call has returned."""
    barrier = Barrier()
    with make_rig({verb: barrier}) as rig:
        begin_call(rig, verb, barrier)
        give_up(rig)
        with pytest.raises(StorageTimeout, match="detaching and a call to it still runs"):
            rig.cache.detach_storage_backend(SOON)
        assert state(rig) is AttachmentState.DETACHING
        with pytest.raises(HiCacheError, match=r"cannot attach: .*'injected' is detaching"):
            rig.cache.attach_storage_backend(injected(num_workers=2))
        with pytest.raises(HiCacheError, match=r"cannot clear: .*'injected' is detaching"):
            rig.cache.clear_storage_backend()

        # Requests are served from two tiers, and what storage would be asked for is a miss.
        assert not rig.begin_prefetch(KEY, request_id="q")
        assert rig.cache.check_prefetch_progress("q")
        assert rig.cache.counters["prefetch_store_detaching"] == 1
        rig.insert(KEY)
        controller = rig.cache.controller
        rig.step_until(lambda: not controller.writes)
        assert rig.hit(KEY) == (4, 0)
        assert controller.num_in_flight == controller.num_spent == (verb in HELD)
        assert rig.host_pages.num_available == 16 - 4 - HELD.get(verb, 0)

        barrier.open()
        rig.settle()
        rig.cache.detach_storage_backend()
        assert state(rig) is AttachmentState.DETACHED
        rig.cache.detach_storage_backend()
        rig.cache.attach_storage_backend(injected())
        rig.insert(KEY)
        rig.settle()
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.prefetch(STORED) == len(STORED)


@pytest.mark.parametrize("verb", [Verb.GET, Verb.SET])
def test_a_call_that_may_still_return_in_time_refuses_the_detach_and_changes_nothing(
    verb: Verb,
) -> None:
    barrier = Barrier()
    with make_rig({verb: barrier}) as rig:
        begin_call(rig, verb, barrier)
        with pytest.raises(HiCacheError, match=r"cannot detach .* while 1 operation\(s\) are in"):
            rig.cache.detach_storage_backend()
        assert state(rig) is AttachmentState.ATTACHED
        barrier.open()
        rig.settle()
        rig.cache.detach_storage_backend()


def test_a_copy_between_device_and_host_refuses_the_detach_beside_a_hung_call() -> None:
    barrier = Barrier()
    with make_rig({Verb.GET: barrier}) as rig:
        begin_call(rig, Verb.GET, barrier)
        give_up(rig)
        rig.engine.write_gates[0] = write = rig.gate()
        rig.insert(KEY)
        with pytest.raises(HiCacheError, match=r"while 1 operation\(s\) are in flight"):
            rig.cache.detach_storage_backend(SOON)
        assert state(rig) is AttachmentState.ATTACHED
        write.open()


def test_the_status_says_what_stands_in_the_way() -> None:
    barrier = Barrier()
    with make_rig({Verb.GET: barrier}) as rig:
        status = rig.cache.storage_status
        assert (status.state, status.backend) == (AttachmentState.ATTACHED, "injected")
        assert (status.model_name, status.reasons) == ("model", ())
        assert status.policies.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE
        begin_call(rig, Verb.GET, barrier)
        assert rig.cache.storage_status.reasons == ("1 operation(s) are in flight",)
        give_up(rig)
        assert rig.cache.storage_status.report.num_abandoned_calls == 1
        with pytest.raises(StorageTimeout):
            rig.cache.detach_storage_backend(SOON)
        status = rig.cache.storage_status
        assert (status.state, status.backend) == (AttachmentState.DETACHING, "injected")
        assert status.reasons == (
            "storage backend 'injected' is detaching and a call to it still runs",
            "1 operation(s) are in flight",
        )
        barrier.open()
        rig.settle()
        rig.cache.detach_storage_backend()
        status = rig.cache.storage_status
        assert (status.state, status.backend) == (AttachmentState.DETACHED, None)
        assert (status.num_in_flight, status.reasons) == (0, ())
        assert status.report.snapshot is None


class Unclosable(MemoryStorage):
    """Raises when it is closed, against the contract."""

    def close(self) -> None:
        super().close()
        raise InjectedFault("cannot say goodbye")


def test_a_backend_that_raises_when_it_is_closed_does_not_keep_the_store() -> None:
    with Rig(config_for(storage=injected()), create_storage=Unclosable) as rig:
        with pytest.raises(InjectedFault):
            rig.cache.detach_storage_backend()
        assert state(rig) is AttachmentState.DETACHING
        rig.cache.detach_storage_backend()
        assert state(rig) is AttachmentState.DETACHED


def in_detaching(end: Callable[[Rig], object]) -> None:
    """Let a read hang, begin to detach, and let `end` do its own before the read returns."""
    barrier = Barrier()
    with make_rig({Verb.GET: barrier}) as rig:
        begin_call(rig, Verb.GET, barrier)
        give_up(rig)
        with pytest.raises(StorageTimeout):
            rig.cache.detach_storage_backend(SOON)
        end(rig)
        barrier.open()


def test_a_reset_while_detaching_keeps_the_memory_of_the_hung_call() -> None:
    def end(rig: Rig) -> None:
        rig.cache.reset()
        rig.step(3)
        assert rig.host_pages.num_available == 16 - HELD[Verb.GET]
        assert state(rig) is AttachmentState.DETACHING

    in_detaching(end)


def test_a_close_while_detaching_returns_in_time_and_completes_later() -> None:
    def end(rig: Rig) -> None:
        assert not rig.cache.close(SOON)
        assert state(rig) is AttachmentState.DETACHING
        rig.gates[0].open()
        until(lambda: rig.cache.close(SOON))
        assert state(rig) is AttachmentState.DETACHED

    in_detaching(end)


def test_a_detach_that_one_rank_cannot_complete_leaves_both_detaching() -> None:
    """A rank whose own store is closed takes no part in anything until the other's is."""
    barrier = Barrier()
    barrier.shut()
    gates = [{Verb.GET: barrier}, {}]
    create = [
        faulty_storage(store, gates=one) for store, one in zip(stores(KEY), gates, strict=True)
    ]

    def script(rank: Rank) -> object:
        rank.rig.gates.append(barrier)
        rank.rig.begin_prefetch(KEY)
        rank.step(100)
        assert barrier.entered.is_set()
        rank.rig.clock.advance(OVERDUE_SECONDS)
        rank.step(100)
        states = []
        for _ in range(2):
            with pytest.raises(StorageTimeout):
                rank.rig.cache.detach_storage_backend(SOON)
            states.append(state(rank.rig))
            with pytest.raises(HiCacheError, match="is detaching"):
                rank.rig.cache.attach_storage_backend(injected())
            rank.rig.insert(RadixKey(tokens(5)))
            rank.step(100)
        barrier.open()
        rank.step(100)
        rank.rig.cache.detach_storage_backend()
        rank.rig.cache.attach_storage_backend(injected())
        rank.rig.begin_prefetch(KEY)
        rank.step(200)
        assert rank.rig.cache.pop_prefetch_loaded_tokens("p") == len(KEY)
        return states

    assert run_both(script, *create) == [[AttachmentState.DETACHING] * 2] * 2


def test_a_rank_that_is_not_idle_refuses_the_detach_on_both() -> None:
    """Nothing has changed anywhere, and a later detach works."""
    barrier = Barrier()
    barrier.shut()
    gates = [{Verb.GET: barrier}, {}]
    create = [
        faulty_storage(store, gates=one) for store, one in zip(stores(KEY), gates, strict=True)
    ]

    def script(rank: Rank) -> object:
        rank.rig.gates.append(barrier)
        rank.rig.begin_prefetch(KEY)
        rank.step(100)
        assert barrier.entered.is_set()
        with pytest.raises(HiCacheError, match="cannot detach"):
            rank.rig.cache.detach_storage_backend()
        assert state(rank.rig) is AttachmentState.ATTACHED
        barrier.open()
        rank.step(200)
        assert rank.rig.cache.num_in_flight == 0
        rank.rig.cache.detach_storage_backend()
        return rank.rig.prefetch(RadixKey(tokens(1)))

    assert run_both(script, *create) == [0, 0]


def test_an_attach_that_one_rank_cannot_do_is_undone_on_the_other() -> None:
    def script(rank: Rank) -> object:
        cache = rank.rig.cache
        cache.detach_storage_backend()
        bad = injected(extra_config={"max_bytes": 0 if rank.number else GEOMETRY.page_bytes})
        with pytest.raises(HiCacheError, match="max_bytes" if rank.number else "another rank"):
            cache.attach_storage_backend(bad)
        assert state(rank.rig) is AttachmentState.DETACHED
        rank.rig.insert(KEY)
        rank.step(100)
        assert rank.rig.prefetch(RadixKey(tokens(1))) == 0
        cache.attach_storage_backend(injected())
        rank.rig.insert(KEY)
        rank.step(100)
        return cache.clear_storage_backend()

    create = [faulty_storage(store) for store in (MemoryPages(), MemoryPages())]
    assert run_both(script, *create) == [4, 4]
