"""How much of a host hit to load: never worse than all or nothing, and as good as can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.controller.affine_fit import Line
from hicache.controller.speeds import NUM_AGREED_SPEEDS, Speeds

PAGE = 4
seconds = st.floats(1e-6, 1.0)
lines = st.builds(Line, seconds, seconds)
maybe_lines = st.none() | lines


def request_seconds(
    speeds: Speeds, num_loaded: int, *, first_token: int, num_tokens: int, chunk: int | None
) -> float:
    """What a request takes, token by token: its first pass goes on beside the load."""
    assert speeds.load is not None
    assert speeds.compute is not None
    first = first_token + num_loaded * PAGE
    costs = [speeds.compute.base + speeds.compute.slope * x for x in range(first, num_tokens)]
    in_pass = len(costs) if chunk is None else min(chunk, len(costs))
    load = speeds.load.base + speeds.load.slope * num_loaded if num_loaded else 0.0
    return max(load, sum(costs[:in_pass])) + sum(costs[in_pass:])


@settings(deadline=None)
@given(
    load=lines,
    compute=lines,
    num_pages=st.integers(1, 12),
    first_page=st.integers(0, 5),
    rest=st.integers(0, 40),
    chunk=st.none() | st.integers(1, 60),
)
def test_a_part_is_never_slower_than_all_or_nothing(
    load: Line, compute: Line, num_pages: int, first_page: int, rest: int, chunk: int | None
) -> None:
    speeds = Speeds(load=load, compute=compute)
    first_token = first_page * PAGE
    num_tokens = first_token + num_pages * PAGE + rest
    num_loaded = speeds.leading_pages_to_load(
        num_pages,
        page_size=PAGE,
        first_token=first_token,
        num_tokens=num_tokens,
        chunk_tokens=chunk,
    )
    assert 0 <= num_loaded <= num_pages
    chosen, none, everything = (
        request_seconds(speeds, count, first_token=first_token, num_tokens=num_tokens, chunk=chunk)
        for count in (num_loaded, 0, num_pages)
    )
    # Between tokens the model takes the middle, which the sum over tokens differs from a little.
    slack = 1e-9 + compute.slope * (num_pages * PAGE + rest)
    assert chosen <= min(none, everything) + slack


def loaded(load: Line, *, num_pages: int = 100, rest: int = 0, **changes: int) -> int:
    """Pages that are loaded where a page takes 4 s to compute."""
    speeds = Speeds(load=load, compute=Line(1.0, 0.0))
    return speeds.leading_pages_to_load(
        num_pages,
        page_size=PAGE,
        first_token=0,
        num_tokens=num_pages * PAGE + rest,
        **changes,
    )


def test_a_slow_link_brings_the_beginning_while_the_end_is_computed() -> None:
    # 50 pages take 200 s to load, and the other 50 as long to compute.
    assert loaded(Line(0.0, 4.0)) == 50
    assert loaded(Line(0.0, 12.0)) == 25


def test_what_is_loaded_behind_the_rest_of_the_prompt_costs_nothing() -> None:
    assert loaded(Line(0.0, 4.0), rest=400) == 100


def test_a_link_that_saves_most_of_the_computation_brings_everything() -> None:
    assert loaded(Line(0.0, 1.0)) == 100
    assert loaded(Line(0.0, 1.1)) < 100


def test_a_load_that_takes_long_whatever_its_size_is_not_begun_for_little() -> None:
    assert loaded(Line(1000.0, 0.1)) == 0
    assert loaded(Line(1000.0, 0.1), num_pages=1000) == 1000


def test_a_link_that_is_congested_brings_less() -> None:
    assert loaded(Line(0.0, 4.0), num_pages_ahead=40) == 30
    assert loaded(Line(0.0, 4.0), num_pages_ahead=1000) == 0


def test_only_the_first_pass_goes_on_beside_the_load() -> None:
    # The last page is computed beside; others would be computed in later passes, one by one.
    assert loaded(Line(0.0, 3.9), chunk_tokens=PAGE) == 99
    assert loaded(Line(0.0, 12.0), chunk_tokens=3 * PAGE) == 1


def test_attention_makes_the_end_of_a_prompt_worth_loading() -> None:
    speeds = Speeds(load=Line(0.0, 8.0), compute=Line(1.0, 0.001))
    early, late = (
        speeds.leading_pages_to_load(
            50, page_size=PAGE, first_token=first, num_tokens=first + 50 * PAGE
        )
        for first in (0, 10_000)
    )
    assert early < 25 < late


@settings(deadline=None)
@given(read=maybe_lines, load=maybe_lines, compute=maybe_lines)
def test_where_something_was_not_measured_everything_is_loaded(
    read: Line | None, load: Line | None, compute: Line | None
) -> None:
    speeds = Speeds(read=read, load=load, compute=compute)
    if None in (load, compute):
        assert speeds.leading_pages_to_load(7, page_size=PAGE, first_token=0, num_tokens=100) == 7
    assert (speeds.read_seconds(3) is None) == (read is None)
    assert (speeds.compute_seconds(0, 3) is None) == (compute is None)


def test_a_read_takes_its_calls_and_its_pages_and_those_ahead() -> None:
    speeds = Speeds(read=Line(0.5, 0.1))
    assert speeds.read_seconds(10) == pytest.approx(1.5)
    assert speeds.read_seconds(10, num_calls=3, num_pages_ahead=20) == pytest.approx(4.5)


def test_computing_takes_longer_the_more_is_before() -> None:
    speeds = Speeds(compute=Line(1.0, 0.5))
    assert speeds.compute_seconds(10, 20) == pytest.approx(10 + 0.5 * (20**2 - 10**2) / 2)


@settings(deadline=None)
@given(st.lists(st.builds(Speeds, read=maybe_lines, load=maybe_lines, compute=maybe_lines)))
def test_the_minimum_of_the_integers_is_the_slowest_or_unknown(ranks: list[Speeds]) -> None:
    if not ranks:
        return
    columns = zip(*(speeds.to_integers() for speeds in ranks), strict=True)
    agreed = [min(column) for column in columns]
    assert len(agreed) == NUM_AGREED_SPEEDS
    slowest = Speeds.from_integers(agreed)
    for name in ("read", "load", "compute"):
        lines = [getattr(speeds, name) for speeds in ranks]
        found = getattr(slowest, name)
        if None in lines:
            assert found is None
        else:
            assert found.base == pytest.approx(max(line.base for line in lines), abs=1e-12)
            assert found.slope == pytest.approx(max(line.slope for line in lines), abs=1e-12)
