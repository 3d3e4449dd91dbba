"""Failed pages are tried again, and nothing else, a bounded number of times and in time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from storage_fakes import (
    CHAIN,
    FAILED,
    KEYS,
    LATER,
    OK,
    PAGES,
    PRESENT,
    SKIPPED,
    FlakyStorage,
    make_config,
    pages_in,
    payload,
    sources,
)

from hicache.clock import ManualClock
from hicache.storage.retrying import RetryingStorage
from hicache.testing.faulty_storage import Fault, FaultyStorage, InjectedFault, Verb
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.storage.base import HiCacheStorage


class Rig:
    """A retrying storage whose sleeping passes the time of its clock."""

    def __init__(
        self,
        *,
        max_attempts: int = 2,
        around: HiCacheStorage | None = None,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.inner = FlakyStorage(make_config(self.clock))
        self.slept: list[float] = []
        self.storage = RetryingStorage(
            around or self.inner,
            max_attempts=max_attempts,
            clock=self.clock,
            first_pause_seconds=1.0,
            longest_pause_seconds=5.0,
            draw=draw or random.Random(3).random,
            sleep=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)

    def get(self, deadline: float = LATER) -> list[PageOutcome]:
        self.targets = sources([PageHash(bytes(32))] * len(KEYS))
        return self.storage.batch_get(KEYS, CHAIN, pages_in(self.targets), deadline=deadline)

    def set(self, deadline: float = LATER) -> list[PageOutcome]:
        return self.storage.batch_set(KEYS, CHAIN, PAGES, deadline=deadline)


def test_a_read_goes_on_at_the_page_that_failed() -> None:
    rig = Rig()
    rig.inner.hold(KEYS)
    rig.inner.reads = {KEYS[3]: [FAILED], KEYS[5]: [FAILED]}
    assert rig.get() == [OK] * 8
    assert [target.read() for target in rig.targets] == [payload(key) for key in KEYS]
    assert rig.inner.calls == [("get", KEYS), ("get", KEYS[3:]), ("get", KEYS[5:])]
    assert rig.storage.counts().num_attempts == 2
    assert rig.storage.counts().num_recovered_pages == 2


def test_a_write_repeats_what_failed_and_what_waited_for_it_and_nothing_else() -> None:
    rig = Rig()
    rig.inner.writes = {KEYS[1]: [FAILED], KEYS[4]: [PageOutcome.NO_SPACE]}
    parents = [b"", KEYS[0], KEYS[1], b"", KEYS[3], KEYS[4], b"", KEYS[6]]
    outcomes = rig.storage.batch_set(KEYS, parents, PAGES, deadline=LATER)
    assert outcomes == [OK, OK, OK, OK, PageOutcome.NO_SPACE, SKIPPED, OK, OK]
    assert rig.inner.calls == [("set", KEYS), ("set", KEYS[1:3])]
    assert rig.inner.batch_exists(KEYS) == 4
    assert rig.storage.counts().num_recovered_pages == 1


@pytest.mark.parametrize("final", [one for one in PageOutcome if one not in (OK, PRESENT, FAILED)])
def test_every_other_outcome_is_final(final: PageOutcome) -> None:
    rig = Rig()
    rig.inner.hold(KEYS[:2])
    rig.inner.reads = {KEYS[1]: [final]}
    rig.inner.writes = {KEYS[2]: [final]}
    assert rig.get() == [OK, final, *[SKIPPED] * 6]
    assert rig.set() == [PRESENT, PRESENT, final, *[SKIPPED] * 5]
    assert [verb for verb, _ in rig.inner.calls] == ["get", "set"]
    assert rig.slept == []


def test_a_page_that_keeps_failing_is_given_up_after_the_last_attempt() -> None:
    rig = Rig(max_attempts=4)
    rig.inner.hold(KEYS)
    rig.inner.reads = {KEYS[2]: [FAILED] * 99}
    assert rig.get() == [OK, OK, FAILED, *[SKIPPED] * 5]
    assert len(rig.inner.calls) == 1 + 4
    assert rig.storage.counts().num_attempts == 4
    assert rig.storage.counts().num_recovered_pages == 0


def test_pauses_double_up_to_the_longest_and_are_cut_by_less_than_half() -> None:
    rig = Rig(max_attempts=5)
    rig.inner.hold(KEYS)
    rig.inner.reads = {KEYS[0]: [FAILED] * 99}
    rig.get()
    parts = [slept / longest for slept, longest in zip(rig.slept, [1, 2, 4, 5, 5], strict=True)]
    assert all(0.5 <= part <= 1.0 for part in parts)
    assert len(set(parts)) == 5


@pytest.mark.parametrize("seed", range(20))
def test_no_attempt_begins_at_or_after_the_deadline(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(max_attempts=1000)
    rig.inner.hold(KEYS)
    rig.inner.reads = {KEYS[0]: [FAILED] * 2000}
    deadline = rng.uniform(0.0, 100.0)
    assert rig.get(deadline) == [FAILED, *[SKIPPED] * 7]
    assert rig.clock.now() < deadline
    assert len(rig.inner.calls) == 1 + len(rig.slept)
    # The next pause of at most 5 seconds would have reached it.
    assert rig.clock.now() > deadline - 5.0


@pytest.mark.parametrize(("deadline", "num_calls"), [(1.0, 1), (1.001, 2)])
def test_an_attempt_that_could_begin_only_at_the_deadline_is_left_out(
    deadline: float, num_calls: int
) -> None:
    rig = Rig(draw=lambda: 1.0)
    rig.inner.reads = {KEYS[0]: [FAILED] * 9}
    rig.get(deadline)
    assert len(rig.inner.calls) == num_calls


def test_no_retries_is_a_storage_that_only_passes_on() -> None:
    rig = Rig(max_attempts=0)
    rig.inner.writes = {KEYS[0]: [FAILED]}
    assert rig.set() == [FAILED, *[SKIPPED] * 7]


def test_pages_that_are_tried_again_keep_their_parents() -> None:
    rig = Rig()
    for failing in (rig.inner.reads, rig.inner.writes):
        failing.update({KEYS[2]: [FAILED], KEYS[5]: [FAILED]})
    assert rig.set() == [OK] * 8
    assert rig.get() == [OK] * 8
    assert rig.storage.counts().num_attempts == 4
    assert rig.inner.chained == set(zip(KEYS, CHAIN, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_what_fails_now_and_then_is_as_if_it_had_not(seed: int) -> None:
    """Of two equal stores one fails pages at random, as often as there are attempts at most."""
    rng = random.Random(seed)
    rig, sound = Rig(max_attempts=6), FlakyStorage()
    held = rng.sample(KEYS, rng.randint(0, 8))
    rig.inner.hold(held)
    sound.hold(held)
    for failing in (rig.inner.reads, rig.inner.writes):
        failing.update({key: [FAILED] for key in rng.sample(KEYS, 6)})
    parents = [rng.choice([b"", *KEYS[:index]]) for index in range(8)]
    assert rig.get() == sound.batch_get(KEYS, CHAIN, PAGES, deadline=LATER)
    written = rig.storage.batch_set(KEYS, parents, PAGES, deadline=LATER)
    assert written == sound.batch_set(KEYS, parents, PAGES, deadline=LATER)
    rig.inner.reads.clear()
    assert rig.get() == [OK] * 8


def test_what_raises_or_answers_with_no_answer_is_not_tried_again() -> None:
    faults = [Fault.RAISE, Fault.SHORT, Fault.WRONG_TYPE]
    inner = FlakyStorage()
    inner.reads = {KEYS[0]: [FAILED] * 9}
    rig = Rig(around=FaultyStorage(inner, faults={Verb.GET: faults}))
    with pytest.raises(InjectedFault):
        rig.get()
    assert rig.get() == [FAILED, *[SKIPPED] * 6]
    assert isinstance(rig.get(), str)
    assert rig.slept == []


def test_an_attempt_that_answers_with_no_answer_leaves_what_was_known() -> None:
    inner = FlakyStorage()
    inner.hold(KEYS)
    inner.reads = {KEYS[2]: [FAILED]}
    inner.writes = {KEYS[1]: [FAILED]}
    shapes = {verb: [None, Fault.WRONG_TYPE] for verb in (Verb.GET, Verb.SET)}
    rig = Rig(around=FaultyStorage(inner, faults=shapes))
    assert rig.get() == [OK, OK, FAILED, *[SKIPPED] * 5]
    assert rig.set() == [PRESENT, FAILED, *[SKIPPED] * 6]


def test_a_lookup_is_never_repeated() -> None:
    rig = Rig()
    rig.inner.error = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        rig.storage.batch_exists(KEYS)
    assert len(rig.inner.calls) == 1
