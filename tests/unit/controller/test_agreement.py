"""An operation has ended when every rank says so, with what is good on all of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from controller_fakes import OtherRank
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.controller import HiCacheAck, PrefetchOperation, StorageOperation
from hicache.controller.agreement import WINDOW, Finished, OperationWindow
from hicache.controller.rank_meeting import LENGTH, Call, RankMeeting
from hicache.controller.records import PagesResult, Phase, QueryResult
from hicache.radix import RadixKey, RadixTree
from hicache.ranks import RankGroup, SingleRank
from hicache.types import OperationId

NOT_YET = -1
PAGES = np.arange(8)


class Operations:
    """What one rank has in flight; ids count up in the order of submission."""

    def __init__(self, ranks: RankGroup) -> None:
        self.meeting = RankMeeting(ranks)
        self.tree = RadixTree(4)
        self.writes: deque[HiCacheAck] = deque()
        self.loads: deque[HiCacheAck] = deque()
        self.prefetches: dict[OperationId, PrefetchOperation] = {}
        self.persists: dict[OperationId, StorageOperation] = {}

    def window(self) -> OperationWindow:
        return OperationWindow(
            writes=self.writes,
            loads=self.loads,
            prefetches=self.prefetches,
            persists=self.persists,
        )

    def collect(self) -> Finished:
        window = self.window()
        return window.finished(self.meeting.agree(Call.STEP, window.values()))

    def copy(self, num_good: int | None) -> HiCacheAck:
        self.writes.append(HiCacheAck(OperationId(len(self.writes)), (), num_good))
        return self.writes[-1]

    def persist(self, num_good: int, *, phase: Phase = Phase.ENDED) -> StorageOperation:
        ticket = self.tree.begin_prefetch(self.tree.root, 8)
        assert ticket is not None
        operation = StorageOperation(OperationId(len(self.persists)), ticket, num_good, phase)
        self.persists[operation.operation_id] = operation
        return operation

    def prefetch(
        self,
        *,
        phase: Phase,
        num_good: int | None = None,
        num_hits: int | None = None,
        terminated: bool = False,
        closed: bool = False,
    ) -> PrefetchOperation:
        """A prefetch that reads when `num_good` is given, and else still asks."""
        ticket = self.tree.begin_prefetch(self.tree.root, 8)
        assert ticket is not None
        operation = PrefetchOperation(
            OperationId(len(self.prefetches)),
            "request",
            ticket,
            self.tree.root,
            RadixKey([]),
            hashes=(),
            parent_hash=b"",
            host_pages=None if num_good is None else PAGES,
            num_good=num_good or 0,
            num_hits=num_hits,
            terminated=terminated,
            closed=closed,
            phase=phase,
        )
        self.prefetches[operation.operation_id] = operation
        return operation


def alone() -> Operations:
    return Operations(SingleRank())


def beside(*others: int) -> Operations:
    """A rank whose peer has `others` as its first values of every kind."""
    window = [*others, *[NOT_YET] * (WINDOW - len(others))]

    def other(mine: list[int]) -> list[int]:
        # What the call is, twice two words, goes before.
        return [*mine[:4], *window * 4, *mine[4 + 4 * WINDOW :]]

    return Operations(OtherRank(other))


def test_one_rank_agrees_with_itself() -> None:
    assert list(SingleRank().agree([3, -1, 0])) == [3, -1, 0]
    operations = alone()
    assert operations.collect() == Finished((), (), [], [], (), [], [])
    assert operations.meeting.num_agreements == 0


@pytest.mark.parametrize("num_operations", [0, 1, WINDOW, WINDOW + 5])
def test_every_step_is_one_agreement_of_the_same_length(num_operations: int) -> None:
    """C066, C068."""
    ranks = OtherRank(lambda mine: mine)
    operations = Operations(ranks)
    for _ in range(num_operations):
        operations.copy(1)
        operations.persist(1)
        operations.prefetch(phase=Phase.RUNNING)
    operations.collect()
    assert ranks.lengths == [LENGTH]


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [(1, 1, [1]), (1, 0, [0]), (0, 1, [0]), (1, NOT_YET, []), (None, 1, [])],
)
def test_a_copy_ends_when_both_ranks_say_so_and_is_good_when_it_is_on_both(
    mine: int | None, other: int, expected: list[int]
) -> None:
    operations = beside(other)
    operations.copy(mine)
    assert [value for _, value in operations.collect().writes] == expected


def test_copies_end_in_the_order_of_their_stream() -> None:
    operations = beside(1, NOT_YET, 1)
    first, *_ = [operations.copy(1) for _ in range(3)]
    assert operations.collect().writes == [(first, 1)]


@pytest.mark.parametrize(
    ("mine", "other", "phase", "expected"),
    [
        (5, 3, Phase.ENDED, [3]),
        (3, 5, Phase.ENDED, [3]),
        (0, 5, Phase.ENDED, [0]),
        (5, NOT_YET, Phase.ENDED, []),
        (5, 5, Phase.RUNNING, []),
        (5, 5, Phase.OVERDUE, []),
    ],
)
def test_a_persist_has_what_is_stored_on_both_ranks_once_both_have_let_go(
    mine: int, other: int, phase: Phase, expected: list[int]
) -> None:
    operations = beside(other)
    operations.persist(mine, phase=phase)
    assert [value for _, value in operations.collect().persists] == expected


def test_storage_operations_end_out_of_order_so_that_one_that_hangs_holds_up_nobody() -> None:
    operations = alone()
    operations.persist(0, phase=Phase.OVERDUE)
    running = operations.prefetch(phase=Phase.RUNNING, num_good=0)
    done = [operations.persist(number) for number in (4, 0, 7)]
    read = operations.prefetch(phase=Phase.ENDED, num_good=2)
    finished = operations.collect()
    assert finished.persists == [(done[0], 4), (done[1], 0), (done[2], 7)]
    assert finished.prefetches == [(read, 2)]
    assert running.operation_id in operations.prefetches


def test_what_lies_beyond_the_window_waits_for_its_turn() -> None:
    operations = alone()
    hung = operations.persist(0, phase=Phase.RUNNING)
    done = [operations.persist(1) for _ in range(WINDOW + 1)]
    finished = [operation for operation, _ in operations.collect().persists]
    assert finished == done[: WINDOW - 1]
    for operation in finished:
        del operations.persists[operation.operation_id]
    assert [operation for operation, _ in operations.collect().persists] == done[WINDOW - 1 :]
    assert hung.operation_id in operations.persists


@pytest.mark.parametrize(
    ("mine", "other", "expected"), [(6, 4, [4]), (4, 6, [4]), (6, NOT_YET, [])]
)
def test_a_hit_in_storage_is_what_both_ranks_find(
    mine: int, other: int, expected: list[int]
) -> None:
    """C069."""
    operations = beside(other)
    operations.prefetch(phase=Phase.ENDED, num_hits=mine)
    finished = operations.collect()
    assert [value for _, value in finished.queries] == expected
    assert (finished.prefetches, finished.released) == ([], [])


def test_a_query_that_was_terminated_ends_with_no_hit_whatever_it_found() -> None:
    operations = alone()
    operations.prefetch(phase=Phase.RUNNING, terminated=True)
    operations.prefetch(phase=Phase.ENDED, num_hits=5, terminated=True)
    assert [value for _, value in operations.collect().queries] == [0, 0]


def test_a_query_past_its_deadline_ends_with_no_hit_because_it_still_runs() -> None:
    operations = alone()
    operation = operations.prefetch(phase=Phase.RUNNING)
    answer = QueryResult(
        operation_id=operation.operation_id,
        generation=0,
        phase=Phase.OVERDUE,
        num_pages=5,
        seconds=0.0,
    )
    operation.take(answer)
    assert operations.collect().queries == [(operation, 0)]


@pytest.mark.parametrize(
    ("phase", "terminated", "ends"),
    [
        (Phase.RUNNING, False, False),
        (Phase.RUNNING, True, True),
        (Phase.OVERDUE, False, True),
        (Phase.ENDED, False, True),
    ],
)
def test_a_prefetch_ends_by_itself_or_by_a_mark_with_what_has_arrived_on_both_ranks(
    phase: Phase, terminated: bool, ends: bool
) -> None:
    operations = beside(2)
    operation = operations.prefetch(phase=phase, num_good=3, terminated=terminated)
    finished = operations.collect()
    assert finished.prefetches == ([(operation, 2)] if ends else [])
    assert finished.queries == []


@pytest.mark.parametrize(
    ("phase", "other", "released"),
    [
        (Phase.RUNNING, 0, False),
        (Phase.OVERDUE, 0, False),
        (Phase.ENDED, NOT_YET, False),
        (Phase.ENDED, 0, True),
    ],
)
def test_memory_of_a_closed_prefetch_is_released_when_nobody_uses_it_on_either_rank(
    phase: Phase, other: int, released: bool
) -> None:
    operations = beside(other)
    operation = operations.prefetch(phase=phase, num_good=3, terminated=True, closed=True)
    finished = operations.collect()
    assert finished.released == ([operation] if released else [])
    assert (finished.queries, finished.prefetches) == ([], [])


def test_pages_that_arrive_after_the_end_are_not_counted() -> None:
    operations = alone()
    operation = operations.prefetch(phase=Phase.RUNNING, num_good=1, terminated=True)
    assert operations.collect().prefetches == [(operation, 1)]
    operation.closed = True
    late = PagesResult(
        operation_id=operation.operation_id,
        generation=0,
        phase=Phase.ENDED,
        num_good=3,
        outcomes=(),
        num_bytes=0,
        seconds=0.0,
    )
    operation.take(late)
    assert operations.collect() == Finished(
        queries=[],
        prefetches=[],
        released=[operation],
        arriving=[],
    )


def test_a_prefetch_under_way_tells_how_far_it_is_on_every_rank_when_it_has_gone_on() -> None:
    operations = alone()
    operations.prefetch(phase=Phase.RUNNING)
    reading = operations.prefetch(phase=Phase.RUNNING, num_good=3)
    operations.prefetch(phase=Phase.RUNNING, num_good=3, terminated=True)
    operations.prefetch(phase=Phase.ENDED, num_good=5)
    assert operations.collect().arriving == [(reading, 3)]
    reading.num_arrived = 3
    assert operations.collect().arriving == []
    reading.num_good = 4
    assert operations.collect().arriving == [(reading, 4)]


@pytest.mark.parametrize("slower", [1, 2])
def test_the_slowest_rank_says_how_far_a_prefetch_is(slower: int) -> None:
    behind = alone()
    behind.prefetch(phase=Phase.RUNNING, num_good=slower)
    told = behind.window().values()
    operations = Operations(OtherRank(lambda mine: [*mine[:4], *told, *mine[4 + len(told) :]]))
    operation = operations.prefetch(phase=Phase.RUNNING, num_good=3)
    assert operations.collect().arriving == [(operation, slower)]


def test_a_prefetch_that_has_ended_on_one_rank_alone_is_as_far_as_on_the_others() -> None:
    told = alone()
    told.prefetch(phase=Phase.RUNNING, num_good=1)
    others = told.window().values()
    operations = Operations(OtherRank(lambda mine: [*mine[:4], *others, *mine[4 + len(others) :]]))
    operation = operations.prefetch(phase=Phase.ENDED, num_good=5)
    finished = operations.collect()
    assert (finished.prefetches, finished.arriving) == ([], [(operation, 1)])


queries_and_reads = st.fixed_dictionaries(
    {
        "phase": st.sampled_from(Phase),
        "num_good": st.none() | st.integers(0, 8),
        "num_hits": st.none() | st.integers(0, 8),
        "terminated": st.booleans(),
        "closed": st.booleans(),
    }
)


@settings(deadline=None)
@given(
    copies=st.lists(st.none() | st.integers(0, 1), max_size=5),
    prefetches=st.lists(queries_and_reads, max_size=WINDOW + 2),
    persists=st.lists(st.tuples(st.integers(0, 8), st.sampled_from(Phase)), max_size=5),
)
def test_a_rank_alone_finds_what_it_would_agree_on_with_its_like(
    copies: list[int | None],
    prefetches: list[dict[str, Any]],
    persists: list[tuple[int, Phase]],
) -> None:
    operations = Operations(OtherRank(lambda mine: mine))
    for num_good in copies:
        operations.copy(num_good)
    for states in prefetches:
        operations.prefetch(**states)
    for stored, phase in persists:
        operations.persist(stored, phase=phase)
    assert operations.window().finished_alone() == operations.collect()
