"""A function that can stop in its middle, so that a simulation goes on while it is under way."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pausable"]

_LOOK_UP_SECONDS = 0.1


class Pausable:
    """Runs a function bit by bit, whenever somebody calls `resume`.

    The function has a thread of its own, because only a thread can stand still inside a call. But
    it runs only while `resume` waits for it: at any moment one thread runs, so the order of all
    events is the caller's and the same every time.

    Args:
        function: what to run; it may call `pause` of this object.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._ended = False
        self._error: BaseException | None = None
        # Two batons: who waits for one stands still until the other side gives it.
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        # A simulation that is broken off must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="hicache-paused-call", daemon=True)
        self._thread.start()

    def resume(self) -> bool:
        """Run on to the next `pause` or to the end; return whether the function has ended.

        Not after the end. Raises what the function raises.
        """
        self._go.release()
        # Not for ever at once: an alarm may have gone to any thread of the process, and is only
        # heard when this one looks up.
        while not self._back.acquire(timeout=_LOOK_UP_SECONDS):
            pass
        if not self._ended:
            return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def pause(self) -> None:
        """Stand still until `resume`; for the function alone."""
        self._back.release()
        self._go.acquire()

    def _run(self) -> None:
        # An alarm has to wake the main thread, which waits for this one: see `time_limit`.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
        self._go.acquire()
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001  # raised again by `resume`
            self._error = error
        self._ended = True
        self._back.release()
