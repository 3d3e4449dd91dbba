"""Processes that work together: all come to the end, or none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["end_with_parent", "run_together"]

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 5.0


def run_together(commands: Sequence[Sequence[str]]) -> str | None:
    """Run a process for each command until all have ended well, or end all once one has not.

    However this returns or raises, none of the processes is left. They have to call
    `end_with_parent`, so that none is when this process is killed, either.

    Returns:
        None when all have ended with status 0, else what has become of the first that did not, in
        words.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands)
        while True:
            statuses = [process.poll() for process in processes]
            if any(statuses):
                return _what_failed(statuses)
            if None not in statuses:
                return None
            time.sleep(_LOOK_SECONDS)
    finally:
        _end(processes)


def end_with_parent() -> None:
    """Let this process end, at once and with status 1, when the one that runs it has.

    Its standard input is the parent's end of a pipe on which nothing ever comes.
    """
    threading.Thread(target=_wait_for_end, name="end-with-parent", daemon=True).start()


def _wait_for_end() -> None:
    os.read(0, 1)
    os._exit(1)


def _what_failed(statuses: Sequence[int | None]) -> str:
    """Name one that was killed, if there is: those that miss it fail after it."""
    number, status = min(
        ((number, status) for number, status in enumerate(statuses) if status),
        key=lambda failed: failed[1],
    )
    if status < 0:
        return f"process {number} was ended by {signal.Signals(-status).name}"
    return f"process {number} ended with status {status}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left, and take note of every end."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
