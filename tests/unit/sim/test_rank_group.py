"""Ranks in one process: one runs at a time, and they meet where they agree."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from hicache.errors import InvariantViolation, RanksLostError
from hicache.sim.rank_group import RankMember, SimulatedRankGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Group:
    """A group whose ranks all do the same, and what it has waited for."""

    def __init__(self, size: int) -> None:
        self.waits = 0
        self.group = SimulatedRankGroup(size, wait_for_lost=self.wait)

    def wait(self) -> None:
        self.waits += 1

    def each(self, do: Callable[[RankMember], object]) -> list[object]:
        live = [self.group.members[rank] for rank in self.group.live]
        return list(self.group.run({one.rank: partial(do, one) for one in live}).values())


@pytest.fixture
def three() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.group.close()


def agree_on(values: Sequence[Sequence[int]]) -> Callable[[RankMember], list[int]]:
    return lambda member: list(member.agree(values[member.rank]))


def test_every_rank_gets_the_minimum_of_each_value(three: Group) -> None:
    agreed = three.each(agree_on([[1, 9, 5], [2, 8, 5], [3, 7, 5]]))
    assert agreed == [[1, 7, 5]] * 3
    assert three.each(agree_on([[4]] * 3)) == [[4]] * 3
    assert three.group.num_agreements == 2


def test_ranks_go_on_in_order_between_any_two_agreements(three: Group) -> None:
    log: list[tuple[int, int]] = []

    def work(member: RankMember) -> None:
        for part in range(3):
            log.append((part, member.rank))
            member.agree([part])

    three.each(work)
    assert log == [(part, rank) for part in range(3) for rank in range(3)]


def test_a_rank_always_runs_in_a_thread_of_its_own(three: Group) -> None:
    first, second = (three.each(lambda _: threading.get_ident()) for _ in range(2))
    assert first == second
    assert len({*first, threading.get_ident()}) == 4


def test_one_rank_alone_runs_in_the_thread_of_the_caller() -> None:
    alone = Group(1)
    assert alone.each(lambda _: threading.get_ident()) == [threading.get_ident()]
    assert alone.each(agree_on([[3, 4]])) == [[3, 4]]


def test_a_rank_that_ends_without_the_others_is_found(three: Group) -> None:
    def work(member: RankMember) -> None:
        if member.rank != 1:
            member.agree([0])

    with pytest.raises(InvariantViolation, match="rank 1 goes on without the agreement"):
        three.each(work)


def test_unequal_numbers_of_values_are_found_whatever_a_rank_makes_of_it(three: Group) -> None:
    def work(member: RankMember) -> None:
        try:
            member.agree([0] * (1 + member.rank // 2))
        except InvariantViolation:
            return

    with pytest.raises(InvariantViolation, match="rank 0 agrees on 1 values and rank 2 on 2"):
        three.each(work)


def test_what_the_engine_asks_is_no_agreement_of_the_cache(three: Group) -> None:
    assert three.each(lambda member: member.everywhere(True)) == [True] * 3
    assert three.each(lambda member: member.everywhere(member.rank != 2)) == [False] * 3
    assert three.group.num_agreements == 0

    def work(member: RankMember) -> None:
        if member.rank:
            member.agree([1])
        else:
            member.everywhere(True)

    with pytest.raises(InvariantViolation, match="agree on different things"):
        three.each(work)


def test_a_killed_rank_is_waited_for_once_and_then_nothing_is_agreed(three: Group) -> None:
    three.group.kill(1)
    assert three.each(lambda member: member.everywhere(True)) == [False, False]

    def work(member: RankMember) -> str:
        try:
            member.agree([1])
        except RanksLostError:
            return "lost"
        return "agreed"

    assert three.each(work) == ["lost", "lost"]
    assert three.each(work) == ["lost", "lost"]
    assert three.waits == 1
    assert three.each(lambda member: member.everywhere(True)) == [True, True]


def test_a_rank_that_comes_too_late_costs_all_of_them_their_agreements(three: Group) -> None:
    three.group.cut()
    with pytest.raises(RanksLostError):
        three.each(agree_on([[1]] * 3))
    assert three.group.is_broken
    assert three.group.live == [0, 1, 2]


def test_what_a_rank_raises_comes_out_when_all_have_ended(three: Group) -> None:
    ended: list[int] = []

    def work(member: RankMember) -> None:
        member.agree([0])
        if member.rank == 0:
            raise ValueError("broken")
        ended.append(member.rank)

    with pytest.raises(ValueError, match="broken"):
        three.each(work)
    assert ended == [1, 2]
    assert three.each(agree_on([[1]] * 3)) == [[1]] * 3


def test_no_thread_is_left_after_the_end() -> None:
    before = threading.active_count()
    group = Group(4)
    group.each(agree_on([[1]] * 4))
    group.group.close()
    assert threading.active_count() == before
