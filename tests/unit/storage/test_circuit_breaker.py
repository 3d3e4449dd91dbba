"""A backend that keeps failing is left alone, and found again when it is well."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

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
from hicache.errors import ClosedError, StorageError
from hicache.storage.circuit_breaker import CircuitBreakerStorage, CircuitState
from hicache.storage.wrapper import StorageVerb
from hicache.testing.faulty_storage import Fault, FaultyStorage, Gate, InjectedFault, Verb

if TYPE_CHECKING:
    from hicache.storage.base import HiCacheStorage
    from hicache.types import PageOutcome

CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
COOLDOWN = 10.0


class Rig:
    def __init__(self, *, max_failures: int = 3, around: HiCacheStorage | None = None) -> None:
        self.clock = ManualClock()
        self.inner = FlakyStorage(make_config(self.clock))
        self.storage = CircuitBreakerStorage(
            around or self.inner,
            max_failures=max_failures,
            cooldown_seconds=COOLDOWN,
            clock=self.clock,
        )

    def get(self, *, deadline: float = LATER) -> list[PageOutcome]:
        targets = sources(KEYS)
        return self.storage.batch_get(KEYS, CHAIN, pages_in(targets), deadline=deadline)

    def set(self, *, deadline: float = LATER) -> list[PageOutcome]:
        return self.storage.batch_set(KEYS, CHAIN, PAGES, deadline=deadline)

    def state(self, verb: StorageVerb) -> CircuitState:
        return self.storage.states()[verb]

    def call(self, verb: StorageVerb) -> Any:
        """Make a call and return its answer, or the exception that it raised."""
        try:
            if verb is StorageVerb.EXISTS:
                return self.storage.batch_exists(KEYS)
            return self.get() if verb is StorageVerb.GET else self.set()
        except (OSError, StorageError) as error:
            return error

    def refuses(self, verb: StorageVerb) -> bool:
        """Make a call; whether it was answered as one that does not reach the backend."""
        num_calls = len(self.inner.calls)
        answer = self.call(verb)
        if verb is StorageVerb.EXISTS:
            as_refused = isinstance(answer, StorageError) and "not asked" in str(answer)
        else:
            as_refused = answer == REFUSED
        return as_refused and len(self.inner.calls) == num_calls

    def open_all(self) -> None:
        """Fail until nothing reaches the backend; it is well from then on."""
        self.inner.error = OSError("gone")
        for verb in (StorageVerb.EXISTS, StorageVerb.GET, StorageVerb.SET):
            for _ in range(3):
                self.call(verb)
        self.inner.error = None
        self.inner.calls.clear()
        assert set(self.storage.states().values()) == {OPEN}


VERBS = [StorageVerb.EXISTS, StorageVerb.GET, StorageVerb.SET]
REFUSED = [FAILED, *[SKIPPED] * 7]
each_verb = pytest.mark.parametrize("verb", VERBS)


@each_verb
def test_failures_in_a_row_open_the_circuit_and_nothing_reaches_the_backend(
    verb: StorageVerb,
) -> None:
    rig = Rig()
    rig.inner.error = OSError("gone")
    for _ in range(3):
        assert rig.state(verb) is CLOSED
        assert isinstance(rig.call(verb), OSError)
    assert rig.state(verb) is OPEN
    rig.clock.advance(COOLDOWN - 0.1)
    assert all(rig.refuses(verb) for _ in range(100))


def test_a_refused_write_skips_only_what_is_behind_a_page_of_it() -> None:
    rig = Rig()
    rig.open_all()
    parents = [b"", KEYS[0], b"", KEYS[2], KEYS[3], KEYS[7], b"", KEYS[5]]
    outcomes = rig.storage.batch_set(KEYS, parents, PAGES, deadline=LATER)
    expected = [FAILED, SKIPPED, FAILED, SKIPPED, SKIPPED, FAILED, FAILED, SKIPPED]
    assert outcomes == expected


@each_verb
def test_a_good_call_in_between_begins_the_count_anew(verb: StorageVerb) -> None:
    rig = Rig()
    for _ in range(5):
        rig.inner.error = OSError("gone")
        rig.call(verb)
        rig.call(verb)
        rig.inner.error = None
        rig.call(verb)
    assert rig.state(verb) is CLOSED


@each_verb
def test_after_the_cooldown_a_good_call_closes_the_circuit(verb: StorageVerb) -> None:
    rig = Rig()
    rig.open_all()
    rig.clock.advance(COOLDOWN)
    rig.call(verb)
    assert [name for name, _ in rig.inner.calls] == [verb.value.removeprefix("batch_")]
    assert rig.state(verb) is CLOSED


@each_verb
def test_after_the_cooldown_a_failing_call_begins_the_next_one(verb: StorageVerb) -> None:
    rig = Rig()
    rig.open_all()
    rig.inner.error = OSError("still gone")
    for _ in range(4):
        rig.clock.advance(COOLDOWN)
        assert isinstance(rig.call(verb), OSError)
        assert rig.state(verb) is OPEN
        assert rig.refuses(verb)
    assert len(rig.inner.calls) == 4


class LateGate(Gate):
    """Holds calls only after so many have passed."""

    def __init__(self, num_free: int) -> None:
        super().__init__()
        self._num_free = num_free

    def pass_through(self) -> None:
        self._num_free -= 1
        if self._num_free < 0:
            super().pass_through()


def test_one_call_at_a_time_probes_and_one_that_hangs_is_not_the_last() -> None:
    gate = LateGate(3)
    failing = {Verb.SET: [Fault.RAISE] * 3}
    rig = Rig(around=FaultyStorage(FlakyStorage(), faults=failing, gates={Verb.SET: gate}))
    for _ in range(3):
        with pytest.raises(InjectedFault):
            rig.set()
    probes = [threading.Thread(target=rig.set) for _ in range(2)]
    for probe in probes:
        gate.entered.clear()
        rig.clock.advance(COOLDOWN)
        probe.start()
        assert gate.entered.wait(timeout=60)
        assert rig.state(StorageVerb.SET) is HALF_OPEN
        assert rig.set() == REFUSED
    gate.open()
    for probe in probes:
        probe.join(timeout=60)
    assert rig.state(StorageVerb.SET) is CLOSED
    assert rig.set() == [PRESENT] * 8


@pytest.mark.parametrize("outcome", [FAILED, TIMEOUT])
def test_pages_that_failed_or_had_no_time_are_failures(outcome: PageOutcome) -> None:
    rig = Rig(max_failures=1)
    rig.inner.writes = {KEYS[6]: [outcome]}
    assert rig.set()[:7] == [*[OK] * 6, outcome]
    assert rig.state(StorageVerb.SET) is OPEN


@pytest.mark.parametrize("outcome", [MISS, CORRUPT, NO_SPACE, OK, PRESENT])
def test_every_other_outcome_is_no_failure(outcome: PageOutcome) -> None:
    rig = Rig(max_failures=1)
    rig.inner.writes = {KEYS[6]: [outcome]}
    rig.set()
    assert rig.state(StorageVerb.SET) is CLOSED


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.LONG, Fault.WRONG_TYPE])
def test_an_answer_that_is_none_is_a_failure_and_is_passed_on(fault: Fault) -> None:
    faults = {Verb.SET: [fault], Verb.GET: [fault]}
    rig = Rig(max_failures=1, around=FaultyStorage(FlakyStorage(), faults=faults))
    assert rig.set() != [OK] * 8
    assert rig.get() != [OK] * 8
    assert rig.storage.states() == {
        StorageVerb.EXISTS: CLOSED,
        StorageVerb.GET: OPEN,
        StorageVerb.SET: OPEN,
    }


def test_a_call_that_came_too_late_says_nothing() -> None:
    rig = Rig(max_failures=1)
    rig.clock.advance(5.0)
    assert rig.set(deadline=5.0) == [TIMEOUT] * 8
    assert rig.state(StorageVerb.SET) is CLOSED
    rig.inner.writes = {KEYS[0]: [FAILED]}
    rig.set()
    rig.clock.advance(COOLDOWN)
    assert rig.set(deadline=5.0) == [TIMEOUT] * 8
    assert rig.state(StorageVerb.SET) is OPEN


@pytest.mark.parametrize("before", [[], [PRESENT] * 6])
def test_a_write_that_finds_no_room_for_any_page_is_a_failure_of_writes_alone(
    before: list[PageOutcome],
) -> None:
    rig = Rig(max_failures=2)
    rig.inner.hold(KEYS[: len(before)])
    rig.inner.writes = {KEYS[len(before)]: [NO_SPACE] * 3}
    for _ in range(2):
        assert rig.state(StorageVerb.SET) is CLOSED
        assert rig.set()[: len(before) + 1] == [*before, NO_SPACE]
    assert rig.state(StorageVerb.SET) is OPEN
    assert rig.storage.batch_exists(KEYS) == len(before)
    assert rig.get()[: len(before) + 1] == [*[OK] * len(before), MISS]
    rig.clock.advance(COOLDOWN)
    assert NO_SPACE in rig.set()
    assert rig.refuses(StorageVerb.SET)
    rig.clock.advance(COOLDOWN)
    assert rig.set()[-1] is OK
    assert rig.state(StorageVerb.SET) is CLOSED


def test_a_refused_look_up_says_why_the_calls_before_it_failed() -> None:
    rig = Rig()
    rig.inner.error = OSError("gone")
    for _ in range(3):
        rig.call(StorageVerb.EXISTS)
    with pytest.raises(StorageError, match=r"batch_exists failed again.*OSError: gone"):
        rig.storage.batch_exists(KEYS)
    reading = Rig()
    reading.inner._note_error(OSError("no such device"))
    reading.inner.reads = {KEYS[0]: [FAILED] * 3}
    for _ in range(3):
        reading.get()
    with pytest.raises(StorageError, match=r"batch_get failed again.*OSError: no such device"):
        reading.storage.batch_exists(KEYS)


def test_an_empty_look_up_closes_no_circuit() -> None:
    rig = Rig()
    rig.open_all()
    rig.clock.advance(COOLDOWN)
    assert rig.storage.batch_exists([]) == 0
    assert rig.state(StorageVerb.EXISTS) is OPEN


def test_an_empty_batch_says_nothing_and_one_page_is_enough() -> None:
    rig = Rig(max_failures=2)
    rig.inner.writes = {KEYS[0]: [FAILED] * 2}
    for _ in range(2):
        assert rig.storage.batch_set([], [], [], deadline=LATER) == []
        assert rig.state(StorageVerb.SET) is CLOSED
        assert rig.storage.batch_set(KEYS[:1], CHAIN[:1], PAGES[:1], deadline=LATER) == [FAILED]
    assert rig.state(StorageVerb.SET) is OPEN


def test_reads_that_fail_stop_lookups_and_not_writes() -> None:
    """A backend may look pages up in memory that it can no longer read."""
    rig = Rig()
    rig.inner.hold(KEYS)
    rig.inner.reads = {KEYS[0]: [FAILED] * 4}
    for _ in range(3):
        assert rig.storage.batch_exists(KEYS) == 8
        rig.get()
    assert rig.refuses(StorageVerb.EXISTS)
    assert rig.set() == [PRESENT] * 8
    rig.clock.advance(COOLDOWN)
    assert rig.storage.batch_exists(KEYS) == 8
    rig.get()
    assert rig.refuses(StorageVerb.EXISTS)
    rig.clock.advance(COOLDOWN)
    assert rig.get() == [OK] * 8
    assert rig.storage.batch_exists(KEYS) == 8


def test_a_backend_that_cannot_write_still_reads() -> None:
    rig = Rig()
    rig.inner.hold(KEYS[:4])
    rig.inner.writes = {KEYS[4]: [FAILED] * 9}
    for _ in range(3):
        rig.set()
    assert rig.set() == REFUSED
    assert rig.storage.batch_exists(KEYS) == 4
    assert rig.get() == [*[OK] * 4, MISS, *[SKIPPED] * 3]


def test_clear_always_reaches_the_backend_and_a_closed_one_says_so() -> None:
    rig = Rig()
    rig.inner.hold(KEYS)
    rig.open_all()
    assert rig.storage.clear() == 8
    rig.storage.close()
    for call in (rig.get, rig.set, lambda: rig.storage.batch_exists(KEYS)):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("seed", range(30))
def test_a_circuit_goes_as_its_three_rules_say(seed: int) -> None:
    """Against a list of all calls that ever reached the backend, and when they ended."""
    rng = random.Random(seed)
    max_failures = rng.randint(1, 4)
    rig = Rig(max_failures=max_failures)
    ended: list[tuple[float, bool]] = []
    for _ in range(300):
        rig.clock.advance(rng.choice([0.0, 1.0, COOLDOWN / 2, COOLDOWN]))
        bad = rng.random() < 0.6
        rig.inner.writes = {KEYS[0]: [FAILED]} if bad else {}
        streak = ended[-max_failures:]
        is_open = len(streak) == max_failures and all(failed for _, failed in streak)
        reaches = not is_open or rig.clock.now() >= ended[-1][0] + COOLDOWN
        rig.inner.calls.clear()
        rig.set()
        assert bool(rig.inner.calls) == reaches
        if reaches:
            ended.append((rig.clock.now(), bad))
