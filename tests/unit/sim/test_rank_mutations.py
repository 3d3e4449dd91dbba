"""The simulation of two ranks turns red for each way in which a rank can decide by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rank_mutations import (
    believe_the_own_store_alone,
    copy_the_pages_of_the_first_rank,
    copy_to_whoever_has_room,
    end_loads_that_others_still_make,
    end_prefetches_by_the_own_clock,
    end_writes_that_others_still_make,
    forget_a_copy_of_nothing,
    give_pages_that_only_the_own_pool_has,
    hit_what_only_the_own_store_has,
    release_memory_that_others_still_use,
    store_pages_whoever_has_them,
)

from hicache.sim import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 4_000


@pytest.mark.parametrize(
    ("mutate", "seed"),
    [
        (end_writes_that_others_still_make, 0),
        (end_loads_that_others_still_make, 0),
        (hit_what_only_the_own_store_has, 0),
        (release_memory_that_others_still_use, 1),
        (end_prefetches_by_the_own_clock, 0),
        (give_pages_that_only_the_own_pool_has, 0),
        (believe_the_own_store_alone, 1),
    ],
)
def test_a_rank_that_decides_by_itself_is_found_within_a_few_thousand_steps(
    mutate: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    report = simulate(seed, STEPS, num_ranks=2, shrink_steps=0)
    assert report.failure is not None
    found = "\n".join(report.failure.run.violations)
    assert "differ" in found or "different things" in found


@pytest.mark.parametrize(
    ("mutate", "seed", "says"),
    [
        (copy_the_pages_of_the_first_rank, 2, "holds the bytes of something else"),
        (copy_to_whoever_has_room, 2, "OwnershipError"),
        (store_pages_whoever_has_them, 1, "was stored with other bytes"),
        (forget_a_copy_of_nothing, 1, "ranks do different things"),
    ],
)
def test_a_rank_that_forgets_whose_pages_are_whose_is_found_within_a_few_thousand_steps(
    mutate: Callable[[pytest.MonkeyPatch], None],
    seed: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    report = simulate(seed, STEPS, num_ranks=2, shrink_steps=0)
    assert report.failure is not None
    assert says in "\n".join(report.failure.run.violations)
