"""L3 -> L2 by cost: a request waits while that is sooner than computing, and uses what came."""

from __future__ import annotations

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import GateAt, faulty_storage, injected
from test_two_ranks import Rank, run_both, stores

from hicache.config import HiCacheConfig, PrefetchConfig
from hicache.hiradix_cache.snapshot import snapshot_of
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy

KEY = RadixKey(tokens(1, 2, 3, 4, 5, 6))
WAIT = PrefetchPolicy.WAIT_COMPLETE


def config(policy: PrefetchPolicy = PrefetchPolicy.ADAPTIVE, **options: object) -> HiCacheConfig:
    return config_for(16, storage=injected(batch_pages=2), prefetch_policy=policy, **options)


def measure(rig: Rig, *, read: float | None) -> None:
    """Let a page take 1 s to compute, and `read` seconds to read from storage."""
    rig.cache.note_prefill(PAGE, 1.0)
    if read is not None:
        rig.cache.controller.costs.note_read(1, read)


def begin_held(rig: Rig, gate: Gate) -> None:
    """Begin a prefetch that stands still in the call that `gate` holds."""
    rig.gates.append(gate)
    rig.begin_prefetch(KEY)
    rig.step_until(gate.entered.is_set)
    rig.step()


def ends(rig: Rig) -> bool:
    """Whether the next question ends the prefetch."""
    before = rig.cache.counters["prefetch_ended_by_cost"]
    assert not rig.cache.check_prefetch_progress("p")
    return rig.cache.counters["prefetch_ended_by_cost"] > before


def test_a_request_waits_for_all_that_is_read_sooner_than_computed() -> None:
    gate = GateAt(1)
    with Rig(
        config(), create_storage=faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    ) as rig:
        measure(rig, read=0.5)
        begin_held(rig, gate)
        assert not ends(rig)
        gate.open()
        rig.step_until(lambda: rig.cache.check_prefetch_progress("p"))
        assert rig.cache.pop_prefetch_loaded_tokens("p") == len(KEY)
        assert rig.hit(KEY) == (0, 6)
        assert rig.cache.counters["prefetch_ended_by_cost"] == 0


@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_what_has_come_is_used_when_the_rest_is_computed_sooner(num_calls: int) -> None:
    gate = GateAt(num_calls)
    with Rig(
        config(), create_storage=faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    ) as rig:
        measure(rig, read=100.0)
        # As many slow ones again, because those of the test take no time.
        for _ in range(15):
            rig.cache.controller.costs.note_read(1, 100.0)
        begin_held(rig, gate)
        assert ends(rig)
        rig.step()
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 2 * num_calls * PAGE
        assert rig.hit(KEY) == (0, 2 * num_calls)
        # What was too slow once is read again.
        gate.open()
        rig.settle()
        assert rig.prefetch(KEY, request_id="later") == (6 - 2 * num_calls) * PAGE


@pytest.mark.parametrize("verb", [Verb.EXISTS, Verb.GET])
@pytest.mark.parametrize("read", [None, 0.1])
def test_nobody_waits_for_longer_than_computing_takes(verb: Verb, read: float | None) -> None:
    """Whatever the store promised, or nobody knows."""
    gate = Gate()
    with Rig(config(), create_storage=faulty_storage(store_with(KEY), gates={verb: gate})) as rig:
        measure(rig, read=read)
        begin_held(rig, gate)
        assert not ends(rig)
        rig.clock.advance(5.9)
        rig.step()
        assert not ends(rig)
        rig.clock.advance(0.2)
        rig.step()
        assert ends(rig)
        rig.step()
        assert rig.cache.check_prefetch_progress("p")


def test_time_counts_from_when_the_request_could_run() -> None:
    gate = Gate()
    with Rig(
        config(), create_storage=faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    ) as rig:
        measure(rig, read=None)
        begin_held(rig, gate)
        rig.clock.advance(10.0)
        rig.step()
        assert not ends(rig)


UNTIL = PrefetchConfig(
    threshold_tokens=PAGE, timeout_base_seconds=3.0, timeout_per_ki_token_seconds=0.0
)


def test_the_first_request_after_a_start_waits_for_what_storage_has() -> None:
    """Nobody knows yet what computing would take."""
    gate = Gate()
    with Rig(
        config(), create_storage=faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    ) as rig:
        begin_held(rig, gate)
        assert not ends(rig)
        gate.open()
        rig.step_until(lambda: rig.cache.check_prefetch_progress("p"))
        assert rig.cache.pop_prefetch_loaded_tokens("p") == len(KEY)


@pytest.mark.parametrize("verb", [Verb.EXISTS, Verb.GET])
def test_before_computation_was_measured_a_wait_ends_by_the_timeout(verb: Verb) -> None:
    gate = Gate()
    create = faulty_storage(store_with(KEY), gates={verb: gate})
    with Rig(config(prefetch=UNTIL), create_storage=create) as rig:
        begin_held(rig, gate)
        rig.clock.advance(2.9)
        rig.step()
        assert not rig.cache.check_prefetch_progress("p")
        rig.step()
        assert not rig.cache.check_prefetch_progress("p")
        rig.clock.advance(0.2)
        rig.step(2)
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.counters["prefetch_ended_by_cost"] == 0


def test_once_computation_is_measured_a_wait_counts_from_when_the_request_could_run() -> None:
    gate = Gate()
    with Rig(
        config(), create_storage=faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    ) as rig:
        rig.clock.advance(1000.0)
        rig.step()
        begin_held(rig, gate)
        assert not ends(rig)
        measure(rig, read=None)
        assert not ends(rig)
        rig.clock.advance(6.1)
        rig.step()
        assert ends(rig)


def test_before_computation_was_measured_a_refused_request_waits_for_room_for_its_time() -> None:
    gate = Gate()
    budget = PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=1, timeout_base_seconds=3.0)
    create = faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    with Rig(config(prefetch=budget), create_storage=create) as rig:
        begin_held(rig, gate)
        assert not rig.begin_prefetch(KEY, request_id="second")
        assert not rig.cache.check_prefetch_progress("second")
        rig.step()
        rig.clock.advance(3.1)
        rig.step()
        assert rig.cache.check_prefetch_progress("second")


def test_reads_of_others_are_waited_for_too() -> None:
    """Two workers take turns; of another read of 6 pages, 3 pages go before for each."""
    other = RadixKey(tokens(11, 12, 13, 14, 15, 16))
    gate = Gate()
    create = faulty_storage(store_with(KEY, other, host_pages=24), gates={Verb.GET: gate})
    with Rig(config(), create_storage=create) as rig:
        measure(rig, read=0.7)
        rig.begin_prefetch(other, request_id="other")
        begin_held(rig, gate)
        assert ends(rig) == (0.7 * (6 + 3) > 6)


def test_a_request_without_room_for_its_prefetch_does_not_wait_for_room() -> None:
    gate = Gate()
    budget = PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=1)
    create = faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    with Rig(config(prefetch=budget), create_storage=create) as rig:
        measure(rig, read=0.1)
        begin_held(rig, gate)
        assert not rig.begin_prefetch(KEY, request_id="second")
        assert rig.cache.check_prefetch_progress("second")


def test_one_useless_wait_in_sixteen_lasts_until_the_read_has_begun() -> None:
    """A store that was slow for a while is measured again, at the cost of a query."""
    gate = Gate()
    gate.open()
    with Rig(
        config(), create_storage=faulty_storage(store_with(KEY), gates={Verb.GET: gate})
    ) as rig:
        for _ in range(16):
            measure(rig, read=100.0)
        for number in range(1, 17):
            gate.entered.clear()
            rig.begin_prefetch(KEY)
            assert ends(rig) == (number < 16)
            rig.step_until(lambda: rig.cache.check_prefetch_progress("p"))
            rig.settle()
            assert gate.entered.is_set() == (number == 16)
            rig.cache.pop_prefetch_loaded_tokens("p")


@pytest.mark.parametrize(("link", "num_pages"), [(0.1, 6), (1.0, 3), (5.0, 1), (100.0, 0)])
@pytest.mark.parametrize("policy", [WAIT, PrefetchPolicy.ADAPTIVE])
def test_no_more_is_read_than_the_link_could_load_in_time(
    policy: PrefetchPolicy, link: float, num_pages: int
) -> None:
    create = faulty_storage(store_with(KEY))
    with Rig(config(policy), create_storage=create) as rig:
        measure(rig, read=0.1)
        rig.cache.controller.costs.note_load(1, link)
        assert rig.prefetch(KEY) == num_pages * PAGE
        assert rig.hit(KEY) == (0, num_pages)
        verdict = {6: "worth", 0: "not_worth"}.get(num_pages, "partly")
        assert snapshot_of(rig.cache).events[f"prefetch_cost_{verdict}"] == 1


def test_without_the_estimate_of_loads_all_is_read() -> None:
    with Rig(
        config(WAIT, load_cost_estimate=False), create_storage=faulty_storage(store_with(KEY))
    ) as rig:
        measure(rig, read=0.1)
        rig.cache.controller.costs.note_load(1, 1.0)
        assert rig.prefetch(KEY) == len(KEY)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_ranks_wait_and_end_alike_by_the_slowest_of_them(slow_rank: int) -> None:
    """Whose read is held, whose clock is ahead and whose speeds are slower."""

    def script(rank: Rank) -> object:
        rig, is_slow = rank.rig, rank.number == slow_rank
        gate = gates[rank.number]
        rig.gates.append(gate)
        if not is_slow:
            gate.open()
        rig.cache.note_prefill(PAGE, 1.0 if is_slow else 0.5)
        rig.cache.controller.costs.note_read(1, 0.4 if is_slow else 0.1)
        rank.step()
        rig.begin_prefetch(KEY)
        rank.step(50)
        answers = [rig.cache.check_prefetch_progress("p")]
        rig.clock.advance(3.0 if is_slow else 50.0)
        rank.step()
        answers.append(rig.cache.check_prefetch_progress("p"))
        rank.step()
        answers.append(rig.cache.check_prefetch_progress("p"))
        rig.clock.advance(5.0)
        rank.step()
        rig.cache.check_prefetch_progress("p")
        rank.step()
        answers.append(rig.cache.check_prefetch_progress("p"))
        loaded = rig.cache.pop_prefetch_loaded_tokens("p")
        gate.open()
        return answers, loaded, rig.cache.counters["prefetch_ended_by_cost"]

    gates = [GateAt(1), GateAt(1)]
    create = [
        faulty_storage(store, gates={Verb.GET: gate})
        for store, gate in zip(stores(KEY), gates, strict=True)
    ]
    expected = ([False, False, False, True], 2 * PAGE, 1)
    answers = run_both(script, *create, prefetch_policy=PrefetchPolicy.ADAPTIVE)
    assert answers == [expected, expected]


@pytest.mark.parametrize("measured_rank", [0, 1])
def test_ranks_go_by_the_timeout_until_the_last_of_them_knows_what_computing_takes(
    measured_rank: int,
) -> None:
    def script(rank: Rank) -> object:
        rig, gate = rank.rig, gates[rank.number]
        rig.gates.append(gate)
        if rank.number == measured_rank:
            rig.cache.note_prefill(PAGE, 0.01)
        rank.step()
        rig.begin_prefetch(KEY)
        rank.step(20)
        answers = []
        # Computing takes .06 s, the timeout is 3 s, and the slowest clock counts.
        for seconds in (1.0, 1.0, 1.1):
            rig.clock.advance(seconds * (1 + rank.number))
            rank.step(2)
            answers.append(rig.cache.check_prefetch_progress("p"))
        gate.open()
        rank.settle()
        return answers, rig.cache.counters["prefetch_ended_by_cost"]

    gates = [Gate(), Gate()]
    create = [
        faulty_storage(store, gates={Verb.GET: gate})
        for store, gate in zip(stores(KEY), gates, strict=True)
    ]
    expected = ([False, False, True], 0)
    answers = run_both(script, *create, prefetch_policy=PrefetchPolicy.ADAPTIVE, prefetch=UNTIL)
    assert answers == [expected, expected]
