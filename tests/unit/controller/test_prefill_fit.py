"""What a token takes to compute, out of passes of which some are small, deep or wrong."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.controller.prefill_fit import PrefillFit

if TYPE_CHECKING:
    from collections.abc import Iterable

parts = st.floats(1e-6, 1e-2)
TOKENS, CONTEXTS = (64, 512, 4096), (0, 2000, 30_000, 100_000)


def noted(passes: Iterable[tuple[int, float, float]]) -> PrefillFit:
    """A fit of passes with so many tokens, seconds and tokens before them."""
    fit = PrefillFit()
    for num_tokens, seconds, context in passes:
        fit.note(num_tokens, seconds, context_tokens=context)
    return fit


def assert_line(fit: PrefillFit, token: float) -> None:
    """Assert that every token takes so long, whatever is before it."""
    line = fit.line()
    assert line is not None
    assert line.base == pytest.approx(token)
    assert line.slope == 0.0


def model_seconds(num_tokens: int, context: float, base: float, token: float, deep: float) -> float:
    return base + num_tokens * (token + deep * context)


@settings(deadline=None)
@given(base=parts, token=parts, share=st.floats(0, 1))
def test_sizes_and_contexts_tell_what_a_token_takes_and_what_is_before_it(
    base: float, token: float, share: float
) -> None:
    deep = share * token / 1000
    line = noted(
        (size, model_seconds(size, context, base, token, deep), context)
        for size in TOKENS
        for context in CONTEXTS
    ).line()
    assert line is not None
    assert line.base == pytest.approx(token, rel=0.01)
    assert line.slope == pytest.approx(deep, rel=0.01, abs=token * 1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_passes_that_took_far_too_long_bend_it_little(seed: int) -> None:
    rng = random.Random(seed)
    passes = []
    for _ in range(32):
        size, context = rng.choice(TOKENS), rng.choice(CONTEXTS)
        seconds = model_seconds(size, context, 0.01, 1e-4, 1e-8) * rng.uniform(0.95, 1.05)
        passes.append((size, seconds * (10 if rng.random() < 0.1 else 1), float(context)))
    line = noted(passes).line()
    assert line is not None
    for context in (0, 50_000):
        estimate, truth = line.base + line.slope * context, 1e-4 + 1e-8 * context
        assert estimate == pytest.approx(truth, rel=0.25)


def test_passes_of_one_kind_tell_what_a_token_takes_there() -> None:
    assert_line(noted([(512, 0.5, 7000.0)] * 8), 0.5 / 512)


def test_small_passes_that_take_as_long_as_larger_ones_do_not_make_tokens_free() -> None:
    assert_line(noted([(size, 0.01, 0.0) for size in (1, 10, 100)]), 0.25 * 0.01 / 100)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.floats(1e-6, 100), st.floats(0, 1e6)),
        min_size=1,
        max_size=40,
    )
)
def test_a_token_always_takes_some_time_and_never_less_for_what_is_before_it(
    passes: list[tuple[int, float, float]],
) -> None:
    line = noted(passes).line()
    assert line is not None
    assert line.base > 0
    assert line.slope >= 0


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 1.0), (-1, 1.0), (5, 0.0), (5, -1.0)])
def test_nothing_is_known_before_something_was_computed(num_tokens: int, seconds: float) -> None:
    assert noted([(num_tokens, seconds, 0.0)]).line() is None


def test_thirty_two_newer_passes_are_all_that_counts() -> None:
    assert_line(noted([*[(10, 100.0, 0.0)] * 32, *[(10, 1.0, 0.0)] * 32]), 0.1)
