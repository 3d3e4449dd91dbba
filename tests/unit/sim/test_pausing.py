"""Functions that stop in their middle."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from hicache.sim.pausing import Pausable


def test_a_function_runs_only_while_it_is_resumed_and_pauses_where_it_says() -> None:
    log: list[str] = []

    def work() -> None:
        log.append("begin")
        paused.pause()
        log.append("middle")
        paused.pause()
        log.append("end")

    paused = Pausable(work)
    assert log == []
    assert [(paused.resume(), log[-1]) for _ in range(3)] == [
        (False, "begin"),
        (False, "middle"),
        (True, "end"),
    ]


def test_functions_interleave_as_they_are_resumed() -> None:
    log: list[str] = []

    def work(name: str) -> None:
        for step in range(3):
            log.append(f"{name}{step}")
            paused[name].pause()

    paused = {name: Pausable(partial(work, name)) for name in "ab"}
    for name in "abbaabab":
        paused[name].resume()
    assert log == ["a0", "b0", "b1", "a1", "a2", "b2"]


def test_what_the_function_raises_comes_out_of_resume_and_no_thread_is_left() -> None:
    def work() -> None:
        paused.pause()
        raise ValueError("broken")

    paused = Pausable(work)
    before = threading.active_count()
    assert not paused.resume()
    with pytest.raises(ValueError, match="broken"):
        paused.resume()
    assert threading.active_count() == before - 1
