"""What each rank does in the tests of `TorchRankGroup`; runs in the ranks' processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache.errors import HiCacheError, RanksLostError
from hicache.ranks.torch_group import MAX_VALUES

if TYPE_CHECKING:
    from hicache.ranks import TorchRankGroup


def minimum(ranks: TorchRankGroup, values: list[int]) -> tuple[int, int, list[int]]:
    return ranks.rank, ranks.size, list(ranks.agree(values))


def many(ranks: TorchRankGroup, count: int) -> list[list[int]]:
    """Agree again and again on numbers that tell which agreement they belong to."""
    return [ranks.agree([number, number + ranks.rank, -number]) for number in range(count)]


def lengths(ranks: TorchRankGroup, length: int) -> str:
    """Agree on vectors of any length, and then on one that is right."""
    try:
        ranks.agree([1] * length)
    except HiCacheError as error:
        outcome = type(error).__name__
    else:
        outcome = "agreed"
    assert list(ranks.agree([7] * MAX_VALUES)) == [7] * MAX_VALUES
    return outcome


def pause(ranks: TorchRankGroup, pause_seconds: float) -> tuple[str, float, float]:
    """Come late; return the outcome, how long it took, and how long the next failure takes."""
    time.sleep(pause_seconds)
    began = time.monotonic()
    try:
        ranks.agree([1])
    except RanksLostError as error:
        outcome = str(error)
    else:
        return "agreed", time.monotonic() - began, 0.0
    ended = time.monotonic()
    for _ in range(3):
        try:
            ranks.agree([1])
        except RanksLostError:
            continue
        return "agreed again", 0.0, 0.0
    return outcome, ended - began, time.monotonic() - ended


def outlive(ranks: TorchRankGroup, victim: int) -> float:
    """Agree for ever; return how long the death of another rank has kept this one waiting."""
    if ranks.rank == victim:
        ranks.agree([0])
        time.sleep(600.0)
    ranks.agree([0])
    began = time.monotonic()
    try:
        ranks.agree([0])
    except RanksLostError:
        return time.monotonic() - began
    raise AssertionError("agreed with the dead")
