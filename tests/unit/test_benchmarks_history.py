"""Laws of the stored history: what is beyond noise is seen, noise is not, and files stay small."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import Result, summarise
from benchmarks.regressions import Verdict, compare, format_changes
from benchmarks.stored_runs import HISTORY, StoredRun, add_run, read_stored
from benchmarks.table import Run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Literal

MACHINE: dict[str, Any] = {
    "cpu": "one",
    "cores": 2,
    "device": None,
    "versions": {"python": "3.11.7"},
}


def figure(
    value: float, *, unit: str = "us", better: Literal["lower", "higher"] = "lower"
) -> Result:
    return summarise("match", [value], params={"nodes": 1}, unit=unit, better=better)


def run_with(*rows: Result, machine: dict[str, Any] = MACHINE, quick: bool = True) -> Run:
    return Run(
        benchmark="tree",
        command="python",
        noise={},
        quick=quick,
        date="2026-01-01",
        commit="abc",
        machine=machine,
        results=rows,
    )


def verdict(now: Run, stored: Sequence[Run]) -> Verdict:
    (change,) = compare(now, [StoredRun.of(run) for run in stored])
    return change.verdict


def noisy(rng: random.Random, center: float, spread: float) -> Run:
    return run_with(figure(center * math.exp(rng.gauss(0, spread))))


# -- what is beyond noise -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_a_third_slower_is_seen_among_usual_noise_and_the_noise_is_not(seed: int) -> None:
    rng = random.Random(seed)
    stored = [noisy(rng, 10, 0.02) for _ in range(10)]
    assert verdict(noisy(rng, 10, 0.02), stored) is Verdict.SAME
    assert verdict(noisy(rng, 10 / 0.7, 0.02), stored) is Verdict.WORSE
    assert verdict(noisy(rng, 10 * 0.7, 0.02), stored) is Verdict.BETTER


def test_few_stored_runs_that_happen_to_agree_raise_no_alarm_where_runs_vary_by_a_tenth() -> None:
    rng = random.Random(0)
    alarms = [
        verdict(noisy(rng, 10, 0.1), [noisy(rng, 10, 0.1) for _ in range(3)]) is not Verdict.SAME
        for _ in range(500)
    ]
    assert sum(alarms) < 0.05 * len(alarms)


def test_a_figure_that_always_varies_by_half_is_no_alarm_when_it_is_a_third_slower() -> None:
    stored = [run_with(figure(value)) for value in (6, 15, 10, 7, 14)]
    assert verdict(run_with(figure(14.5)), stored) is Verdict.SAME


def test_one_wild_run_among_the_stored_ones_hides_nothing() -> None:
    stored = [run_with(figure(value)) for value in (10, 10.1, 9.9, 10, 100)]
    assert verdict(run_with(figure(14)), stored) is Verdict.WORSE


@pytest.mark.parametrize(("better", "worse"), [("lower", 15.0), ("higher", 7.0)])
def test_worse_is_more_or_less_as_the_figure_has_it(
    better: Literal["lower", "higher"], worse: float
) -> None:
    stored = [StoredRun.of(run_with(figure(10, better=better)))] * 3
    (change,) = compare(run_with(figure(worse, better=better)), stored)
    assert change.verdict is Verdict.WORSE
    assert change.factor == pytest.approx(min(worse / 10, 10 / worse))


def test_beside_a_peer_what_slows_both_is_no_change_and_what_slows_one_is() -> None:
    stored = [run_with(figure(10).beside("other", [20.0]))] * 3
    assert verdict(run_with(figure(30).beside("other", [60.0])), stored) is Verdict.SAME
    assert verdict(run_with(figure(10).beside("other", [14.0])), stored) is Verdict.WORSE


def test_two_stored_runs_say_nothing_about_noise() -> None:
    assert verdict(run_with(figure(90)), [run_with(figure(10))] * 2) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    "other",
    [
        run_with(figure(10), machine={**MACHINE, "cpu": "two"}),
        run_with(figure(10), machine={**MACHINE, "cores": 4}),
        run_with(figure(10), machine={**MACHINE, "device": "a GPU"}),
        run_with(figure(10), machine={**MACHINE, "versions": {"python": "3.12.1"}}),
        run_with(figure(10), quick=False),
    ],
    ids=["cpu", "cores", "device", "python", "quick"],
)
def test_times_of_another_kind_of_machine_or_run_are_not_compared(other: Run) -> None:
    assert verdict(run_with(figure(90)), [other] * 5) is Verdict.UNKNOWN


def test_a_count_is_compared_with_the_last_one_of_any_machine_and_three_per_cent_are_seen() -> None:
    elsewhere = {**MACHINE, "cpu": "two", "cores": 64}
    stored = [run_with(figure(1000, unit="bytecodes"), machine=elsewhere, quick=False)]
    assert verdict(run_with(figure(1010, unit="bytecodes")), stored) is Verdict.SAME
    assert verdict(run_with(figure(1030, unit="bytecodes")), stored) is Verdict.WORSE
    changed = run_with(figure(1200, unit="bytecodes"), machine=elsewhere)
    assert verdict(run_with(figure(1200, unit="bytecodes")), [*stored * 5, changed]) is Verdict.SAME
    newer = {**MACHINE, "versions": {"python": "3.13.0"}}
    now = run_with(figure(1030, unit="bytecodes"), machine=newer)
    assert verdict(now, stored) is Verdict.UNKNOWN


def test_a_hit_ratio_beside_a_peer_is_compared_as_it_is() -> None:
    def found(ratio: float, others: float) -> Run:
        row = figure(ratio, unit="ratio", better="higher").beside("lru", [others])
        return run_with(row)

    assert verdict(found(0.5, 0.4), [found(0.5, 0.2)]) is Verdict.SAME
    assert verdict(found(0.4, 0.2), [found(0.5, 0.25)]) is Verdict.WORSE


def test_a_figure_without_a_logarithm_is_not_compared() -> None:
    lead = figure(-0.05, unit="points", better="higher")
    assert verdict(run_with(lead), [run_with(lead)] * 5) is Verdict.UNKNOWN


def test_only_what_changed_is_listed_and_the_worst_comes_first() -> None:
    stored = [StoredRun.of(run_with(figure(10)))] * 3
    changes = [
        ("tree", change)
        for value in (10, 5, 20, 40)
        for change in compare(run_with(figure(value)), stored)
    ]
    lines = format_changes(changes).splitlines()
    assert [line.split()[0] for line in lines] == ["worse", "worse", "better", "2"]
    assert "0.25 times as good as in 3 stored runs" in lines[0]
    assert lines[-1] == "2 worse, 1 better, 1 as before, 0 with too few stored runs"


# -- what is stored -------------------------------------------------------------------------------


def test_a_stored_run_is_read_as_it_was_written() -> None:
    stored = StoredRun.of(run_with(figure(10), figure(7).beside("other", [8.0])))
    assert StoredRun.from_line(stored.to_line()) == stored
    assert stored.rows == {"match nodes=1": (10, None), "match nodes=1 / other": (7, 1.14286)}


def test_of_one_kind_of_machine_the_ten_newest_runs_are_kept(tmp_path: Path) -> None:
    add_run(run_with(figure(1), machine={**MACHINE, "cpu": "two"}), tmp_path)
    for number in range(1, 15):
        add_run(run_with(figure(number)), tmp_path)
    stored = read_stored("tree", tmp_path)
    assert [run.cpu for run in stored] == ["two", *["one"] * 10]
    assert [run.rows["match nodes=1"][0] for run in stored[1:]] == list(range(5, 15))


def test_a_file_does_not_grow_beyond_its_bound_whatever_machines_there_are(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(figure(1), params={"number": number, "name": "x" * 100})
        for number in range(50)
    ]
    for number in range(30):
        path = add_run(run_with(*rows, machine={**MACHINE, "cpu": str(number)}), tmp_path)
    assert 60_000 < path.stat().st_size <= 80 << 10
    assert read_stored("tree", tmp_path)[-1].cpu == "29"


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": 1}', '{"rows": {}}'])
def test_a_file_of_something_else_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "tree.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"tree\.jsonl holds something else"):
        read_stored("tree", tmp_path)


def test_the_history_of_this_repository_can_be_read_and_is_small() -> None:
    paths = list(HISTORY.glob("*.jsonl"))
    assert all(read_stored(path.stem) for path in paths)
    assert sum(path.stat().st_size for path in paths) < 1 << 20


# -- the command ----------------------------------------------------------------------------------


def history(do: str, tmp_path: Path) -> int:
    return main(["history", do, str(tmp_path / "results"), "--history", str(tmp_path / "kept")])


def test_what_is_as_stored_is_status_0_and_what_is_worse_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    run_with(figure(10)).write(tmp_path / "results" / "tree.json")
    for _ in range(3):
        assert history("add", tmp_path) == 0
    assert history("check", tmp_path) == 0
    run_with(figure(20)).write(tmp_path / "results" / "tree.json")
    assert history("check", tmp_path) == 1
    assert "tree: match nodes=1" in capsys.readouterr().out


def test_a_folder_without_results_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(SystemExit) as exit_info:
        history("check", tmp_path)
    assert exit_info.value.code == 2
