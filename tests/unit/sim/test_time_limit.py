"""What never ends is broken off, and a simulation of it ends red."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time

import pytest
from mutations import take_the_first_result_for_ever

from hicache.sim import episode, simulate
from hicache.sim.pausing import Pausable
from hicache.sim.time_limit import NoProgress, time_limit

SECONDS = 0.05


def spin() -> None:
    while True:
        pass


def test_what_never_ends_is_broken_off_where_it_is() -> None:
    said = r"no progress after 0.05 s of processor time, in spin \(test_time_limit.py:\d+\)"
    with pytest.raises(NoProgress, match=said), time_limit(SECONDS):
        spin()


def test_what_ends_in_time_is_left_alone_and_nothing_is_left_behind() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with time_limit(SECONDS):
        pass
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_waiting_takes_no_processor_time() -> None:
    with time_limit(SECONDS):
        time.sleep(4 * SECONDS)


def test_an_end_that_was_caught_is_told_nevertheless() -> None:
    """As a backend's error would be caught, or that of a copy."""

    def spin_and_go_on() -> None:
        for _ in range(2):
            with contextlib.suppress(NoProgress):
                spin()

    with pytest.raises(NoProgress), time_limit(SECONDS):
        spin_and_go_on()


def test_a_call_that_is_waited_for_counts() -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            pass

    paused = Pausable(work)
    with pytest.raises(NoProgress), time_limit(SECONDS):
        paused.resume()
    is_over.set()


def test_an_alarm_that_wakes_another_thread_is_heard_by_the_one_that_waits() -> None:
    """The kernel may give it to any thread, such as the one that a progress bar leaves behind."""
    is_over = threading.Event()
    other = threading.Thread(target=is_over.wait)
    other.start()
    ran_to_its_end: list[bool] = []

    def work() -> None:
        assert other.ident is not None
        signal.pthread_kill(other.ident, signal.SIGPROF)
        ran_to_its_end.append(not is_over.wait(10.0))

    try:
        with pytest.raises(NoProgress), time_limit(1000.0):
            Pausable(work).resume()
        assert not ran_to_its_end
    finally:
        is_over.set()
        other.join()


def test_in_another_thread_nothing_is_limited() -> None:
    ended: list[bool] = []

    def work() -> None:
        with time_limit(0.0):
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


def test_a_simulation_that_makes_no_progress_ends_red_before_the_memory_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode, "_STEP_SECONDS", 10 * SECONDS)
    take_the_first_result_for_ever(monkeypatch)
    failure = simulate(1, 500).failure
    assert failure is not None
    assert re.search("no progress after 0.5 s .* in (poll|popleft) ", failure.run.violations[0])
    assert failure.shortest is failure.run
