"""What the cost model says of reading against computing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.controller.cost_model import CostVerdict, PrefetchCostModel
from hicache.controller.records import PagesResult, Phase
from hicache.types import OperationId, PageOutcome

seconds = st.floats(1e-6, 10)
counts = st.integers(1, 10_000)


def new_model(*, enabled: bool = True) -> PrefetchCostModel:
    return PrefetchCostModel(page_size=16, enabled=enabled)


def model(*, read: float, compute: float) -> PrefetchCostModel:
    """A model that has measured so many seconds a token."""
    model = new_model()
    model.note_read(100, 100 * read)
    model.note_prefill(100, 100 * compute)
    return model


def test_before_both_are_measured_everything_is_read() -> None:
    model = new_model()
    assert model.judge() is CostVerdict.UNKNOWN
    model.note_read(10, 1.0)
    assert model.judge() is CostVerdict.UNKNOWN
    model = new_model()
    model.note_prefill(10, 1.0)
    assert model.judge() is CostVerdict.UNKNOWN
    assert CostVerdict.UNKNOWN.reads


@given(read=seconds, compute=seconds)
def test_what_is_read_faster_than_computed_is_worth_it(read: float, compute: float) -> None:
    verdict = model(read=read, compute=compute).judge()
    if read < 0.999 * compute:
        assert verdict is CostVerdict.WORTH
    elif compute < 0.999 * read:
        assert verdict is CostVerdict.NOT_WORTH


@given(st.lists(st.tuples(counts, seconds), min_size=1))
def test_the_estimate_lies_between_the_extremes_observed(
    observations: list[tuple[int, float]],
) -> None:
    model = new_model()
    for num_tokens, duration in observations:
        model.note_read(num_tokens, duration)
    rates = [duration / num_tokens for num_tokens, duration in observations]
    estimate = model.read_seconds_per_token
    assert estimate is not None
    assert 0.999 * min(rates) <= estimate <= 1.001 * max(rates)


def test_one_refusal_in_sixteen_is_read_to_see_whether_the_store_is_still_slow() -> None:
    slow = model(read=2.0, compute=1.0)
    verdicts = [slow.judge() for _ in range(64)]
    assert verdicts.count(CostVerdict.PROBE) == 4
    assert verdicts.count(CostVerdict.NOT_WORTH) == 60
    assert [verdict.reads for verdict in verdicts].count(True) == 4


def test_a_store_that_became_fast_is_believed_after_eight_reads() -> None:
    recovered = model(read=100.0, compute=1.0)
    for _ in range(8):
        assert recovered.judge() is CostVerdict.NOT_WORTH
        recovered.note_read(100, 10.0)
    assert recovered.judge() is CostVerdict.WORTH


@pytest.mark.parametrize(("num_tokens", "duration"), [(0, 1.0), (-1, 1.0), (10, -1.0)])
def test_what_brought_nothing_says_nothing(num_tokens: int, duration: float) -> None:
    model = new_model()
    model.note_read(num_tokens, duration)
    model.note_prefill(num_tokens, duration)
    assert model.read_seconds_per_token is None
    assert model.compute_seconds_per_token is None


def read_of(*runs: tuple[PageOutcome, int], duration: float) -> PagesResult:
    return PagesResult(
        operation_id=OperationId(1),
        generation=0,
        phase=Phase.RUNNING,
        num_good=0,
        outcomes=runs,
        num_bytes=0,
        seconds=duration,
    )


def test_reads_are_measured_by_the_pages_that_came() -> None:
    model = new_model()
    model.note_pages(read_of((PageOutcome.OK, 2), (PageOutcome.MISS, 5), duration=0.5))
    assert model.read_seconds_per_token == 0.5 / (2 * 16)
    model.note_pages(read_of((PageOutcome.FAILED, 5), duration=100.0))
    assert model.read_seconds_per_token == 0.5 / (2 * 16)


def test_a_hit_is_read_unless_it_is_not_worth_it() -> None:
    slow, fast = model(read=2.0, compute=1.0), model(read=1.0, compute=2.0)
    assert (slow.admits_read(), fast.admits_read()) == (False, True)
    assert slow.verdicts == {CostVerdict.NOT_WORTH: 1}
    assert fast.verdicts == {CostVerdict.WORTH: 1}


def test_a_model_that_is_off_judges_nothing() -> None:
    off = new_model(enabled=False)
    off.note_read(1, 2.0)
    off.note_prefill(1, 1.0)
    assert off.admits_read()
    assert not off.verdicts


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=4))
def test_ranks_that_measure_differently_judge_alike_by_the_slowest_of_them(
    measured: list[tuple[float, float]],
) -> None:
    models = [model(read=read, compute=compute) for read, compute in measured]
    agreed = [min(costs) for costs in zip(*(one.measured() for one in models), strict=True)]
    for one in models:
        one.take_agreed(agreed)
    slowest = model(
        read=max(read for read, _ in measured), compute=max(compute for _, compute in measured)
    )
    assert {one.judge() for one in models} == {slowest.judge()}


def test_while_one_rank_has_measured_nothing_every_rank_reads() -> None:
    slow, new = model(read=2.0, compute=1.0), new_model()
    slow.take_agreed([min(costs) for costs in zip(slow.measured(), new.measured(), strict=True)])
    assert slow.judge() is CostVerdict.UNKNOWN
