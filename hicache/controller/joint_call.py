"""What every rank does at the same time, and some of them for longer than others."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, TypeVar

from hicache.controller.lone_call import LoneCall
from hicache.errors import RanksDivergedError, RanksLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.controller.rank_meeting import Call, RankMeeting

__all__ = ["meet_until_done"]

_T = TypeVar("_T")

_ROUND_SECONDS: Final = 1.0
"""Shorter than ranks wait for each other."""


def meet_until_done(
    meeting: RankMeeting,
    call: Call,
    work: Callable[[], _T],
    word: Callable[[_T], int],
    *,
    more: Sequence[int] = (),
) -> tuple[_T, Sequence[int]]:
    """Do some work, and meet the other ranks until every one of them has done its own.

    One whose store takes long to open would be taken for lost if it came late. So a rank that has
    not done its work meets the others every second and says so; there is one agreement when all
    are done within that. Blocks as long as the slowest rank's work.

    Args:
        meeting: with whom.
        call: what for.
        work: has an end; on a thread of its own, while this one waits for it.
        word: what this rank says of what `work` has returned, above 0 if all went well; 0 is said
            when it has raised.
        more: what this rank says besides.

    Returns:
        What `work` has returned, and the minimum over all ranks of the word and of `more`.

    Raises:
        BaseException: what `work` has raised, when all ranks have done theirs.
        RanksLostError, RanksDivergedError: from the meeting, when `work` has ended well.
    """
    if meeting.alone:
        done = work()
        return done, [word(done), *more]
    lone = LoneCall(work, f"hicache-{call.name.lower()}")
    try:
        agreed = _meet(meeting, call, lone, word, more)
    except (RanksLostError, RanksDivergedError):
        lone.returned(threading.TIMEOUT_MAX)
        lone.answer()
        raise
    return lone.answer(), agreed


def _meet(
    meeting: RankMeeting,
    call: Call,
    lone: LoneCall[_T],
    word: Callable[[_T], int],
    more: Sequence[int],
) -> Sequence[int]:
    while True:
        is_done = lone.returned(_ROUND_SECONDS)
        said = word(lone.answer()) if is_done and lone.error is None else 0
        agreed = meeting.agree(call, [int(is_done), said, *more])
        if agreed[0]:
            return agreed[1:]
