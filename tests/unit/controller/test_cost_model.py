"""What the cost model says of reading against computing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.controller.affine_fit import Line
from hicache.controller.cost_model import CostModel, CostVerdict, StorageWait, StoredHit
from hicache.controller.records import CopyResult, PagesResult, Phase
from hicache.types import OperationId, PageOutcome

PAGE = 16
HIT = StoredHit(num_pages=100, num_host_pages=0, first_token=0, num_tokens=100 * PAGE + 1)
WAIT = StorageWait(first_token=0, last_token=100 * PAGE, awaited_from_token=0, waited_seconds=0.0)
seconds = st.floats(1e-6, 10)


def new_model() -> CostModel:
    return CostModel(page_size=PAGE)


def model(*, read: float, compute: float, load: float | None = None) -> CostModel:
    """A model that has measured so many seconds a page."""
    model = new_model()
    model.note_read(100, 100 * read)
    model.note_prefill(100 * PAGE, 100 * compute)
    if load is not None:
        model.note_load(100, 100 * load)
    return model


def pages_to_read(model: CostModel, hit: StoredHit = HIT, *, may_refuse: bool = True) -> int:
    return model.leading_pages_to_read(hit, may_refuse=may_refuse, loads_partly=True)


def test_before_both_are_measured_everything_is_read() -> None:
    reads, computes = new_model(), new_model()
    reads.note_read(10, 1.0)
    computes.note_prefill(10, 1.0)
    for one in (new_model(), reads, computes):
        assert pages_to_read(one) == HIT.num_pages
        assert one.verdicts == {CostVerdict.UNKNOWN: 1}


@settings(deadline=None)
@given(read=seconds, compute=seconds)
def test_what_is_read_faster_than_computed_is_worth_it(read: float, compute: float) -> None:
    one = model(read=read, compute=compute)
    num_pages = pages_to_read(one)
    if read < 0.999 * compute:
        assert one.verdicts == {CostVerdict.WORTH: 1}
        assert num_pages == HIT.num_pages
    elif compute < 0.999 * read:
        assert one.verdicts == {CostVerdict.NOT_WORTH: 1}
        assert num_pages == 0


def test_what_storage_reads_before_is_waited_for_too() -> None:
    one = model(read=1.0, compute=2.0)
    assert pages_to_read(one, dataclasses.replace(HIT, num_pages_ahead=99)) == 100
    assert pages_to_read(one, dataclasses.replace(HIT, num_pages_ahead=101)) == 0


def test_a_hit_is_read_as_far_as_the_link_could_load_it() -> None:
    one = model(read=0.1, compute=1.0, load=1.0)
    assert pages_to_read(one) == 50
    assert one.verdicts == {CostVerdict.PARTLY: 1}
    # Of the 200 pages, 100 are loaded, which are those that the host has already.
    assert pages_to_read(one, dataclasses.replace(HIT, num_host_pages=100)) == 0
    assert one.leading_pages_to_read(HIT, may_refuse=True, loads_partly=False) == 100


def test_what_may_be_left_later_is_read_whatever_it_takes() -> None:
    one = model(read=100.0, compute=1.0)
    assert pages_to_read(one, may_refuse=False) == 100
    assert one.verdicts == {CostVerdict.WORTH: 1}


def test_one_refusal_in_sixteen_reads_a_little_of_several_sizes_to_see_what_a_call_costs() -> None:
    slow = model(read=2.0, compute=1.0)
    hit = dataclasses.replace(HIT, least_pages=4)
    reads = [pages_to_read(slow, hit) for _ in range(16 * 5)]
    assert slow.verdicts == {CostVerdict.PROBE: 5, CostVerdict.NOT_WORTH: 75}
    assert reads[15::16] == [8, 16, 32, 4, 8]
    assert sum(reads) == 8 + 16 + 32 + 4 + 8
    assert pages_to_read(slow, dataclasses.replace(hit, num_pages=3)) == 0


def test_a_store_that_became_fast_is_believed_after_most_of_sixteen_reads() -> None:
    recovered = model(read=100.0, compute=1.0)
    for _ in range(16):
        recovered.note_read(100, 10.0)
    assert pages_to_read(recovered) == 100


@settings(deadline=None)
@given(read=seconds, compute=seconds)
def test_a_request_waits_while_reading_is_shorter_than_computing(
    read: float, compute: float
) -> None:
    one = model(read=read, compute=compute)
    if read < 0.999 * compute:
        assert one.is_worth_waiting(WAIT)
    elif compute < 0.999 * read:
        assert not one.is_worth_waiting(WAIT)


@settings(deadline=None)
@given(read=seconds, compute=seconds, waited=st.floats(0, 1e4))
def test_nobody_waits_for_longer_than_computing_would_have_taken(
    read: float, compute: float, waited: float
) -> None:
    """Also when the estimate is worth nothing, and for what is read to be measured."""
    for one in (model(read=read, compute=compute), new_model()):
        if one.speeds.compute is None:
            one.note_prefill(100 * PAGE, 100 * compute)
        for wait in (WAIT, dataclasses.replace(WAIT, is_probe=True)):
            late = dataclasses.replace(wait, waited_seconds=waited, quiet_seconds=waited)
            if one.is_worth_waiting(late):
                assert waited <= 100 * compute * 1.001


def test_what_has_come_since_counts_for_the_estimate_and_not_for_the_patience() -> None:
    one = model(read=0.9, compute=1.0)
    later = dataclasses.replace(WAIT, first_token=90 * PAGE, waited_seconds=95.0)
    assert one.is_worth_waiting(later)
    assert not one.is_worth_waiting(dataclasses.replace(later, waited_seconds=101.0))
    assert not one.is_worth_waiting(dataclasses.replace(later, awaited_from_token=90 * PAGE))


def test_a_read_that_has_gone_on_for_a_while_is_nearer_its_end() -> None:
    one = model(read=1.2, compute=1.0)
    assert not one.is_worth_waiting(WAIT)
    assert one.is_worth_waiting(dataclasses.replace(WAIT, quiet_seconds=30.0))
    assert not one.is_worth_waiting(
        dataclasses.replace(WAIT, quiet_seconds=30.0, num_pages_ahead=10)
    )


def test_nobody_waits_before_computation_was_measured_and_all_do_before_a_read_was() -> None:
    one = new_model()
    one.note_read(100, 1e-6)
    assert not one.is_worth_waiting(WAIT)
    one = new_model()
    one.note_prefill(PAGE, 1.0)
    assert one.is_worth_waiting(WAIT)


def test_one_useless_wait_in_sixteen_lets_the_read_begin() -> None:
    one = new_model()
    assert [one.begins_useless_read() for _ in range(32)] == ([False] * 15 + [True]) * 2


def test_one_load_in_sixteen_that_is_not_worth_it_brings_a_little_all_the_same() -> None:
    slow = model(read=1.0, compute=1.0, load=1000.0)
    loads = [
        slow.leading_pages_to_load(100, first_token=0, num_tokens=100 * PAGE, least_pages=2)
        for _ in range(16 * 5)
    ]
    assert loads[15::16] == [4, 8, 16, 2, 4]
    assert sum(loads) == 4 + 8 + 16 + 2 + 4


@pytest.mark.parametrize(("count", "duration"), [(0, 1.0), (-1, 1.0), (10, -1.0)])
def test_what_brought_nothing_says_nothing(count: int, duration: float) -> None:
    one = new_model()
    one.note_read(count, duration)
    one.note_load(count, duration)
    one.note_prefill(count, duration)
    assert one.speeds.read is one.speeds.load is one.speeds.compute is None


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
    one = new_model()
    one.note_pages(read_of((PageOutcome.OK, 2), (PageOutcome.MISS, 5), duration=0.5))
    assert one.speeds.read == Line(0.0, 0.25)
    one.note_pages(read_of((PageOutcome.FAILED, 5), duration=100.0))
    assert one.speeds.read == Line(0.0, 0.25)


@pytest.mark.parametrize(("good", "is_timed"), [(True, True), (True, False), (False, True)])
def test_loads_are_measured_where_they_went_well_and_were_timed(good: bool, is_timed: bool) -> None:
    one = new_model()
    one.note_copy(
        CopyResult(
            operation_id=OperationId(1),
            generation=0,
            good=good,
            num_pages=4,
            num_bytes=1,
            seconds=2.0,
            is_timed=is_timed,
        )
    )
    assert one.speeds.load == (Line(0.0, 0.5) if good and is_timed else None)


@settings(deadline=None)
@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4))
def test_ranks_that_measure_differently_judge_alike_by_the_slowest_of_them(
    measured: list[tuple[float, float, float]],
) -> None:
    models = [model(read=read, compute=compute, load=load) for read, compute, load in measured]
    agreed = [min(speeds) for speeds in zip(*(one.measured() for one in models), strict=True)]
    for one in models:
        one.take_agreed(agreed)
    reads, computes, loads = zip(*measured, strict=True)
    slowest = model(read=max(reads), compute=max(computes), load=max(loads))
    answers = {(pages_to_read(one), one.is_worth_waiting(WAIT)) for one in [*models, slowest]}
    assert len(answers) == 1


def test_while_one_rank_has_measured_nothing_every_rank_reads() -> None:
    slow, new = model(read=2.0, compute=1.0), new_model()
    slow.take_agreed([min(costs) for costs in zip(slow.measured(), new.measured(), strict=True)])
    assert pages_to_read(slow) == HIT.num_pages
    assert slow.verdicts == {CostVerdict.UNKNOWN: 1}
