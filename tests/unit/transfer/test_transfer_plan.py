"""The laws of plans: which pages belong together, and which of them go as one copy."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.errors import TransferError
from hicache.transfer.torch_engine import TransferPlan


@pytest.mark.parametrize(
    ("device", "host", "message"),
    [
        ([1, 2], [3], "2 device pages for 1 host pages"),
        ([5, 2, 5], [1, 2, 3], "device page 5 comes twice"),
        ([1, 2, 3], [7, 4, 7], "host page 7 comes twice"),
    ],
)
def test_pages_that_are_not_one_to_one_are_refused(
    device: list[int], host: list[int], message: str
) -> None:
    with pytest.raises(TransferError, match=message):
        TransferPlan.pair(np.array(device), np.array(host), min_run_pages=1)


def test_a_plan_keeps_its_pages_when_the_caller_changes_the_arrays() -> None:
    device, host = np.array([4, 9]), np.array([2, 5])
    plan = TransferPlan.pair(device, host, min_run_pages=1)
    device[:], host[:] = 0, 1
    assert plan.device_pages.tolist() == [4, 9]
    assert plan.host_pages.tolist() == [2, 5]
    assert [(run.device.start, run.host.start) for run in plan.runs] == [(4, 2), (9, 5)]
    for kept in (plan.device_pages, plan.host_pages):
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 1


Pairs: TypeAlias = list[tuple[int, int]]


@st.composite
def paired_pages(draw: st.DrawFn) -> Pairs:
    """Blocks of pages that are consecutive on both sides, in any order on each side."""
    lengths = draw(st.lists(st.integers(1, 5), max_size=6))
    pairs: Pairs = []
    starts = np.cumsum([0, *lengths]).tolist()
    device_start = 0
    for block in draw(st.permutations(range(len(lengths)))):
        for page in range(lengths[block]):
            pairs.append((device_start + page, starts[block] + page))
        device_start += lengths[block]
    return draw(st.permutations(pairs))


def longest_runs(pairs: Pairs) -> list[Pairs]:
    runs: list[Pairs] = []
    for device, host in sorted(pairs, key=lambda pair: pair[1]):
        if runs and runs[-1][-1] == (device - 1, host - 1):
            runs[-1].append((device, host))
        else:
            runs.append([(device, host)])
    return runs


def numbers(pages: slice) -> range:
    return range(pages.start, pages.stop)


@given(pairs=paired_pages(), min_run_pages=st.integers(1, 6))
@settings(deadline=None)
def test_a_plan_splits_its_pairs_into_the_longest_runs_and_the_rest(
    pairs: Pairs, min_run_pages: int
) -> None:
    device, host = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    plan = TransferPlan.pair(device, host, min_run_pages=min_run_pages)
    expected = longest_runs(pairs)
    assert [
        list(zip(numbers(run.device), numbers(run.host), strict=True)) for run in plan.runs
    ] == [run for run in expected if len(run) >= min_run_pages]
    scattered = zip(plan.scattered_device.tolist(), plan.scattered_host.tolist(), strict=True)
    assert list(scattered) == [pair for run in expected if len(run) < min_run_pages for pair in run]
    everything = zip(plan.device_pages.tolist(), plan.host_pages.tolist(), strict=True)
    assert list(everything) == sorted(pairs, key=lambda pair: pair[1])
