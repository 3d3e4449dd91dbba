"""Several ranks follow from the seed, as one does, and are equal after every step."""

from __future__ import annotations

import sys

import pytest

from hicache.sim import Report, simulate
from hicache.sim.command import failure_text
from hicache.sim.coverage import Fault, Meeting

NUM_SEEDS = 50
STEPS = 300


def require_sound(report: Report) -> None:
    assert report.failure is None, failure_text(report, report.failure)


def test_fifty_seeds_of_two_ranks_find_nothing() -> None:
    met: set[Meeting] = set()
    for seed in range(NUM_SEEDS):
        sys.stdout.write(f"hicache simulate --seed {seed} --steps {STEPS} --ranks 2\n")
        report = simulate(seed, STEPS, num_ranks=2)
        require_sound(report)
        met.update(report.coverage.counts.elements())
    # Some of them shared pages, and now and then one rank had none of those that moved.
    assert Fault.ELSEWHERE in {meeting.fault for meeting in met}


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_ranks_find_nothing(num_ranks: int) -> None:
    require_sound(simulate(0, 1000, num_ranks=num_ranks))


def test_the_same_seed_gives_the_same_run_of_as_many_ranks() -> None:
    first, second = (simulate(7, 700, num_ranks=2) for _ in range(2))
    assert first.digest == second.digest
    assert first.coverage.counts == second.coverage.counts
    assert first.coverage.actions == second.coverage.actions
    assert simulate(7, 700, num_ranks=3).digest != first.digest
