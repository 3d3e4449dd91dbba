"""An engine over several processes answers as the same processes do without a cache.

The ranks of a scenario are processes over gloo. They have equal trees after every turn, find the
same tokens in the same tiers, meet once in every step, and leave nothing behind.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from pairwise import pairwise
from spread_ranks import SpreadRanks
from spread_scenarios import Scenario

from hicache.layout import HostLayout
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spread_scenarios import Served

WRITE_POLICIES = [policy.value for policy in WritePolicy]
PREFETCH_POLICIES = [policy.value for policy in PrefetchPolicy]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadRanks]:
    ranks = SpreadRanks(tmp_path_factory.mktemp("two"), 2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadRanks]:
    ranks = SpreadRanks(tmp_path_factory.mktemp("four"), 4)
    yield ranks
    ranks.close()


def serve(ranks: SpreadRanks, scenario: Scenario) -> Served:
    """Serve, verify what holds for every scenario, and return what all ranks have said."""
    first, *others = ranks.serve(scenario)
    for other in others:
        assert other.trees == first.trees
        assert other.hits == first.hits
        assert other.scheduling == first.scheduling
        assert other.answers == first.answers
        assert (other.num_steps, other.num_agreements) == (first.num_steps, first.num_agreements)
    assert [one.faults for one in (first, *others)] == [[]] * scenario.num_ranks
    assert first.answers == first.plain_answers
    assert all(len(answer) == 8 for answer in first.answers)
    assert first.num_agreements == (first.num_steps if others else 0)
    return first


def hits_of(served: Served) -> dict[str, int]:
    device, host, storage = (sum(column) for column in zip(*served.hits, strict=True))
    return {"device": device, "host": host, "storage": storage}


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_every_write_policy_with_every_prefetch_policy(
    write_policy: str, prefetch_policy: str, two_ranks: SpreadRanks, tmp_path: Path
) -> None:
    """And a second engine finds in storage what the first has brought there."""
    scenario = Scenario(
        name=f"{write_policy}-{prefetch_policy}",
        write_policy=write_policy,
        prefetch_policy=prefetch_policy,
        storage=str(tmp_path),
    )
    served = serve(two_ranks, scenario)
    assert hits_of(served)["device"] > 0
    again = dataclasses.replace(scenario, name=f"{scenario.name}-again", alone=True, num_turns=1)
    assert hits_of(serve(two_ranks, again))["storage"] > 0


@pytest.mark.parametrize("ways", [(2, 1), (2, 2)], ids=str)
def test_what_is_fetched_for_one_is_waited_for_by_others_on_all_ranks_alike(
    ways: tuple[int, int], two_ranks: SpreadRanks, four_ranks: SpreadRanks, tmp_path: Path
) -> None:
    tp_size, pp_size = ways
    ranks = two_ranks if tp_size * pp_size <= 2 else four_ranks
    scenario = Scenario(
        name="fetched once", tp_size=tp_size, pp_size=pp_size, storage=str(tmp_path), num_turns=1
    )
    serve(ranks, scenario)
    served = serve(ranks, dataclasses.replace(scenario, name="fetched once, again", num_aborts=4))
    # All begin with the same 70 tokens; four pages of them are whole.
    assert sum(delayed for _, delayed in served.scheduling[:-1]) >= 64


def table() -> list[Scenario]:
    """Return the other options: every two of them are together somewhere, on two and four ranks."""
    rows = pairwise(
        {
            "ranks": [(2, 1), (1, 2), (2, 2)],
            "attention": ["mha", "mla"],
            "layout": [layout.value for layout in HostLayout if layout is not HostLayout.PAGE_HEAD],
            "stored": [True, False],
            "num_aborts": [0, 8],
            # Ranks of unequal pools: what one has more than the others stays unused.
            "device_tokens": [(448,), (448, 432, 480, 448), (288, 304)],
            "host_ratios": [(1.25,), (1.3, 0.7, 2.0, 1.0)],
            "write_policy": WRITE_POLICIES,
            "prefetch_policy": PREFETCH_POLICIES,
        }
    )
    scenarios = []
    for number, row in enumerate(rows):
        tp_size, pp_size = row.pop("ranks")
        storage = "" if row.pop("stored") else None
        name = f"row {number}"
        scenarios.append(
            Scenario(name=name, tp_size=tp_size, pp_size=pp_size, storage=storage, **row)
        )
    return scenarios


@pytest.mark.parametrize("scenario", table(), ids=str)
def test_other_options_and_memory_that_differs_by_rank(
    scenario: Scenario, two_ranks: SpreadRanks, four_ranks: SpreadRanks, tmp_path: Path
) -> None:
    if scenario.storage is not None:
        scenario = dataclasses.replace(scenario, storage=str(tmp_path))
    serve(two_ranks if scenario.num_ranks == 2 else four_ranks, scenario)


@pytest.mark.parametrize("ways", [(2, 1), (2, 2)], ids=str)
def test_a_storm_of_aborts_leaves_equal_trees_and_nothing_behind(
    ways: tuple[int, int], two_ranks: SpreadRanks, four_ranks: SpreadRanks, tmp_path: Path
) -> None:
    tp_size, pp_size = ways
    ranks = two_ranks if tp_size * pp_size <= 2 else four_ranks
    scenario = Scenario(
        name="storm", tp_size=tp_size, pp_size=pp_size, storage=str(tmp_path), num_aborts=30, seed=2
    )
    serve(ranks, scenario)


@pytest.mark.parametrize("ways", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("fault", ["late", "failing"])
def test_copies_that_are_late_or_fail_on_one_rank_change_no_answer(
    ways: tuple[int, int], fault: str, two_ranks: SpreadRanks
) -> None:
    """A load that has failed on one rank is computed instead on all."""
    tp_size, pp_size = ways
    scenario = Scenario(
        name=fault, tp_size=tp_size, pp_size=pp_size, fault=fault, device_tokens=(320,), num_turns=3
    )
    served = serve(two_ranks, scenario)
    assert served.moved["load"] > 0
    assert (served.failed_loads > 0) == (fault == "failing")


@pytest.mark.parametrize("ways", [(2, 1), (2, 2)], ids=str)
def test_a_store_comes_and_goes_while_the_engine_is_idle(
    ways: tuple[int, int], two_ranks: SpreadRanks, four_ranks: SpreadRanks, tmp_path: Path
) -> None:
    tp_size, pp_size = ways
    ranks = two_ranks if tp_size * pp_size <= 2 else four_ranks
    scenario = Scenario(
        name="comes and goes",
        tp_size=tp_size,
        pp_size=pp_size,
        storage=str(tmp_path),
        runtime=("", "attach", "detach", "attach", "attach"),
        num_turns=5,
        device_tokens=(320,),
    )
    served = serve(ranks, scenario)
    assert served.moved["persist"] > 0
    assert served.moved["prefetch"] > 0
    by_turn = [served.hits[first : first + 4] for first in range(0, 20, 4)]
    stored = [sum(storage for _, _, storage in turn) for turn in by_turn]
    assert stored[0] == stored[2] == 0


@pytest.mark.parametrize(
    ("draft", "ways", "page_size"),
    [
        ("small", (1, 1), 16),
        ("same", (1, 1), 1),
        ("small", (2, 1), 4),
        ("same", (2, 1), 16),
        ("same", (1, 2), 1),
        ("small", (2, 2), 16),
    ],
    ids=str,
)
def test_a_draft_models_kv_moves_with_the_kv_and_its_guesses_change_no_answer(
    draft: str,
    ways: tuple[int, int],
    page_size: int,
    two_ranks: SpreadRanks,
    four_ranks: SpreadRanks,
    tmp_path: Path,
) -> None:
    tp_size, pp_size = ways
    ranks = two_ranks if tp_size * pp_size <= 2 else four_ranks
    scenario = Scenario(
        name=f"draft {draft} {tp_size}",
        tp_size=tp_size,
        pp_size=pp_size,
        draft=draft,
        page_size=page_size,
        storage=str(tmp_path),
        num_turns=3,
        num_aborts=4,
        device_tokens=(320,),
    )
    served = serve(ranks, scenario)
    assert all(served.moved.values()), served.moved
    again = dataclasses.replace(scenario, name=f"{scenario.name} again", alone=True, num_turns=1)
    assert hits_of(serve(ranks, again))["storage"] > 0


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=str)
def test_ranks_of_one_number_read_by_head_what_another_number_has_stored(
    sizes: tuple[int, int], two_ranks: SpreadRanks, tmp_path: Path
) -> None:
    before, after = (
        Scenario(
            name=f"{number} of {sizes}",
            tp_size=tp_size,
            layout="page_head",
            storage=str(tmp_path),
            alone=True,
            num_turns=1,
        )
        for number, tp_size in enumerate(sizes)
    )
    assert hits_of(serve(two_ranks, before))["storage"] == 0
    found = serve(two_ranks, after)
    # All but the last token of each prompt is asked for, and there in full pages.
    assert [sum(tiers) for tiers in found.hits] == [128] * 4
    assert hits_of(found)["storage"] > 4 * 48
