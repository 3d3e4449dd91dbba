"""What `dd` and `fio` say of a disk is understood, and what they do not say is not made up."""

from __future__ import annotations

import json
import shutil
import stat
from typing import TYPE_CHECKING

import pytest

from benchmarks.disk_tools import DdSide, DiskToolSide, FioSide, disk_tools
from benchmarks.page_set import PageSet, Turn
from benchmarks.peers.process import PeerFailed

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
PAGES = PageSet(page_bytes=64 << 10, num_batches=4, batch_pages=16)
TURNS = [Turn([[0, 1]], 0), Turn([[2], [3]], 1)]
TOOLS = [DdSide, FioSide]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "kept"
    path.write_bytes(bytes(PAGES.num_bytes))
    return path


def pretend(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of that name before all others."""
    programs = folder / "programs"
    programs.mkdir()
    program = programs / name
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(programs), prepend=":")


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_moves_the_bytes_of_a_turn_and_leaves_nothing(
    tmp_path: Path, kept: Path, tool: type[DiskToolSide], turn: Turn
) -> None:
    if not shutil.which(tool.name):
        pytest.skip(f"{tool.name} is not installed")
    side = tool(tmp_path / "own", kept, PAGES)
    try:
        seconds = side.write(turn), side.read(turn)
    except PeerFailed as error:
        pytest.skip(f"{tool.name} does not run here: {error.reason}")
    assert all(0 < one < 60 for one in seconds)
    assert list((tmp_path / "own").iterdir()) == []


def test_the_slowest_process_of_dd_counts(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = f'echo "$@" >> {log}; case "$*" in *skip=2*) s=0.5;; *) s=1.25e-1;; esac\n'
    script += 'echo "2097152 bytes (2.1 MB, 2.0 MiB) copied, $s s, 1.5 GB/s" >&2'
    pretend(tmp_path, "dd", script, monkeypatch)
    side = DdSide(tmp_path / "own", kept, PAGES)
    assert side.read(Turn([[0, 1], [2, 3]], 0)) == 0.5
    lines = sorted(log.read_text(encoding="utf-8").splitlines())
    assert lines == [
        f"if={kept} of=/dev/null skip={first} bs={MIB} count=2 iflag=direct" for first in (0, 2)
    ]


def test_time_of_fio_follows_from_its_speed(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"jobs": [{"write": {"io_bytes": 2 * MIB, "bw_bytes": 8 * MIB}}]}
    script = f"echo 'note: a note comes first'; echo '{json.dumps(report)}'"
    pretend(tmp_path, "fio", script, monkeypatch)
    side = FioSide(tmp_path / "own", kept, PAGES)
    assert side.write(TURNS[0]) == 0.25
    with pytest.raises(PeerFailed, match="not understood"):
        side.read(TURNS[0])


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no such flag >&2; exit 1", "no such flag"),
        ("echo done", "does not say|not understood"),
        ('echo \'{"jobs": [{"read": {"io_bytes": 1, "bw_bytes": 1}}]}\'', "1 of 2|does not say"),
    ],
)
def test_a_tool_that_fails_says_why(
    tmp_path: Path,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    tool: type[DiskToolSide],
    script: str,
    reason: str,
) -> None:
    pretend(tmp_path, tool.name, script, monkeypatch)
    with pytest.raises(PeerFailed, match=reason):
        tool(tmp_path / "own", kept, PAGES).read(TURNS[0])


@pytest.mark.parametrize("tool", TOOLS)
def test_what_direct_io_does_not_take_is_refused(
    tmp_path: Path, kept: Path, tool: type[DiskToolSide]
) -> None:
    odd = PageSet(page_bytes=1024, num_batches=2, batch_pages=1)
    with pytest.raises(PeerFailed, match="not whole blocks"):
        tool(tmp_path / "own", kept, odd).read(Turn([[0]], 0))


@pytest.mark.parametrize("names", [[], ["dd"], ["dd", "fio"]])
def test_only_tools_that_are_installed_are_used(
    tmp_path: Path, kept: Path, names: list[str]
) -> None:
    found = disk_tools(tmp_path, kept, PAGES, which=lambda name: name if name in names else None)
    assert [side.name for side in found] == names
