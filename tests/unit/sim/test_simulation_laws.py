"""A simulation follows from its seed, finds nothing in a sound cache, and sees what it must."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hicache.errors import ConfigError
from hicache.sim import COVERING_STEPS, Report, simulate
from hicache.sim.command import failure_text, random_seed
from hicache.sim.coverage import DECLARED, Coverage

RANDOM_SECONDS = 5.0


def require_sound(report: Report) -> None:
    assert report.failure is None, failure_text(report, report.failure)


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = simulate(7, 1200), simulate(7, 1200)
    assert first.digest == second.digest
    assert first.coverage.counts == second.coverage.counts
    assert simulate(8, 1200).digest != first.digest


def test_the_run_is_the_same_in_another_process() -> None:
    """In which text, and so sets of it, hash otherwise."""
    code = "from hicache.sim import simulate; print(simulate(7, 600).digest)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == simulate(7, 600).digest


def test_fewer_steps_are_the_beginning_of_more() -> None:
    told: list[int] = []
    report = simulate(7, 450, progress=told.append)
    assert (report.num_steps, report.num_episodes) == (450, 1)
    assert sum(told) == 400


def test_a_long_run_finds_nothing_and_meets_every_declared_pair() -> None:
    report = simulate(0, COVERING_STEPS)
    require_sound(report)
    assert report.coverage.unmet == set()
    assert report.passed


def test_random_runs_find_nothing() -> None:
    end = time.monotonic() + RANDOM_SECONDS
    while time.monotonic() < end:
        seed = random_seed()
        sys.stdout.write(f"hicache simulate --seed {seed} --steps 1000\n")
        require_sound(simulate(seed, 1000))


def test_a_run_that_is_long_enough_must_meet_every_declared_pair() -> None:
    coverage = Coverage()
    short = Report(0, COVERING_STEPS - 1, 1, coverage, "", None)
    long = Report(0, COVERING_STEPS, 1, coverage, "", None)
    assert short.passed
    assert not long.passed
    for meeting in DECLARED:
        coverage.note(*meeting)
    assert long.passed


def test_no_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 step of at least 1 rank, not 0 of 1"):
        simulate(0, 0)
