"""What is counted is what was answered, and the colour is that of the last calls."""

from __future__ import annotations

import itertools
import math
import pickle
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from storage_fakes import (
    CHAIN,
    CORRUPT,
    FAILED,
    KEYS,
    LATER,
    MISS,
    NO_SPACE,
    OK,
    PAGE_BYTES,
    PAGES,
    PRESENT,
    SKIPPED,
    TIMEOUT,
    FlakyStorage,
    make_config,
    pages_in,
    sources,
)

from hicache.clock import ManualClock
from hicache.errors import StorageError
from hicache.storage.instrumented import HealthState, InstrumentedStorage, StorageHealth
from hicache.storage.latency import LATENCY_BOUNDS_SECONDS, LatencyHistogram, LatencyRecorder
from hicache.storage.retrying import RetryingStorage
from hicache.storage.wrapper import StorageVerb, storage_layers
from hicache.testing.faulty_storage import Fault, FaultyStorage, InjectedFault, Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import HiCacheStorage
    from hicache.types import PageHash, PageOutcome

GREEN, RED = HealthState.GREEN, HealthState.RED
EXISTS, GET, SET, CLEAR = StorageVerb


class Rig:
    def __init__(self, *, around: HiCacheStorage | None = None) -> None:
        self.clock = ManualClock()
        self.inner = FlakyStorage(make_config(self.clock))
        self.storage = InstrumentedStorage(around or self.inner, clock=self.clock)

    def get(self, num_pages: int = 8, *, deadline: float = LATER) -> list[PageOutcome]:
        targets = sources(KEYS[:num_pages])
        return self.storage.batch_get(
            KEYS[:num_pages], CHAIN[:num_pages], pages_in(targets), deadline=deadline
        )

    def set(self, num_pages: int = 8, *, deadline: float = LATER) -> list[PageOutcome]:
        keys, parents, pages = KEYS[:num_pages], CHAIN[:num_pages], PAGES[:num_pages]
        return self.storage.batch_set(keys, parents, pages, deadline=deadline)

    def call(self, verb: StorageVerb, num_pages: int = 8) -> object:
        if verb is EXISTS:
            return self.storage.batch_exists(KEYS[:num_pages])
        return self.get(num_pages) if verb is GET else self.set(num_pages)

    @property
    def health(self) -> StorageHealth:
        return self.storage.snapshot().health


@pytest.mark.parametrize("seed", range(10))
def test_pages_and_bytes_are_those_that_were_answered(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig()
    counted: dict[StorageVerb, Counter[PageOutcome]] = {GET: Counter(), SET: Counter()}
    num_calls: Counter[StorageVerb] = Counter()
    for _ in range(200):
        rig.inner.reads = {key: [rng.choice([FAILED, CORRUPT])] for key in rng.sample(KEYS, 1)}
        rig.inner.writes = {key: [rng.choice([FAILED, NO_SPACE])] for key in rng.sample(KEYS, 1)}
        verb = rng.choice([GET, SET, CLEAR])
        num_pages = rng.randint(0, 8)
        num_calls[verb] += 1
        if verb is CLEAR:
            rig.storage.clear()
        else:
            counted[verb].update(rig.get(num_pages) if verb is GET else rig.set(num_pages))
    verbs = rig.storage.snapshot().verbs
    for verb, counter in counted.items():
        assert verbs[verb].pages == counter
        assert verbs[verb].num_bytes == counter[OK] * PAGE_BYTES
    assert {verb: verbs[verb].num_calls for verb in num_calls} == num_calls
    assert verbs[EXISTS].num_calls == 0
    assert sum(one.num_broken_calls for one in verbs.values()) == 0


def test_a_lookup_finds_pages_up_to_one_that_is_missing() -> None:
    rig = Rig()
    rig.inner.hold(KEYS[:5])
    for num_keys in (8, 5, 0):
        rig.storage.batch_exists(KEYS[:num_keys])
    found = rig.storage.snapshot().verbs[EXISTS]
    assert found.pages == {OK: 10, MISS: 1, SKIPPED: 2}
    assert (found.num_calls, found.num_bytes) == (3, 0)


def test_calls_that_raise_or_answer_with_no_answer_are_broken_and_pass_on_what_came() -> None:
    script = [Fault.RAISE, Fault.SHORT, Fault.LONG, Fault.WRONG_TYPE, None]
    rig = Rig(around=FaultyStorage(FlakyStorage(), faults=dict.fromkeys(Verb, script)))
    for verb in (EXISTS, GET, SET):
        with pytest.raises(InjectedFault):
            rig.call(verb)
        answers = [rig.call(verb) for _ in range(4)]
        assert isinstance(answers[2], str)
        counts = rig.storage.snapshot().verbs[verb]
        # One page fewer found is a right answer for somebody who has found none.
        assert counts.num_broken_calls == (3 if verb is EXISTS else 4)
        assert counts.num_calls == 5


class SlowStorage(FlakyStorage):
    """Takes 3 seconds for every call, also for one that raises."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(make_config(clock))
        self.clock = clock

    def _enter(self, verb: str, keys: Sequence[PageHash]) -> None:
        self.clock.advance(3.0)
        super()._enter(verb, keys)


def test_a_call_takes_as_long_as_it_took() -> None:
    clock = ManualClock(100.0)
    slow = SlowStorage(clock)
    storage = InstrumentedStorage(slow, clock=clock)
    for num_calls in (1, 2):
        storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER)
        latency = storage.snapshot().verbs[SET].latency
        assert latency.num_calls == num_calls
        assert latency.total_seconds == 3.0 * num_calls
        assert 3.0 <= latency.quantile_seconds(1.0) < 6.0
    slow.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        storage.batch_exists(KEYS)
    assert storage.snapshot().verbs[EXISTS].latency.total_seconds == 3.0


@pytest.mark.parametrize("seed", range(10))
def test_a_quantile_is_a_bound_that_as_many_calls_kept_and_less_than_twice_too_high(
    seed: int,
) -> None:
    rng = random.Random(seed)
    recorder = LatencyRecorder()
    durations = sorted(math.exp(rng.uniform(math.log(1e-6), math.log(100))) for _ in range(200))
    for seconds in durations:
        recorder.add(seconds)
    histogram = recorder.histogram()
    assert histogram.total_seconds == pytest.approx(sum(durations))
    for percent in range(1, 101):
        exact = durations[math.ceil(percent / 100 * 200) - 1]
        assert exact <= histogram.quantile_seconds(percent / 100) < 2 * exact


def test_every_duration_has_a_bucket() -> None:
    assert LatencyHistogram().quantile_seconds(0.5) == 0.0
    for seconds, bound in [(0.0, 1e-6), (1e-6, 1e-6), (1e9, math.inf)]:
        recorder = LatencyRecorder()
        recorder.add(seconds)
        assert recorder.histogram().quantile_seconds(0.5) == bound
    for low, high in itertools.pairwise(LATENCY_BOUNDS_SECONDS):
        assert high == 2 * low
    assert LATENCY_BOUNDS_SECONDS[0] == 1e-6
    assert 100 < LATENCY_BOUNDS_SECONDS[-1] < 200
    assert LatencyRecorder().histogram() == LatencyHistogram()


@pytest.mark.parametrize("outcome", [FAILED, TIMEOUT, NO_SPACE])
def test_a_call_that_does_nothing_good_turns_red_until_a_good_one(outcome: PageOutcome) -> None:
    rig = Rig()
    assert rig.health == StorageHealth(state=GREEN, since_seconds=0.0, last_error=None)
    rig.clock.advance(1.0)
    rig.inner.writes = {KEYS[0]: [outcome] * 2}
    rig.set()
    rig.clock.advance(1.0)
    rig.set()
    assert (rig.health.state, rig.health.since_seconds) == (RED, 1.0)
    assert f"batch_set: 1 {outcome.value}" in str(rig.health.last_error)
    rig.clock.advance(1.0)
    assert rig.set() == [OK] * 8
    assert (rig.health.state, rig.health.since_seconds) == (GREEN, 3.0)
    assert "batch_set" in str(rig.health.last_error)


def test_bad_calls_that_did_something_good_turn_red_when_they_are_three_in_a_row() -> None:
    rig = Rig()
    rig.inner.hold(KEYS)
    for colours in ([GREEN, GREEN, RED, RED], [GREEN, GREEN]):
        for colour in colours:
            rig.inner.reads = {KEYS[4]: [FAILED]}
            rig.get()
            assert rig.health.state is colour
        rig.get()
        assert rig.health.state is GREEN


def test_an_exception_and_an_answer_that_is_none_are_named() -> None:
    faults: dict[Verb, list[Fault | None]] = {
        Verb.GET: [Fault.RAISE, None],
        Verb.SET: [Fault.SHORT],
    }
    rig = Rig(around=FaultyStorage(FlakyStorage(), faults=faults))
    with pytest.raises(InjectedFault):
        rig.get()
    assert rig.health.state is RED
    assert rig.health.last_error == "batch_get: InjectedFault: injected into batch_get"
    rig.get()
    assert rig.health.state is GREEN
    rig.set()
    assert rig.health.state is RED
    assert rig.health.last_error == "batch_set: the answer has a wrong shape"


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_is_told_in_short_and_may_refuse_to_be_printed() -> None:
    rig = Rig()
    for error, told in [
        (OSError("x" * 1000), "OSError: " + "x" * 191),
        (UnprintableError(), "a UnprintableError that cannot be printed"),
    ]:
        rig.inner.error = error
        with pytest.raises(type(error)):
            rig.set()
        assert rig.health.last_error == f"batch_set: {told}"


def test_the_reason_that_the_backend_gives_is_kept() -> None:
    rig = Rig()
    rig.inner._note_error(OSError("no such device"))
    rig.inner.writes = {KEYS[2]: [FAILED]}
    rig.set()
    assert rig.health.last_error == "batch_set: 1 failed: OSError: no such device"


def test_an_error_that_no_call_failed_by_is_told_once_and_changes_no_colour() -> None:
    """Such as that of a tier whose pages came from another."""
    rig = Rig()
    rig.inner._note_error(OSError("tier 0: gone"))
    rig.storage.batch_exists(KEYS)
    assert rig.health.last_error == "OSError: tier 0: gone"
    rig.inner.writes = {KEYS[0]: [TIMEOUT]}
    rig.set()
    rig.get()
    assert rig.health.last_error == "batch_set: 1 timeout"
    rig.inner._note_error(OSError("tier 1: gone"))
    rig.set()
    assert rig.health == StorageHealth(
        state=GREEN, since_seconds=0.0, last_error="OSError: tier 1: gone"
    )


def test_counters_that_cannot_be_had_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> object:
        raise OSError("no counters")

    rig = Rig()
    monkeypatch.setattr(rig.inner, "stats", fails)
    rig.inner.writes = {KEYS[7]: [FAILED]}
    assert rig.set() == [*[OK] * 7, FAILED]
    assert rig.health.last_error == "batch_set: 1 failed: stats: OSError: no counters"


def test_a_look_up_that_nobody_can_answer_is_broken_and_no_miss() -> None:
    rig = Rig()
    rig.inner.error = StorageError("nobody can tell")
    for num_calls in (1, 2):
        with pytest.raises(StorageError, match="nobody can tell"):
            rig.storage.batch_exists(KEYS)
        found = rig.storage.snapshot().verbs[EXISTS]
        assert (found.num_broken_calls, found.pages) == (num_calls, {})
        assert rig.health.state is RED
        assert rig.health.last_error == "batch_exists: StorageError: nobody can tell"


def test_a_verb_that_works_does_not_hide_another_that_does_not() -> None:
    rig = Rig()
    rig.inner.hold(KEYS)
    rig.inner.reads = {KEYS[0]: [FAILED]}
    rig.get()
    rig.clock.advance(1.0)
    assert rig.storage.batch_exists(KEYS) == 8
    rig.set()
    rig.storage.clear()
    assert (rig.health.state, rig.health.since_seconds) == (RED, 0.0)
    rig.get()
    assert (rig.health.state, rig.health.since_seconds) == (GREEN, 1.0)


@pytest.mark.parametrize("outcome", [MISS, CORRUPT, SKIPPED, PRESENT])
def test_what_a_sound_backend_answers_is_green(outcome: PageOutcome) -> None:
    rig = Rig()
    rig.inner.writes = {key: [outcome] for key in KEYS}
    rig.set()
    assert rig.health.state is GREEN


@pytest.mark.parametrize("verb", [GET, SET])
def test_a_call_that_came_too_late_says_nothing(verb: StorageVerb) -> None:
    rig = Rig()
    call = rig.get if verb is GET else rig.set
    rig.clock.advance(5.0)
    assert call(deadline=5.0) == [TIMEOUT] * 8
    assert rig.health.state is GREEN
    rig.inner.error = OSError("gone")
    for deadline in (5.0, LATER):
        with pytest.raises(OSError, match="gone"):
            call(deadline=deadline)
        assert rig.health.state is (GREEN if deadline == 5.0 else RED)
    rig.inner.error = None
    call(deadline=5.0)
    assert rig.health.state is RED
    assert rig.storage.snapshot().verbs[verb].num_calls == 4


@pytest.mark.parametrize("verb", [EXISTS, GET, SET])
def test_an_empty_batch_says_nothing_and_one_page_is_enough(verb: StorageVerb) -> None:
    rig = Rig()
    rig.inner.error = OSError("gone")
    for num_pages, colour in [(0, GREEN), (1, RED)]:
        with pytest.raises(OSError, match="gone"):
            rig.call(verb, num_pages)
        assert rig.health.state is colour
    rig.inner.error = None
    for num_pages, colour in [(0, RED), (1, GREEN)]:
        rig.call(verb, num_pages)
        assert rig.health.state is colour


def test_a_clear_that_fails_is_counted_and_not_judged() -> None:
    rig = Rig()
    rig.inner.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        rig.storage.clear()
    assert rig.storage.snapshot().verbs[CLEAR].num_broken_calls == 1
    assert rig.health.state is GREEN


def test_nothing_is_lost_between_threads() -> None:
    rig = Rig()
    rig.inner.hold(KEYS[:4])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: rig.get(), range(400)))
    counts = rig.storage.snapshot().verbs[GET]
    assert counts.pages == {OK: 1600, MISS: 400, SKIPPED: 1200}
    assert counts.num_calls == counts.latency.num_calls == 400


def test_a_snapshot_can_be_sent_and_does_not_change() -> None:
    rig = Rig()
    rig.set()
    before = rig.storage.snapshot()
    assert pickle.loads(pickle.dumps(before)) == before
    rig.set()
    assert before.verbs[SET].pages == {OK: 8}


def test_layers_are_told_from_the_outside_in() -> None:
    inner = FlakyStorage()
    retrying = RetryingStorage(inner, max_attempts=1, clock=ManualClock())
    storage = InstrumentedStorage(retrying, clock=ManualClock())
    assert list(storage_layers(storage)) == [storage, retrying, inner]
    assert list(storage_layers(inner)) == [inner]
