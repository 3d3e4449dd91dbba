"""A failing run becomes short and stays the same failure."""

from __future__ import annotations

import pytest
from mutations import keep_the_lock_of_failed_loads

from hicache.sim import simulate
from hicache.sim.shrinking import replay, shrink


@pytest.fixture(autouse=True)
def _broken(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_lock_of_failed_loads(monkeypatch)


def test_a_shortened_run_fails_in_the_same_way_again_and_again() -> None:
    failure = simulate(1, 4000, shrink_steps=20_000).failure
    assert failure is not None
    run, shortest = failure.run, failure.shortest
    assert len(shortest.decisions) < len(run.decisions) / 4
    assert shortest.kind == run.kind
    again = replay(shortest.seed, 1, shortest.decisions)
    assert again == shortest
    assert replay(shortest.seed, 1, shortest.decisions[:1]) is None


def test_no_more_steps_are_repeated_than_may_be() -> None:
    failure = simulate(1, 4000, shrink_steps=0).failure
    assert failure is not None
    assert failure.shortest is failure.run
    assert shrink(failure.run, max_steps=0) is failure.run
