"""Processes that work together: all come to the end, or none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from hicache.engine.rank_processes import run_together

if TYPE_CHECKING:
    from pathlib import Path

GUARD_SECONDS = 30.0

# What every process of these tests does: says that it is there, then acts.
ACTS = {
    "ends": "",
    "fails": "sys.exit(3)",
    "raises": "raise ValueError",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "waits": "time.sleep(600)",
    "is deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)",
    # A rank that misses another one notices at once, and fails by itself.
    "misses 0": "\nwhile pid_alive(0): time.sleep(0.001)\nsys.exit(1)",
}
PROGRAM = """
    import os, signal, sys, time
    from hicache.engine.rank_processes import end_with_parent
    folder, number, act = sys.argv[1:]
    def ready():
        with open(f"{folder}/{number}.partial", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{folder}/{number}.partial", f"{folder}/{number}")
    def pid_alive(other):
        try:
            state = open(f"/proc/{open(f'{folder}/{other}').read()}/stat").read()
        except OSError:
            return not os.path.exists(f"{folder}/{other}")
        return state.rpartition(")")[2].split()[0] != "Z"
    end_with_parent()
    if act != ACTS["is deaf"]:
        ready()
    exec(act)
"""


def commands(folder: Path, *acts: str) -> list[list[str]]:
    program = textwrap.dedent(PROGRAM).replace('ACTS["is deaf"]', repr(ACTS["is deaf"]))
    return [
        [sys.executable, "-c", program, str(folder), str(number), ACTS[act]]
        for number, act in enumerate(acts)
    ]


def wait_for(folder: Path, count: int) -> list[int]:
    """Wait until `count` processes are there; return their ids."""
    end = time.monotonic() + GUARD_SECONDS
    while len(found := [file for file in folder.iterdir() if file.name.isdigit()]) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return [int(file.read_text()) for file in found]


def is_gone(pid: int) -> bool:
    """Whether the process has ended, or is a zombie of a parent that has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def verify_gone(pids: list[int]) -> None:
    end = time.monotonic() + GUARD_SECONDS
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.01)


def test_processes_that_all_end_well_are_a_success(tmp_path: Path) -> None:
    assert run_together(commands(tmp_path, "ends", "ends", "ends")) is None
    verify_gone(wait_for(tmp_path, 3))


@pytest.mark.parametrize(
    ("acts", "said"),
    [
        (["waits", "fails"], "process 1 ended with status 3"),
        (["raises", "waits", "waits"], "process 0 ended with status 1"),
        (["waits", "is killed"], "process 1 was ended by SIGKILL"),
        (["ends", "is killed"], "process 1 was ended by SIGKILL"),
        (["is killed", "misses 0", "misses 0"], "process 0 was ended by SIGKILL"),
    ],
)
def test_when_one_fails_it_is_named_and_the_others_are_ended(
    acts: list[str], said: str, tmp_path: Path
) -> None:
    assert run_together(commands(tmp_path, *acts)) == said
    verify_gone([int(file.read_text()) for file in tmp_path.iterdir() if file.name.isdigit()])


def test_a_command_that_cannot_be_started_leaves_none_of_those_before_it(tmp_path: Path) -> None:
    first = commands(tmp_path, "waits")
    with pytest.raises(FileNotFoundError):
        run_together([*first, [str(tmp_path / "absent")]])
    verify_gone([int(file.read_text()) for file in tmp_path.iterdir() if file.name.isdigit()])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_none_is_left_when_the_parent_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """By Ctrl-C, or in a way that it cannot do anything about."""
    parent = f"""
        from hicache.engine.rank_processes import run_together
        run_together({commands(tmp_path, "waits", "waits")!r})
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = wait_for(tmp_path, 2)
    os.kill(process.pid, number)
    assert process.wait(GUARD_SECONDS) != 0
    verify_gone(pids)


def test_one_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache.engine.rank_processes._GRACE_SECONDS", 0.2)
    found = commands(tmp_path, "is deaf", "waits")
    fails = f"""
        import os, time
        while not os.path.exists({str(tmp_path / "0")!r}):
            time.sleep(0.01)
        raise SystemExit(7)
    """
    command = [sys.executable, "-c", textwrap.dedent(fails)]
    assert run_together([*found, command]) == "process 2 ended with status 7"
    verify_gone([int(file.read_text()) for file in tmp_path.iterdir() if file.name.isdigit()])
