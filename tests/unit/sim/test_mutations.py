"""The simulation turns red for each of eight bugs that are put in on purpose."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from mutations import (
    ack_writes_before_they_ran,
    copy_layers_before_they_end,
    end_writes_that_are_still_reserved,
    forget_memory_of_ended_prefetches,
    keep_the_lock_of_failed_loads,
    publish_results_from_before_a_reset,
    split_one_page_too_late,
    use_what_was_reserved_for_other_pages,
)

from hicache.sim import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = (1, 2, 6)
STEPS = 4_000


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("mutate", "symptom"),
    [
        (ack_writes_before_they_ran, "bytes"),
        (forget_memory_of_ended_prefetches, "no owner"),
        (split_one_page_too_late, "bytes"),
        (publish_results_from_before_a_reset, "residency|free already|eviction queue"),
        (keep_the_lock_of_failed_loads, "lock"),
        (use_what_was_reserved_for_other_pages, "host page"),
        (end_writes_that_are_still_reserved, "written by nobody"),
        (copy_layers_before_they_end, "no copy that could end"),
    ],
)
def test_a_bug_is_found_within_a_few_thousand_steps(
    mutate: Callable[[pytest.MonkeyPatch], None],
    symptom: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    report = simulate(seed, STEPS, shrink_steps=0)
    assert report.failure is not None
    assert not report.passed
    found = "\n".join(report.failure.run.violations)
    assert re.search(symptom, found)
