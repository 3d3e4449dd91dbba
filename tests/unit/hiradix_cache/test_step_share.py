"""A step takes a bounded part of what has ended, and nothing waits for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.controller.agreement import WINDOW, Finished
from hicache.hiradix_cache.step_share import step_share

if TYPE_CHECKING:
    from collections.abc import Sequence

ENDED = st.lists(st.integers(), max_size=8, unique=True)


def some(values: list[int]) -> Sequence[tuple[object, int]]:
    return [(value, 1) for value in values]


@pytest.mark.parametrize("num_ended", [1, 3, 4, 12, 13, WINDOW, 4 * WINDOW])
def test_a_burst_is_over_in_few_steps_each_of_which_takes_a_quarter_or_three(
    num_ended: int,
) -> None:
    steps: list[int] = []
    while sum(steps) < num_ended:
        steps.append(step_share(num_ended - sum(steps)))
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == max(3, -(-num_ended // 4))
    assert len(steps) <= 14


@given(st.integers(1, 200))
def test_what_comes_with_every_step_waits_for_four_steps_at_most(num_new: int) -> None:
    waiting = 0
    for _ in range(100):
        waiting += num_new
        waiting -= min(waiting, step_share(waiting))
        assert waiting <= 4 * num_new


@given(ENDED, ENDED, ENDED, ENDED, st.integers(0, 40), st.booleans())
def test_all_loads_go_then_the_oldest_writes_then_persists_then_what_is_released(
    writes: list[int],
    loads: list[int],
    persists: list[int],
    released: list[int],
    most: int,
    all_writes: bool,
) -> None:
    # Who chooses by number and age looks at no operation.
    ended: Any = Finished
    finished: Finished = ended(
        some(writes), some(loads), persists=some(persists), released=released
    )
    taken = finished.oldest(most, all_writes=all_writes)
    written = writes if all_writes else writes[:most]
    num_beside = max(0, most - len(written))
    expected = ended(
        some(written),
        some(loads),
        persists=some(persists[:num_beside]),
        released=released[: max(0, num_beside - len(persists))],
    )
    assert taken == expected
    assert finished.num_ended == len(writes) + len(loads) + len(persists) + len(released)
