"""Laws of the demo's report: its JSON, joining runs, and the text for a terminal."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.engine.machine import machine_facts
from hicache.engine.report import (
    AnswerDifference,
    DemoReport,
    MovementReport,
    Movements,
    TurnReport,
    TurnTotals,
)
from hicache.engine.report_table import (
    continued_note,
    format_bytes,
    format_factor,
    format_ms,
    format_table,
    restart_note,
)
from hicache.errors import ConfigError, InvariantViolation

if TYPE_CHECKING:
    from pathlib import Path

TURN_KEYS = [
    "user", "turn", "after_restart", "prompt_tokens", "device_hit_tokens", "host_hit_tokens",
    "storage_hit_tokens", "computed_tokens", "ttft_seconds", "ttft_uncached_seconds",
]  # fmt: skip
ORIGINS = TURN_KEYS[4:8]

tokens = st.integers(0, 10_000)
seconds = st.just(0.0) | st.floats(1e-9, 100)
top2 = st.tuples(*[st.tuples(st.integers(0, 50_000), st.floats(-50, 50))] * 2)
movement = st.builds(MovementReport, num_bytes=st.integers(0, 1 << 40), seconds=seconds)
counters = st.dictionaries(st.sampled_from(["evicted", "corrupt", "late"]), st.integers(0, 99))


@st.composite
def turns(draw: st.DrawFn) -> TurnReport:
    by_origin = draw(st.lists(tokens, min_size=4, max_size=4))
    return TurnReport(
        user=draw(st.integers(0, 9)),
        turn=draw(st.integers(0, 9)),
        after_restart=draw(st.booleans()),
        prompt_tokens=sum(by_origin),
        **dict(zip(ORIGINS, by_origin, strict=True)),
        ttft_seconds=draw(seconds),
        ttft_uncached_seconds=draw(seconds),
        answer_tokens=draw(tokens),
        answer_equal=draw(st.booleans()),
        text=draw(st.text()),
        delayed_hit_tokens=draw(st.integers(0, sum(by_origin[:3]))),
    )


reports = st.builds(
    DemoReport,
    model=st.just("smollm2"),
    config=st.just({"page_size": 64, "storage": {"backend": "file"}}),
    machine=st.dictionaries(st.text(), st.text()),
    turns=st.lists(turns(), max_size=5).map(tuple),
    movements=st.builds(
        Movements, write=movement, load=movement, persist=movement, prefetch=movement
    ),
    differences=st.lists(
        st.builds(
            AnswerDifference,
            user=st.integers(0, 9),
            turn=st.integers(0, 9),
            position=tokens,
            cached_top2=top2,
            uncached_top2=top2,
            near_tie=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    counters=counters,
    restart_logit_difference=st.none() | seconds,
    num_pages_at_start=st.integers(0, 9999),
)


def make_turn(**changes: Any) -> TurnReport:
    values: dict[str, Any] = {
        "user": 0, "turn": 0, "after_restart": False, "prompt_tokens": 100,
        "device_hit_tokens": 10, "host_hit_tokens": 20, "storage_hit_tokens": 30,
        "computed_tokens": 40, "ttft_seconds": 0.5, "ttft_uncached_seconds": 2.0,
        "answer_tokens": 8, "answer_equal": True,
    }  # fmt: skip
    return TurnReport(**{**values, **changes})


def make_report(*turns: TurnReport, **changes: Any) -> DemoReport:
    values: dict[str, Any] = {"model": "smollm2", "config": {}, "machine": {}, "turns": turns}
    return DemoReport(**{**values, **changes})


def test_the_json_has_the_published_keys() -> None:
    data: dict[str, Any] = make_report(make_turn()).to_json()
    assert list(data) == [
        "answers_equal", "model", "config", "machine", "turns", "movements",
        "differences", "totals", "counters", "restart_logit_difference", "num_pages_at_start",
    ]  # fmt: skip
    more_keys = ["answer_tokens", "answer_equal", "text", "delayed_hit_tokens"]
    assert list(data["turns"][0]) == [*TURN_KEYS, *more_keys]
    assert list(data["movements"]) == ["write", "load", "persist", "prefetch"]
    for moved in data["movements"].values():
        assert list(moved) == ["bytes", "bytes_per_second", "seconds"]
    assert list(data["totals"]) == ["before_restart", "after_restart", "all"]


@given(reports)
@settings(max_examples=40)
def test_a_report_survives_json(report: DemoReport) -> None:
    text = json.dumps(report.to_json(), allow_nan=False)
    assert DemoReport.from_json(json.loads(text)) == report


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "build" / "demo" / "report.json"
    for report in (make_report(make_turn()), make_report(make_turn(turn=1, text="é\n"))):
        report.write_json(path)
        assert DemoReport.read_json(path) == report
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    old = make_report(make_turn())
    old.write_json(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        make_report(make_turn(ttft_seconds=float("nan"))).write_json(path)

    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    with pytest.raises(OSError, match="no space"):
        make_report().write_json(path)
    assert DemoReport.read_json(path) == old
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("change", ["model", "turns", "movements", "counters", "computed_tokens"])
def test_what_is_no_report_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "report.json"
    data: Any = make_report(make_turn()).to_json()
    if change == "computed_tokens":
        data["turns"][0][change] += 1
    else:
        del data[change]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="no report of the demo"):
        DemoReport.read_json(path)
    with pytest.raises(ConfigError, match="no report of the demo"):
        DemoReport.from_json([])  # type: ignore[arg-type]


def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"model": ')
    for name in ("absent.json", "cut.json"):
        with pytest.raises(ConfigError, match=name):
            DemoReport.read_json(tmp_path / name)


def test_what_ranks_have_moved_adds_up_and_their_turns_are_one() -> None:
    first = make_report(
        make_turn(), movements=Movements(load=MovementReport(num_bytes=5, seconds=1.0))
    )
    slower = make_report(
        make_turn(ttft_seconds=9.0, ttft_uncached_seconds=8.0),
        movements=Movements(load=MovementReport(num_bytes=7, seconds=2.0)),
    )
    joined = first.with_ranks([slower, slower])
    assert joined.movements.load == MovementReport(num_bytes=19, seconds=5.0)
    assert joined.turns == first.turns
    assert first.with_ranks([]) == first


@pytest.mark.parametrize(
    "other",
    [
        [],
        [make_turn(), make_turn()],
        [make_turn(answer_equal=False)],
        [make_turn(text="another answer")],
        [make_turn(host_hit_tokens=30, storage_hit_tokens=20)],
    ],
)
def test_ranks_that_have_not_served_the_same_are_no_report(other: list[TurnReport]) -> None:
    report = make_report(make_turn())
    with pytest.raises(InvariantViolation, match="rank 2 has not served"):
        report.with_ranks([report, make_report(*other)])


def test_the_rounding_of_other_ranks_after_a_restart_is_said() -> None:
    for difference in (None, 0.0):
        report = make_report(make_turn(), restart_logit_difference=difference)
        assert restart_note(report) == ""
        assert format_table(report).endswith("differ)")
    report = make_report(make_turn(), restart_logit_difference=2.5e-5)
    assert "differ by 2.5e-05 at most" in restart_note(report)
    assert format_table(report).endswith(restart_note(report))
    assert report.merge(report).restart_logit_difference == 2.5e-5


def test_what_an_earlier_run_had_stored_is_said() -> None:
    report = make_report(make_turn())
    assert continued_note(report) == ""
    continued = make_report(make_turn(), num_pages_at_start=1234)
    assert "L3 had 1,234 pages of a run that did not end" in continued_note(continued)
    assert format_table(continued).endswith(continued_note(continued))
    assert continued.merge(report).num_pages_at_start == 1234


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_tokens_of_a_turn_must_add_up(origin: str) -> None:
    with pytest.raises(InvariantViolation, match="are not the 100 of the prompt"):
        make_turn(**{origin: 77})
    with pytest.raises(InvariantViolation, match="turn 3 of user 2"):
        make_turn(user=2, turn=3, **{origin: -1})


@pytest.mark.parametrize("delayed", [-1, 61])
def test_no_more_tokens_are_delayed_than_were_found(delayed: int) -> None:
    assert make_turn(delayed_hit_tokens=60).delayed_hit_tokens == 60
    with pytest.raises(InvariantViolation, match=f"{delayed} tokens were found late, of 60"):
        make_turn(delayed_hit_tokens=delayed)


@given(reports)
@settings(max_examples=40)
def test_totals_are_sums_and_medians_of_their_turns(report: DemoReport) -> None:
    groups = {
        "before_restart": [turn for turn in report.turns if not turn.after_restart],
        "after_restart": [turn for turn in report.turns if turn.after_restart],
        "all": list(report.turns),
    }
    assert list(report.totals) == list(groups)
    for name, group in groups.items():
        totals = report.totals[name]
        assert totals.turns == len(group)
        for key in ("prompt_tokens", "delayed_hit_tokens", *ORIGINS):
            assert getattr(totals, key) == sum(getattr(turn, key) for turn in group)
        ratios = [
            turn.ttft_uncached_seconds / turn.ttft_seconds
            for turn in group
            if turn.ttft_seconds > 0 and turn.ttft_uncached_seconds > 0
        ]
        assert totals.median_speed_up == (statistics.median(ratios) if ratios else None)
        shares = [totals.share(getattr(totals, origin)) for origin in ORIGINS]
        assert sum(shares) == pytest.approx(1 if totals.prompt_tokens else 0)
        assert totals.share(totals.hit_tokens) == pytest.approx(sum(shares[:3]))


def test_answers_are_equal_only_if_there_are_some_and_all_are() -> None:
    assert make_report(make_turn(), make_turn(turn=1)).answers_equal
    assert not make_report(make_turn(), make_turn(turn=1, answer_equal=False)).answers_equal
    assert not make_report().answers_equal


@given(reports, reports, reports)
@settings(max_examples=30)
def test_merging_is_associative_and_adds_up(a: DemoReport, b: DemoReport, c: DemoReport) -> None:
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    # Sums of floats may differ in the last bit.
    assert dataclasses.replace(left, movements=right.movements) == right
    for name, moved in left.movements.by_name().items():
        parts = [report.movements.by_name()[name] for report in (a, b, c)]
        assert moved.num_bytes == sum(part.num_bytes for part in parts)
        assert moved.seconds == pytest.approx(sum(part.seconds for part in parts))
        assert moved.bytes_per_second == pytest.approx(
            moved.num_bytes / moved.seconds if moved.seconds else 0
        )
    assert left.turns == a.turns + b.turns + c.turns
    assert left.differences == a.differences + b.differences + c.differences
    assert left.machine == c.machine
    for name in {*a.counters, *b.counters, *c.counters}:
        assert left.counters[name] == sum(part.counters.get(name, 0) for part in (a, b, c))


@given(reports)
@settings(max_examples=40)
def test_an_empty_run_adds_nothing(report: DemoReport) -> None:
    empty = make_report(model=report.model, config=report.config, machine=report.machine)
    assert empty.merge(report) == report.merge(empty) == report


def test_runs_of_another_model_or_configuration_are_not_merged() -> None:
    report = make_report(make_turn())
    for change in ({"model": "random"}, {"config": {"page_size": 16}}):
        with pytest.raises(ConfigError, match="delete the earlier"):
            report.merge(dataclasses.replace(report, **change))


@given(reports)
@settings(max_examples=40)
def test_the_table_has_a_row_for_every_turn_and_is_aligned(report: DemoReport) -> None:
    per_turn, totals, movements, verdict = format_table(report).split("\n\n")
    rows = [line.split() for line in per_turn.splitlines()[1:]]
    assert len(rows) == len(report.turns)
    for row, turn in zip(rows, report.turns, strict=True):
        assert row[:2] == [str(turn.user), str(turn.turn)]
        assert ("after" in row) == turn.after_restart
        assert row[-9:-4] == [str(getattr(turn, key)) for key in ("prompt_tokens", *ORIGINS)]
        assert row[-1] == ("yes" if turn.answer_equal else "NO")
    for block in (per_turn, totals, movements):
        assert len({len(line) for line in block.splitlines()}) == 1
    assert [line.split()[0] for line in movements.splitlines()[1:]] == list(
        report.movements.by_name()
    )
    assert ("NOT equal" in verdict) == (not report.answers_equal)


def test_numbers_are_written_for_people() -> None:
    sizes = [0, 999, 1000, 12_345, 999_999, 12_345_678, 3_750_000_000, 5_000_000_000_000]
    assert [format_bytes(size) for size in sizes] == [
        "0 B", "999 B", "1 kB", "12.3 kB", "1 MB", "12.3 MB", "3.75 GB", "5 TB",
    ]  # fmt: skip
    assert [format_ms(0.01234), format_ms(None)] == ["12.3", "-"]
    assert [format_factor(3.25), format_factor(None)] == ["3.2x", "-"]
    assert make_turn(ttft_seconds=0.0).speed_up is None
    assert TurnTotals.of([]).median_ttft_seconds is None


def test_machine_facts_are_json_and_name_what_was_measured_on() -> None:
    facts: Any = machine_facts("H200")
    assert json.loads(json.dumps(facts)) == facts
    assert list(facts) == ["cpu", "cores", "memory_bytes", "device", "versions"]
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1 << 20
    assert facts["device"] == "H200"
    assert machine_facts()["device"] is None
    assert set(facts["versions"]) == {"hicache", "python", "torch", "numpy"}
    assert all(facts["versions"].values())
