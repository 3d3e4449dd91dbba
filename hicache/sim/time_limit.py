"""An end to what would never end."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hicache.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["NoProgress", "time_limit"]


class NoProgress(InvariantViolation):
    """What took so long that it would never have ended."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Break off what is done in this context when it takes too long.

    A loop without an end would otherwise hold up the run for ever, and one that collects something
    would take all memory. Processor time of the process counts, so that a busy machine does no
    harm. Limits only what runs in the main thread or is waited for by it, as only there a signal
    can raise; does nothing in another thread. One context at a time.

    Args:
        seconds: of processor time.

    Raises:
        NoProgress: the time is over, said even if what was broken off has caught it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    expired: list[str] = []

    def expire(_signal: int, frame: FrameType | None) -> None:
        assert frame is not None
        place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        expired.append(f"no progress after {seconds} s of processor time, in {place}")
        raise NoProgress(expired[:1])

    before = signal.signal(signal.SIGPROF, expire)
    # Again and again, because what never ends may catch what is raised and go on.
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    if expired:
        raise NoProgress(expired[:1])
