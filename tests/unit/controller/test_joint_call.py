"""Ranks whose stores take longer than others are waited for, and not taken for lost."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

import pytest
from controller_fakes import GUARD_SECONDS, TwoRanks

from hicache.controller import joint_call
from hicache.controller.joint_call import meet_until_done
from hicache.controller.rank_meeting import Call, RankMeeting
from hicache.errors import RanksLostError
from hicache.ranks import SingleRank

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_SECONDS = 1.0
"""How long ranks wait for each other here."""

LONG_SECONDS = 2 * PATIENCE_SECONDS


class Failure(Exception):
    pass


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_call, "_ROUND_SECONDS", PATIENCE_SECONDS / 20)


def do_together(*works: Callable[[], int]) -> tuple[list[object], int]:
    """Let each rank do its work; return what came of it on each, and how often they met."""
    group = TwoRanks(PATIENCE_SECONDS)
    meetings = [RankMeeting(group) for _ in works]

    def run(rank: int) -> object:
        try:
            return meet_until_done(
                meetings[rank], Call.ATTACH, works[rank], lambda value: 10 * value, more=[7, rank]
            )
        except Failure as error:
            return error

    with ThreadPoolExecutor(len(works)) as threads:
        answers = list(threads.map(run, range(len(works)), timeout=GUARD_SECONDS))
    assert len({meeting.num_agreements for meeting in meetings}) == 1
    return answers, meetings[0].num_agreements


def after(seconds: float, value: int) -> Callable[[], int]:
    def work() -> int:
        time.sleep(seconds)
        return value

    return work


def test_ranks_that_are_done_at_once_meet_once() -> None:
    answers, num_agreements = do_together(after(0, 3), after(0, 2))
    assert answers == [(3, [20, 7, 0]), (2, [20, 7, 0])]
    assert num_agreements == 1


@pytest.mark.parametrize("seconds", [(LONG_SECONDS, 0), (0, LONG_SECONDS), (LONG_SECONDS, 0.3)])
def test_a_rank_that_takes_longer_than_ranks_wait_is_not_lost(seconds: tuple[float, float]) -> None:
    answers, num_agreements = do_together(after(seconds[0], 3), after(seconds[1], 2))
    assert answers == [(3, [20, 7, 0]), (2, [20, 7, 0])]
    assert num_agreements > 2


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_what_fails_is_raised_where_it_failed_when_all_are_done(seconds: float) -> None:
    def fail() -> NoReturn:
        time.sleep(seconds)
        raise Failure

    answers, _ = do_together(fail, after(0.2, 2))
    assert isinstance(answers[0], Failure)
    assert answers[1] == (2, [0, 7, 0])


@pytest.mark.parametrize(("fails", "kind"), [(False, RanksLostError), (True, Failure)])
def test_when_a_rank_is_lost_the_work_of_the_others_has_ended_before_that_is_raised(
    fails: bool, kind: type[Exception]
) -> None:
    """Whoever undoes the work must not come before its end."""
    ended = threading.Event()

    def work() -> int:
        time.sleep(PATIENCE_SECONDS + 1.0)
        ended.set()
        if fails:
            raise Failure
        return 1

    with pytest.raises(kind):
        meet_until_done(RankMeeting(TwoRanks(PATIENCE_SECONDS)), Call.ATTACH, work, int)
    assert ended.is_set()


def test_a_rank_that_is_alone_works_on_its_own_thread() -> None:
    meeting = RankMeeting(SingleRank())
    thread, agreed = meet_until_done(meeting, Call.CLEAR, threading.get_ident, lambda _: 4)
    assert thread == threading.get_ident()
    assert agreed == [4]
    assert meeting.num_agreements == 0
