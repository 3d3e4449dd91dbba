"""What `hicache simulate` prints, writes and returns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from mutations import ack_writes_before_they_ran
from rank_mutations import end_writes_that_others_still_make

from hicache.cli import main
from hicache.clock import ManualClock
from hicache.sim import simulate
from hicache.sim.command import SimulateArguments, random_seed, run_simulate
from hicache.sim.coverage import DECLARED, Coverage, Fault, Operation, State

if TYPE_CHECKING:
    from pathlib import Path


def test_a_sound_run_ends_with_0_and_writes_its_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deep" / "report.json"
    assert main(["simulate", "--seed", "3", "--steps", "700", "--json", str(target)]) == 0
    said = capsys.readouterr().err
    assert "seed 3: 700 steps in 2 episodes" in said
    assert "every invariant held after every step" in said
    report = json.loads(target.read_text(encoding="utf-8"))
    again = simulate(3, 700)
    assert report["runs"] == [{"seed": 3, "steps": 700, "episodes": 2, "digest": again.digest}]
    assert (report["passed"], report["failure"]) == (True, None)
    counts = {
        (row["operation"], row["state"], row["fault"]): row["count"] for row in report["meetings"]
    }
    assert counts.keys() >= {tuple(part.value for part in meeting) for meeting in DECLARED}
    assert sum(counts.values()) == again.coverage.counts.total()


def test_a_broken_invariant_ends_with_1_the_seed_the_step_and_the_shortest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ack_writes_before_they_ran(monkeypatch)
    said: list[str] = []
    target = tmp_path / "report.json"
    arguments = SimulateArguments(seed=1, steps=2000, json_path=target)
    assert run_simulate(arguments, say=said.append) == 1
    report = json.loads(target.read_text(encoding="utf-8"))
    step = report["failure"]["step"]
    text = "\n".join(said)
    assert f"BROKEN at step {step}" in text
    assert f"hicache simulate --seed 1 --steps {step}" in text
    assert "shortest failing run" in text
    assert report["failure"]["violations"]
    assert len(report["failure"]["shortest"]["decisions"]) < step
    assert simulate(1, step, shrink_steps=0).failure is not None


def test_fresh_seeds_run_until_the_time_is_over_and_each_is_told_before_its_run(
    tmp_path: Path,
) -> None:
    clock, said, target = ManualClock(), list[str](), tmp_path / "report.json"
    seeds = iter([11, 12, 13, 14])

    def draw() -> int:
        clock.advance(25.0)
        return next(seeds)

    arguments = SimulateArguments(steps=300, seconds=60.0, json_path=target)
    assert run_simulate(arguments, say=said.append, clock=clock, draw_seed=draw) == 0
    assert said[:3] == [f"hicache simulate --seed {seed} --steps 300" for seed in (11, 12, 13)]
    assert "3 seeds: 900 steps in 3 episodes, 75.0 s" in said
    assert said[-1] == "every invariant held after every step"
    report = json.loads(target.read_text(encoding="utf-8"))
    assert [run["seed"] for run in report["runs"]] == [11, 12, 13]
    total = sum(simulate(seed, 300).coverage.counts.total() for seed in (11, 12, 13))
    assert sum(row["count"] for row in report["meetings"]) == total


def test_fresh_seeds_end_with_the_first_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, target, seeds = list[str](), tmp_path / "report.json", iter([1, 2])

    def draw() -> int:
        seed = next(seeds)
        if seed == 2:
            ack_writes_before_they_ran(monkeypatch)
        return seed

    arguments = SimulateArguments(steps=2000, seconds=1e9, json_path=target)
    assert run_simulate(arguments, say=said.append, draw_seed=draw) == 1
    failure = json.loads(target.read_text(encoding="utf-8"))["failure"]
    assert failure["seed"] == 2
    assert f"hicache simulate --seed 2 --steps {failure['step']}" in said[-1]
    assert f"2 seeds: {2000 + failure['step']} steps" in "\n".join(said)


def test_several_ranks_run_from_as_many_seeds_as_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    options = ["--seed", "3", "--seeds", "2", "--steps", "150", "--ranks", "2"]
    assert main(["simulate", *options, "--json", str(target)]) == 0
    said = capsys.readouterr().err
    assert "hicache simulate --seed 4 --steps 150 --ranks 2\n" in said
    assert "2 seeds: 300 steps in 2 episodes of 2 ranks" in said
    report = json.loads(target.read_text(encoding="utf-8"))
    assert (report["ranks"], [run["seed"] for run in report["runs"]]) == (2, [3, 4])
    assert sum(report["actions"].values()) == 300


def test_a_failure_of_several_ranks_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    end_writes_that_others_still_make(monkeypatch)
    said: list[str] = []
    arguments = SimulateArguments(seed=1, steps=2000, ranks=2)
    assert run_simulate(arguments, say=said.append) == 1
    step = int(said[-1].split()[3].rstrip(";"))
    assert f"  hicache simulate --seed 1 --steps {step} --ranks 2" in said[-1]


def test_seeds_are_drawn_anew_each_time() -> None:
    assert len({random_seed() for _ in range(100)}) > 90


def test_an_argument_that_cannot_work_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--steps", "0"]) == 2
    assert "at least 1 step" in capsys.readouterr().err
    assert main(["simulate", "--seconds", "0"]) == 2
    assert "--seconds must be more than 0" in capsys.readouterr().err
    assert main(["simulate", "--ranks", "0"]) == 2
    assert "at least 1 rank" in capsys.readouterr().err
    assert main(["simulate", "--seconds", "1", "--seeds", "2"]) == 2
    assert "--seeds" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--seconds", "1", "--seed", "7"])
    assert caught.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
    assert main(["simulate", "--json", str(tmp_path)]) == 2
    assert "name a file" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.touch()
    assert main(["simulate", "--json", str(blocked / "report.json")]) == 2
    assert "--json" in capsys.readouterr().err


def test_the_table_shows_what_is_missing_and_what_nobody_declared() -> None:
    coverage = Coverage()
    coverage.note(Operation.LOAD, State.HANGING, Fault.ABORT)
    lines = coverage.table().splitlines()
    assert "load      hanging  abort 1" in lines
    assert "prefetch  hanging  abort 0  reset 0  late 0" in lines
    assert sum(line.startswith("persist") for line in lines) == 5
