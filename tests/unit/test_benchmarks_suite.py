"""Laws of the suite: one benchmark that fails costs the others nothing, and is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main as command
from benchmarks.catalogue import known_benchmarks
from benchmarks.harness import summarise
from benchmarks.suite import main, run_all
from benchmarks.table import Run

if TYPE_CHECKING:
    from collections.abc import Sequence


class Machine:
    """Runs commands without running them: each writes a result, unless it is to fail."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(list(command))
        name, path = command[3], Path(command[command.index("--json") + 1])
        status = self.statuses.get(name, 0)
        if status == 0:
            figure = summarise("any", [1.0], params={})
            words = f"python -m benchmarks {name} --peers sglang"
            Run(benchmark=name, command=words, noise={}, results=[figure]).write(path)
        return status


def test_what_an_earlier_run_left_of_a_benchmark_that_fails_is_gone(tmp_path: Path) -> None:
    for name in ("tree", "hash"):
        (tmp_path / f"{name}.json").write_text("of an earlier run")
    assert run_all(["tree", "hash"], tmp_path, [], run=Machine(tree=1)) == {"tree": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["hash.json"]


def test_every_benchmark_runs_with_the_same_options(tmp_path: Path) -> None:
    machine = Machine()
    assert main([str(tmp_path / "new"), "--quick", "--peers", "sglang,lmcache"], run=machine) == 0
    assert [command[3] for command in machine.commands] == list(known_benchmarks())
    options = [command[4:-1] for command in machine.commands]
    assert options == [["--quick", "--peers", "lmcache,sglang", "--json"]] * len(options)


def test_one_that_fails_is_named_on_the_page_and_makes_status_1_after_all_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(copy=1, store=-9)
    assert main([str(tmp_path)], run=machine) == 1
    assert len(machine.commands) == len(known_benchmarks())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "copy failed with status 1" in page
    assert "store failed with status -9" in page
    assert 'id="tree"' in page
    captured = capsys.readouterr()
    assert "store failed with status -9" in captured.err
    assert "too few stored runs" in captured.out
    assert f"history add {tmp_path}" in captured.out


def test_where_all_fail_there_is_no_page(tmp_path: Path) -> None:
    machine = Machine(**dict.fromkeys(known_benchmarks(), 1))
    assert main([str(tmp_path)], run=machine) == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_peer_is_wrong_usage_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        command(["all", str(tmp_path / "new"), "--peers", "nobody"])
    assert exit_info.value.code == 2
    assert not (tmp_path / "new").exists()
