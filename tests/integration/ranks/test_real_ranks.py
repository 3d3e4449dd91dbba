"""Ranks in processes: equal trees after every step, whatever goes wrong on one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cp_ranks import PAGE_SIZE
from rank_processes import PerRank, RankProcesses
from system_driver import DEVICE_PAGES, HOST_PAGES

from hicache.controller import AttachmentState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cp_scenarios import CpTrail
    from rank_scenarios import Trail

NUM_RANKS = 4
DEADLINE_SECONDS = 1.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(NUM_RANKS, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


def require_equal(trails: Sequence[Trail | CpTrail]) -> None:
    """Assert that the ranks have gone the same way, and met equally often."""
    first = trails[0]
    assert first.digests
    for other in trails[1:]:
        for step, (mine, theirs) in enumerate(zip(first.digests, other.digests, strict=True)):
            assert mine == theirs, f"the trees differ after step {step}"
        assert other.num_agreements == first.num_agreements


@pytest.mark.parametrize(("seed", "size"), [(1, 2), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4)])
def test_trees_are_equal_after_every_step_whatever_goes_wrong(
    ranks: RankProcesses, seed: int, size: int
) -> None:
    trails = ranks.run("rank_scenarios:random_calls", size=size, seed=seed, steps=120)
    require_equal(trails)
    assert len(trails[0].digests) == 120


@pytest.mark.parametrize(("seed", "size"), [(11, 2), (12, 4)])
def test_trees_are_equal_where_one_rank_has_a_page_less(
    ranks: RankProcesses, seed: int, size: int
) -> None:
    trails = ranks.run(
        "rank_scenarios:random_calls",
        size=size,
        seed=seed,
        steps=120,
        device_pages=PerRank((DEVICE_PAGES, DEVICE_PAGES - 1)),
        host_pages=PerRank((HOST_PAGES - 1, HOST_PAGES)),
    )
    require_equal(trails)


def test_a_rank_that_pauses_for_two_seconds_is_waited_for(ranks: RankProcesses) -> None:
    pauses = PerRank((0.0, 2.0, 0.0, 0.0))
    trails = ranks.run("rank_scenarios:random_calls", seed=21, steps=40, pause_seconds=pauses)
    require_equal(trails)


@pytest.mark.parametrize("size", [2, NUM_RANKS])
def test_a_hit_is_what_every_rank_has(ranks: RankProcesses, size: int) -> None:
    missing = PerRank((0, 1))
    trails = ranks.run("rank_scenarios:hit", size=size, missing_pages=missing)
    require_equal(trails)
    assert [trail.answer for trail in trails] == [(12, (0, 3))] * size
    trails = ranks.run("rank_scenarios:hit", size=size, raises=PerRank((False, True)))
    require_equal(trails)
    assert [trail.answer for trail in trails] == [(8, (0, 2))] * size


def test_ranks_that_diverge_find_out_in_the_same_step(ranks: RankProcesses) -> None:
    answers = ranks.run("rank_scenarios:diverge", size=2)
    assert answers[0] == answers[1]
    num_agreements, message = answers[0]
    # At construction, in three steps, and in the one after the insertion.
    assert num_agreements == 5
    assert "what their trees hold" in message


def test_a_store_comes_and_goes_alike_on_all_ranks(ranks: RankProcesses) -> None:
    answers = ranks.run("rank_scenarios:attach_and_detach")
    detached, attached = AttachmentState.DETACHED, AttachmentState.ATTACHED
    expected: list[object] = ["refused", detached, "unequal", detached, attached]
    expected += ["hangs", AttachmentState.DETACHING, detached, attached, 0]
    assert answers == [expected] * NUM_RANKS


@pytest.mark.parametrize(("seed", "size"), [(1, 2), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_ranks_that_share_pages_are_equal_after_every_step_whatever_goes_wrong(
    ranks: RankProcesses, tmp_path: Path, seed: int, size: int
) -> None:
    """Then each finds its own bytes on the host, and after a restart in the store of all."""
    trails: list[CpTrail] = ranks.run(
        "cp_scenarios:random_calls", size=size, seed=seed, steps=100, store=str(tmp_path)
    )
    require_equal(trails)
    assert [trail.answer for trail in trails] == [trails[0].answer] * size


@pytest.mark.parametrize("size", [2, NUM_RANKS])
def test_ranks_that_share_pages_store_each_its_own_and_restore_all(
    ranks: RankProcesses, tmp_path: Path, size: int
) -> None:
    """Prompts of one page, in turn with each rank: the others own nothing of it."""
    trails: list[CpTrail] = ranks.run(
        "cp_scenarios:store_alike", size=size, store=str(tmp_path), num_prompts=8, num_pages=4
    )
    require_equal(trails)
    assert [trail.num_stored for trail in trails] == [8 // size] * size
    assert [trail.answer for trail in trails] == [8 * PAGE_SIZE] * size
    assert [trail.seen for trail in trails] == [["not", "owned"]] * size


def test_a_rank_that_is_silent_for_too_long_is_lost_to_all_in_the_same_step(
    ranks: RankProcesses,
) -> None:
    trails = ranks.run(
        "rank_scenarios:lose_a_rank",
        seed=31,
        steps=40,
        victim=1,
        pause_seconds=3 * DEADLINE_SECONDS,
        deadline_seconds=DEADLINE_SECONDS,
    )
    require_equal(trails)
    assert [trail.answer for trail in trails] == [trails[0].answer] * NUM_RANKS


def test_a_rank_that_is_killed_is_lost_to_the_others_in_the_same_step(
    ranks: RankProcesses,
) -> None:
    """The last test of the module: there is one rank less afterwards."""
    *trails, dead = ranks.run(
        "rank_scenarios:lose_a_rank",
        seed=32,
        steps=40,
        victim=NUM_RANKS - 1,
        deadline_seconds=2 * DEADLINE_SECONDS,
    )
    assert dead is None
    require_equal(trails)
