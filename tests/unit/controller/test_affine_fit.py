"""A fixed part and a part that grows, out of measurements of which some are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.controller.affine_fit import AffineFit, Line, fit_line

sizes = st.lists(st.integers(1, 1000), min_size=2, max_size=16, unique=True)
parts = st.just(0.0) | st.floats(1e-9, 10)


def noted(*points: tuple[float, float]) -> AffineFit:
    fit = AffineFit()
    for x, y in points:
        fit.note(x, y)
    return fit


@settings(deadline=None)
@given(sizes=sizes, base=parts, slope=parts)
def test_sizes_that_are_far_apart_tell_both_parts(
    sizes: list[int], base: float, slope: float
) -> None:
    if max(sizes) < 2 * min(sizes):
        return
    line = noted(*((size, base + slope * size) for size in sizes)).line()
    assert line is not None
    assert line.base == pytest.approx(base, rel=1e-6, abs=1e-6)
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)


@settings(deadline=None)
@given(size=st.integers(1, 1000), seconds=st.lists(parts, min_size=1, max_size=16))
def test_one_size_alone_tells_a_rate(size: int, seconds: list[float]) -> None:
    line = noted(*((size, one) for one in seconds)).line()
    assert line is not None
    assert line.base == 0.0
    assert min(seconds) <= line.slope * size * (1 + 1e-9)
    assert line.slope * size <= max(seconds) * (1 + 1e-9)


@pytest.mark.parametrize("wrong", [0, 5, 10])
def test_an_outlier_does_not_bend_the_line(wrong: int) -> None:
    points = [(float(2**index), 1.0 + 0.5 * 2**index) for index in range(11)]
    points[wrong] = (points[wrong][0], 1e6)
    line = noted(*points).line()
    assert line is not None
    assert line.base == pytest.approx(1.0, abs=0.5)
    assert line.slope == pytest.approx(0.5, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), parts), min_size=1, max_size=20))
def test_neither_part_is_negative(points: list[tuple[float, float]]) -> None:
    line = noted(*points).line()
    assert line is not None
    assert min(line) >= 0


def test_nothing_is_known_before_anything_was_observed() -> None:
    fit = noted((0, 1.0), (-1, 1.0), (3, -1.0))
    assert fit.line() is None
    assert len(fit.observed) == 0


def test_sixteen_newer_observations_are_all_that_counts() -> None:
    fit = noted(*[(10.0, 1000.0)] * 16, *[(10.0, 5.0)] * 16)
    assert fit.line() == Line(0.0, 0.5)


def test_points_that_are_near_each_other_tell_no_slope() -> None:
    assert fit_line([(10, 1.0), (19, 9.0)]) is None
    assert fit_line([(10, 1.0), (20, 2.0)]) == Line(0.0, 0.1)


def test_a_line_is_fitted_anew_once_a_quarter_of_what_counts_is_new() -> None:
    fit = noted(*[(10.0, 5.0)] * 16)
    assert fit.line() == Line(0.0, 0.5)
    lines = []
    for _ in range(12):
        fit.note(10.0, 1000.0)
        lines.append(fit.line())
    # After 4 of 16 the median is the old one, after 8 it is between both, after 12 the new one.
    assert [line and line.slope for line in lines] == [0.5] * 7 + [50.25] * 4 + [100.0]


def test_the_first_observations_count_at_once() -> None:
    fit, slopes = AffineFit(), []
    for seconds in (1.0, 2.0, 3.0, 4.0):
        fit.note(1.0, seconds)
        slopes.append(fit.line())
    assert slopes == [Line(0.0, slope) for slope in (1.0, 1.5, 2.0, 2.5)]
