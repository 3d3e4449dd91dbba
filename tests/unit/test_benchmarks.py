"""Laws of the benchmark suite: its JSON, its bars, and that wrong work is found out."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import benchmarks.hash
import benchmarks.tree
from benchmarks.__main__ import main, report
from benchmarks.catalogue import known_benchmarks
from benchmarks.harness import (
    Bar,
    CheckFailed,
    Result,
    Step,
    alternate,
    check,
    run_steps,
    summarise,
)
from benchmarks.table import Run, format_table
from hicache.engine.machine import machine_facts
from hicache.hashing import hash_pages
from hicache.radix import LruPolicy, MatchResult, RadixKey, RadixNode, RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Literal

    from hicache.radix import InsertResult
    from hicache.types import IntArray, PageHash

    Better = Literal["lower", "higher"]

RUN_KEYS = [
    "benchmark", "command", "noise", "quick", "date", "commit", "machine", "results",
]  # fmt: skip
RESULT_KEYS = [
    "name", "params", "unit", "better", "median", "p99", "samples",
    "peer", "peer_median", "ratio", "bars",
]  # fmt: skip
TREE_SIZES = benchmarks.tree.Sizes(
    tokens=64,
    page_size=4,
    samples=5,
    insert_leaves=20,
    evict_leaves=(20, 40),
    evict_cycles=60,
    memory_leaves=3000,
)
HASH_SIZES = benchmarks.hash.Sizes(tokens=64, page_size=4, samples=5)
DEVICE_RESULT = summarise("copy", [4.0, 1.0, 2.0], params={}, unit="GB/s", better="higher")


def read_results(path: Path, benchmark: str) -> list[dict[str, Any]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert list(document) == RUN_KEYS
    assert document["benchmark"] == benchmark
    assert document["machine"].keys() == machine_facts().keys()
    results: list[dict[str, Any]] = document["results"]
    for result in results:
        assert list(result) == RESULT_KEYS
        assert 0 < result["median"] <= result["p99"]
        assert [result[key] for key in ("peer", "peer_median", "ratio")] == [None] * 3
    return results


# -- the benchmarks -------------------------------------------------------------------------------


def test_tree_does_its_work_right_and_reports_every_figure_in_the_fixed_form(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tree.json"
    assert report("tree", benchmarks.tree.steps(quick=True, sizes=TREE_SIZES), json_path=path) == 0
    results = read_results(path, "tree")
    matches = {
        (result["params"]["nodes"], result["params"]["answer"], result["params"]["start"])
        for result in results
        if result["name"] == "match"
    }
    assert matches == {
        (n, a, s) for n in (1, 16) for a in ("pages", "slots") for s in ("key", "list")
    }
    evicts = [result for result in results if result["name"] == "evict"]
    assert [result["params"] for result in evicts] == [
        {"leaves": leaves, "page_size": 4, "shared_parent": shared}
        for shared in (False, True)
        for leaves in (20, 40)
    ]
    assert {result["samples"] for result in evicts} == {60}
    names = {"match", "lock_unlock", "insert", "evict", "evict_cycle", "evict_flatness"}
    assert {result["name"] for result in results} == names | {"bytes_per_leaf"}


def test_an_eviction_takes_a_part_of_its_cycle(tmp_path: Path) -> None:
    steps = benchmarks.tree.steps(quick=True, sizes=TREE_SIZES)
    (step,) = [step for step in steps if step.label == "evict from 40 leaves apart"]
    evict, cycle = step.run()
    assert evict.median < cycle.median


class WrongPage(RadixTree):
    def match(self, key: RadixKey) -> MatchResult:
        found = super().match(key)
        return found._replace(device_chunks=[pages + 1 for pages in found.device_chunks])


class ForgetfulUnlock(RadixTree):
    def unlock(self, node: RadixNode) -> None:
        pass


class MiscountingInsert(RadixTree):
    def insert(
        self, key: RadixKey, device_pages: IntArray, *, count_from_page: int = 0
    ) -> InsertResult:
        self.residency.num_host_pages += 1
        return super().insert(key, device_pages, count_from_page=count_from_page)


class NewestFirst(LruPolicy):
    def pop(self) -> RadixNode | None:
        newest = max(self, key=lambda node: node.last_access, default=None)
        if newest is not None:
            self.discard(newest)
        return newest


@pytest.mark.parametrize(
    ("label", "create_tree", "complaint"),
    [
        ("match 1 nodes", WrongPage, "other pages than were inserted"),
        ("match 16 nodes", MiscountingInsert, "contradicts itself: residency.num_host_pages"),
        ("lock 16 nodes", ForgetfulUnlock, "leaves pages protected"),
        ("insert", WrongPage, "match of page 20, just new, gives"),
        ("insert", MiscountingInsert, "contradicts itself"),
        (
            "evict from 20 leaves apart",
            lambda page_size: RadixTree(page_size, create_policy=NewestFirst),
            "page 20, just new, gives",
        ),
        ("evict from 40 leaves below one parent", WrongPage, "match of page"),
        ("evict from 40 leaves below one parent", ForgetfulUnlock, "evict freed"),
    ],
)
def test_a_tree_that_is_wrong_fails_the_check(
    label: str, create_tree: Callable[[int], RadixTree], complaint: str
) -> None:
    steps = benchmarks.tree.steps(quick=True, sizes=TREE_SIZES, create_tree=create_tree)
    (step,) = [step for step in steps if step.label == label]
    with pytest.raises(CheckFailed, match=complaint):
        step.run()


def test_hash_does_its_work_right_and_reports_every_figure_in_the_fixed_form(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hash.json"
    assert report("hash", benchmarks.hash.steps(quick=True, sizes=HASH_SIZES), json_path=path) == 0
    whole, extension = read_results(path, "hash")
    assert (whole["name"], whole["params"]) == ("hash_pages", {"tokens": 64, "page_size": 4})
    assert extension["name"] == "page_hashes"


def test_hashes_that_ignore_what_came_before_fail_the_check() -> None:
    def unseeded(tokens: bytes, page_size: int, prior: bytes) -> list[PageHash]:
        return hash_pages(tokens, page_size)

    steps = benchmarks.hash.steps(quick=True, sizes=HASH_SIZES, hasher=unseeded)
    with pytest.raises(CheckFailed, match="other hashes"):
        run_steps(steps, watch=io.StringIO())


def test_hashing_a_cached_prefix_again_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def page_hashes(tree: RadixTree, node: RadixNode) -> list[PageHash]:
        tokens = b"".join(part.key for part in tree.path(node))
        return hash_pages(tokens, tree.page_size)[node.start :]

    original = RadixTree.page_hashes
    monkeypatch.setattr(
        RadixTree,
        "page_hashes",
        lambda tree, node: page_hashes(tree, node) if node.start else original(tree, node),
    )
    with pytest.raises(CheckFailed, match="more than the new page"):
        run_steps(benchmarks.hash.steps(quick=True, sizes=HASH_SIZES), watch=io.StringIO())


# -- the command ----------------------------------------------------------------------------------


def test_every_benchmark_is_known_by_its_module_and_says_what_it_measures() -> None:
    known = known_benchmarks()
    assert {"controller", "copy", "e2e", "hash", "store", "tree"} <= known.keys()
    assert not known.keys() & {"__init__", "__main__", "harness", "report", "store_disk", "table"}
    assert all(known.values())


def test_an_unknown_name_is_wrong_usage_and_names_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["trees"])
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert all(name in message for name in known_benchmarks())


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for target in (tmp_path, tmp_path / "file" / "hash.json"):
        with pytest.raises(SystemExit) as exit_info:
            main(["hash", "--json", str(target)])
        assert exit_info.value.code == 2


def test_the_command_runs_the_benchmark_and_makes_the_folder_of_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "hash.json"
    assert main(["hash", "--quick", "--json", str(path)]) == 0
    assert read_results(path, "hash")[0]["params"] == {"tokens": 32768, "page_size": 64}
    assert "hash_pages" in capsys.readouterr().out


def test_a_failed_check_is_status_1_and_writes_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tree.json"
    steps = benchmarks.tree.steps(quick=True, sizes=TREE_SIZES, create_tree=WrongPage)
    assert report("tree", steps, json_path=path) == 1
    assert not path.exists()
    assert "check failed: match gives other pages" in capsys.readouterr().err


def test_a_missed_bar_is_reported_and_changes_no_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    missed = dataclasses.replace(DEVICE_RESULT, bars=(Bar(3), Bar(1, "p99")))
    assert report("copy", [Step("copy", lambda: [missed])]) == 0
    assert ">= 3 NOT met; p99 >= 1 met" in capsys.readouterr().out


# -- the harness ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "p99"), [("lower", 99.0), ("higher", 2.0)], ids=["lower", "higher"]
)
def test_99_of_100_samples_are_at_least_as_good_as_p99(better: Better, p99: float) -> None:
    values = [float(value) for value in np.random.default_rng(0).permutation(100) + 1]
    result = summarise("any", values, params={}, better=better)
    assert (result.p99, result.median, result.samples) == (p99, 50.5, 100)


def test_one_sample_is_its_own_median_and_p99() -> None:
    result = summarise("any", [7.0], params={})
    assert (result.median, result.p99) == (7.0, 7.0)


@pytest.mark.parametrize(("better", "ratio"), [("lower", 0.25), ("higher", 4.0)])
def test_a_ratio_above_one_is_better_than_the_peer(better: Better, ratio: float) -> None:
    result = Result(
        name="any", params={}, unit="us", better=better, median=8, p99=9, samples=1,
        peer="other", peer_median=2,
    )  # fmt: skip
    assert result.ratio == ratio
    assert result.to_json()["ratio"] == ratio


def test_the_table_shows_a_peer_only_where_there_is_one() -> None:
    beside = dataclasses.replace(DEVICE_RESULT, peer="memcpy", peer_median=4.0)
    assert "peer" not in format_table([DEVICE_RESULT])
    header, alone, compared = format_table([DEVICE_RESULT, beside]).splitlines()
    assert header.split()[-4:] == ["peer", "peer", "median", "ratio"]
    assert alone.split()[-3:] == ["-", "-", "-"]
    assert compared.split()[-3:] == ["memcpy", "4", "0.5"]


def test_a_ratio_that_a_bar_asks_for_is_a_number_of_times_better_whatever_is_better() -> None:
    bar = Bar(2.0, "ratio")
    faster = summarise("any", [1.0], params={}, bars=(bar,))
    assert faster.meets(bar)
    assert faster.beside("other", [2.0]).meets(bar)
    assert not faster.beside("other", [1.9]).meets(bar)
    assert DEVICE_RESULT.beside("memcpy", [1.0]).meets(bar)
    assert not DEVICE_RESULT.beside("memcpy", [1.1]).meets(bar)


def test_both_sides_take_turns_and_give_as_many_values_as_wanted() -> None:
    turns: list[tuple[str, int]] = []

    def side(name: str) -> Callable[[int], list[float]]:
        def measure(count: int) -> list[float]:
            turns.append((name, count))
            return [float(len(turns))] * count

        return measure

    mine, others = alternate(side("a"), side("b"), samples=5, rounds=2)
    assert turns == [("a", 3), ("b", 3), ("a", 3), ("b", 3)]
    assert (mine, others) == ([1.0] * 3 + [3.0] * 3, [2.0] * 3 + [4.0] * 3)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    results = [
        dataclasses.replace(DEVICE_RESULT, bars=(Bar(3), Bar(0.5, "ratio"))),
        DEVICE_RESULT.beside("memcpy", [4.0]),
    ]
    noise = {"before": "quiet", "after": "not"}
    run = Run(benchmark="copy", command="python", noise=noise, results=results)
    run.write(tmp_path / "copy.json")
    assert Run.read(tmp_path / "copy.json") == run


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{}]}', '{"results": 1}'])
def test_another_file_is_no_run_and_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no result of a benchmark"):
        Run.read(path)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_only_to_a_person_and_leaves_an_empty_line() -> None:
    def fail() -> list[Result]:
        check(False, "wrong")
        return []

    steps = [Step("first", lambda: [DEVICE_RESULT]), Step("second", fail)]
    screen, pipe = Terminal(), io.StringIO()
    for watch in (screen, pipe):
        with pytest.raises(CheckFailed, match="wrong"):
            run_steps(steps, watch=watch)
    assert "0/2 first" in screen.getvalue()
    assert "1/2 second" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[2K")
    assert pipe.getvalue() == ""
