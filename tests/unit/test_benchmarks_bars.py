"""Laws of the design's bars: the row that is farthest decides, and every bar is said once."""

from __future__ import annotations

import io

import pytest

import benchmarks.hash
import benchmarks.tree
from benchmarks.bars import BARS, Asked, bars_of
from benchmarks.catalogue import known_benchmarks
from benchmarks.harness import Bar, Result, run_steps, summarise
from benchmarks.store_transfers import bars_of as bars_of_transfer

NOT_BUILT = {"client", "server"}


def row(median: float, *, peer: str | None = None, **params: str | int) -> Result:
    result = summarise("evict", [median], params=params)
    return result if peer is None else result.beside(peer, [10.0])


def test_the_row_that_is_farthest_from_a_bar_decides() -> None:
    asked = Asked("any", "tree", "evict", Bar(10))
    found = asked.find([row(8), row(12), row(9)])
    assert (found.row, found.num_rows, found.is_met) == (row(12), 3, False)
    assert asked.find([row(8), row(10)]).is_met


def test_a_bar_that_no_row_answers_is_not_met_and_names_none() -> None:
    found = Asked("any", "tree", "match", Bar(10)).find([row(1)])
    assert (found.row, found.num_rows, found.is_met) == (None, 0, False)


def test_a_ratio_asks_only_rows_beside_the_named_systems() -> None:
    asked = Asked("any", "tree", "evict", Bar(2, "ratio"), {}, "sglang-")
    found = asked.find([row(1), row(9, peer="other-1"), row(4, peer="sglang-1-rust")])
    assert (found.num_rows, found.is_met) == (1, True)
    assert not asked.find([row(6, peer="sglang-1-rust")]).is_met
    exact = Asked("any", "tree", "evict", Bar(2, "ratio"), {}, "memcpy")
    assert exact.find([row(9, peer="memcpy-block"), row(4, peer="memcpy")]).is_met


def test_a_parameter_may_be_asked_for_and_be_asked_to_be_absent() -> None:
    alone = Asked("any", "tree", "evict", Bar(10), {"state": "idle", "ranks": None})
    assert alone.concerns(row(1, state="idle"))
    assert not alone.concerns(row(1, state="idle", ranks=2))
    assert not alone.concerns(row(1, state="busy"))


def test_every_bar_is_about_a_benchmark_that_there_is_or_that_is_named_as_missing() -> None:
    assert {asked.benchmark for asked in BARS} <= known_benchmarks().keys() | NOT_BUILT


def test_the_rows_that_carry_bars_carry_those_of_the_design() -> None:
    sizes = benchmarks.tree.Sizes(
        tokens=512 * 4, page_size=4, samples=2, insert_leaves=20, evict_leaves=(20, 40),
        evict_cycles=2,
    )  # fmt: skip
    steps = {
        "tree": benchmarks.tree.steps(quick=True, sizes=sizes),
        "hash": benchmarks.hash.steps(quick=True, sizes=benchmarks.hash.Sizes(samples=2)),
    }
    for benchmark, parts in steps.items():
        quick = [step for step in parts if step.label != "bytes per leaf"]
        for result in run_steps(quick, watch=io.StringIO()):
            asked = bars_of(benchmark, result.name, result.params)
            assert set(result.bars) == set(asked), (result.name, result.params)


@pytest.mark.parametrize(
    "asked",
    [asked for asked in BARS if asked.row in ("read_warm", "read_cold", "write_cold")],
    ids=lambda asked: asked.what,
)
def test_the_bars_of_the_store_are_those_of_its_rows(asked: Asked) -> None:
    assert asked.peer is not None
    page_bytes = asked.params.get("page_bytes", 128 << 10)
    huge_pages = asked.params.get("huge_pages", True)
    assert isinstance(page_bytes, int)
    assert isinstance(huge_pages, bool)
    assert bars_of_transfer(asked.row, asked.peer, page_bytes, huge_pages) == (asked.bar,)
