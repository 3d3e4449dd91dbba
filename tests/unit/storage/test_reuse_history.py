"""What a page store learns of uses: counted against counting each wait by itself."""

from __future__ import annotations

import itertools
import random

import pytest

from hicache.storage.page_store.departed import Departed
from hicache.storage.page_store.reuse_history import (
    NUM_AGES,
    NUM_CELLS,
    NUM_CLASSES,
    ReuseHistory,
    age_limits,
    class_of,
)


def octave_of(age: int) -> int:
    return next(
        octave
        for octave in range(NUM_AGES)
        if age_limits(octave)[0] <= age <= (age_limits(octave)[1] or age)
    )


def test_octaves_of_age_follow_each_other_without_end() -> None:
    limits = [age_limits(octave) for octave in range(NUM_AGES)]
    assert limits[0][0] == 0
    assert [youngest for youngest, _ in limits[1:]] == [
        oldest + 1 for _, oldest in limits[:-1] if oldest is not None
    ]
    assert limits[-1][1] is None
    assert octave_of(1 << 40) == NUM_AGES - 1


def test_classes_rise_with_uses() -> None:
    classes = [class_of(num_uses) for num_uses in range(1, 1000)]
    assert classes == sorted(classes)
    assert set(classes) == set(range(NUM_CLASSES))


@pytest.mark.parametrize("seed", range(3))
def test_waits_are_counted_as_if_each_were_followed(seed: int) -> None:
    """Young, and so neither forgotten much nor merged much, half of them still waiting."""
    rng = random.Random(seed)
    history = ReuseHistory()
    waits: list[tuple[int, int]] = []
    used = [0] * NUM_CELLS
    for _ in range(200):
        tick = history.tick()
        use_class = rng.randrange(2)
        history.begin_wait(use_class, tick)
        waits.append((use_class, tick))
        if rng.random() < 0.5:
            use_class, begun = waits.pop(rng.randrange(len(waits)))
            ended_by_use = rng.random() < 0.7
            history.end_wait(use_class, begun, used=ended_by_use)
            used[use_class * NUM_AGES + octave_of(tick - begun)] += ended_by_use
    # 200 ticks are a fifth of the half-life: what is oldest counts 13 % less.
    for cell, count in enumerate(used):
        weighed = history._used[cell] / history._weight
        assert 0.87 * count <= weighed <= count * 1.001
    waiting = sum(sum(cohort.waiting) for cohort in history._cohorts) / history._weight
    assert 0.85 * len(waits) <= waiting <= len(waits) * 1.001


def test_nothing_waits_when_all_waits_have_ended_however_late() -> None:
    """Cohorts that became one lose a little of their precision."""
    rng = random.Random(5)
    history = ReuseHistory()
    waits = []
    for _ in range(20_000):
        history.begin_wait(0, history.tick())
        waits.append(history.now)
    history = ReuseHistory.decode(history.encode())
    rng.shuffle(waits)
    before = sum(sum(cohort.waiting) for cohort in history._cohorts)
    for begun in waits:
        history.end_wait(0, begun, used=False)
    after = sum(abs(sum(cohort.waiting)) for cohort in history._cohorts)
    assert after < 0.02 * before
    assert len(history._cohorts) < 100


@pytest.mark.parametrize("num_uses", [0, 1, 2])
@pytest.mark.parametrize("num_waits", [100, 1000, 5000])
def test_with_hardly_any_use_worth_falls_with_age(num_waits: int, num_uses: int) -> None:
    """However many waits came through without one: which ages are better they do not show."""
    history = ReuseHistory()
    for _ in range(num_waits):
        history.begin_wait(0, history.tick())
    for begun in range(1, num_uses + 1):
        history.end_wait(0, history.now, used=True)
        history.begin_wait(1, history.tick())
        history.begin_wait(0, begun + num_waits)
    worth = history.worth()
    for first in range(0, NUM_CELLS, NUM_AGES):
        of_class = worth[first : first + NUM_AGES]
        assert all(older < younger for younger, older in itertools.pairwise(of_class))


def test_what_is_used_sooner_is_worth_more() -> None:
    """Class 1 is used again within a few ticks, class 0 hardly ever."""
    history = ReuseHistory()
    for _ in range(500):
        begun = history.tick()
        history.begin_wait(0, begun)
        history.begin_wait(1, begun)
        for _ in range(6):
            history.tick()
        history.end_wait(1, begun, used=True)
    worth = history.worth()
    assert worth[NUM_AGES] > 5 * worth[0]


def test_a_wait_that_goes_on_with_a_parent_counts_once() -> None:
    """To end a wait and to begin it again at the same age changes nothing."""
    history = ReuseHistory()
    for _ in range(300):
        history.begin_wait(0, history.tick())
    before = history.worth()
    history.end_wait(0, 40, used=False)
    history.begin_wait(0, 40)
    assert history.worth() == pytest.approx(before)


def test_a_record_is_read_as_it_was_written_also_after_much_time() -> None:
    """Weights grow as time goes on, and are written as 32-bit floats."""
    history = ReuseHistory()
    for _ in range(100_000):
        history.tick()
        if history.now % 50 == 0:
            history.begin_wait(history.now % NUM_CLASSES, history.now)
            history.end_wait(history.now % NUM_CLASSES, history.now, used=history.now % 100 == 0)
    again = ReuseHistory.decode(history.encode())
    assert again.now == history.now
    assert again.encode() == ReuseHistory.decode(again.encode()).encode()
    assert again.worth() == pytest.approx(history.worth(), rel=1e-3)
    for damaged in (b"", history.encode()[:10], history.encode()[:-1]):
        assert ReuseHistory.decode(damaged).encode() == ReuseHistory().encode()


def test_what_has_departed_is_known_once_and_not_for_ever() -> None:
    history, departed = ReuseHistory(), Departed()
    history.tick()
    departed.remember(history, b"a", 3, 1)
    assert departed.recall(history, b"a") == 3
    assert departed.recall(history, b"a") == 0
    for number in range(10_000):
        departed.remember(history, number.to_bytes(4, "big"), 2, 1)
    assert departed.recall(history, (0).to_bytes(4, "big")) == 0
    assert departed.recall(history, (9_999).to_bytes(4, "big")) == 2
    departed.forget(history)
    assert departed.recall(history, (9_998).to_bytes(4, "big")) == 0
    waiting = sum(sum(cohort.waiting) for cohort in history._cohorts)
    assert waiting == pytest.approx(0, abs=1e-6)
