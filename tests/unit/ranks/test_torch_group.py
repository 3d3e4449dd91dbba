"""Ranks in processes agree on the minimum in one collective of constant size, or not at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from rank_processes import PerRank, RankProcesses

from hicache.errors import ConfigError
from hicache.ranks import TorchRankGroup
from hicache.ranks.torch_group import MAX_VALUES

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = 2**62
DEADLINE_SECONDS = 0.5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


def test_without_a_process_group_there_is_nobody_to_agree_with() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        TorchRankGroup()


@pytest.mark.parametrize("timeout_seconds", [0, -1.0])
def test_a_deadline_is_above_zero(timeout_seconds: float) -> None:
    with pytest.raises(ConfigError, match="timeout_seconds"):
        TorchRankGroup(timeout_seconds=timeout_seconds)


def test_every_rank_gets_the_minimum_of_each_value(ranks: RankProcesses) -> None:
    values = PerRank([[3, -5, LARGE, -LARGE, 0], [1, 0, LARGE - 1, LARGE, 0]])
    expected = [1, -5, LARGE - 1, -LARGE, 0]
    answers = ranks.run("group_scenarios:minimum", values=values)
    assert answers == [(0, 2, expected), (1, 2, expected)]
    assert ranks.run("group_scenarios:minimum", values=[]) == [(0, 2, []), (1, 2, [])]


def test_agreements_do_not_mix(ranks: RankProcesses) -> None:
    expected = [[number, number, -number] for number in range(300)]
    assert ranks.run("group_scenarios:many", count=300) == [expected, expected]


@pytest.mark.parametrize(
    ("lengths", "outcome"),
    [
        ((3, 4), "RanksDivergedError"),
        ((0, MAX_VALUES), "RanksDivergedError"),
        ((MAX_VALUES, MAX_VALUES + 1), "RanksDivergedError"),
        ((MAX_VALUES + 1, MAX_VALUES + 1), "ConfigError"),
        ((MAX_VALUES, MAX_VALUES), "agreed"),
    ],
)
def test_unequal_lengths_are_an_error_on_all_and_never_an_unequal_collective(
    ranks: RankProcesses, lengths: tuple[int, int], outcome: str
) -> None:
    """C068: and the next agreement of the same group is right."""
    answers = ranks.run("group_scenarios:lengths", length=PerRank(lengths))
    assert answers == [outcome, outcome]


def test_a_pause_within_the_deadline_is_waited_for(ranks: RankProcesses) -> None:
    answers = ranks.run("group_scenarios:pause", pause_seconds=PerRank((0.0, 0.3)))
    assert [outcome for outcome, *_ in answers] == ["agreed", "agreed"]


def test_a_rank_that_is_silent_for_too_long_is_lost_to_all_and_for_good(
    ranks: RankProcesses,
) -> None:
    answers = ranks.run(
        "group_scenarios:pause",
        pause_seconds=PerRank((0.0, 3 * DEADLINE_SECONDS)),
        deadline_seconds=DEADLINE_SECONDS,
    )
    for outcome, waited_seconds, again_seconds in answers:
        assert "has died or been silent for 0.5 s" in outcome
        assert waited_seconds < 3 * DEADLINE_SECONDS
        assert again_seconds < DEADLINE_SECONDS


def test_a_rank_that_is_killed_is_lost_within_the_deadline(ranks: RankProcesses) -> None:
    """The last test of the module: there is one rank less afterwards."""
    began = time.monotonic()
    ranks.begin("group_scenarios:outlive", victim=1, deadline_seconds=5.0)
    time.sleep(0.5)
    ranks.kill(1)
    waited_seconds, _ = ranks.answers()
    assert waited_seconds <= 5.5
    assert time.monotonic() - began < 30.0
