"""One call into somebody else's code that may never return."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoneCall"]

_T = TypeVar("_T")

_LOGGER = logging.getLogger(__name__)


class LoneCall(Generic[_T]):
    """A call on a thread of its own, so that whoever wants it done need not wait for ever.

    The thread is a daemon: a call that hangs does not keep the interpreter from ending. For one
    thread that waits.

    Args:
        call: begins at once.
        name: of the thread.
    """

    def __init__(self, call: Callable[[], _T], name: str) -> None:
        self._call = call
        # Guards the four below; held for moments only, never during a call.
        self._lock = threading.Lock()
        self._answer: list[_T] = []
        self._error: BaseException | None = None
        self._given_up = False
        self._undo: Callable[[_T], object] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def returned(self, timeout_seconds: float = 0.0) -> bool:
        """Return whether the call has returned; waits that long at most."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What the call raised; None while it runs."""
        return self._error

    def answer(self) -> _T:
        """Return what the call did, or raise what it raised; it has `returned`."""
        assert not self._thread.is_alive(), "the call has not returned"
        if self._error is not None:
            raise self._error
        return self._answer[0]

    def give_up(self, undo: Callable[[_T], object] | None = None) -> None:
        """Leave the call to itself: what goes wrong from here on is logged.

        Args:
            undo: is given what the call returns after all, on its thread.
        """
        with self._lock:
            self._given_up, self._undo = True, undo
            answers = list(self._answer)
        for answer in answers:
            _undo(undo, answer)

    def _run(self) -> None:
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001  # raised again by `answer`
            with self._lock:
                self._error = error
                given_up = self._given_up
            if given_up:
                _LOGGER.warning("a call that was given up failed in the end: %s", error)
            return
        with self._lock:
            self._answer.append(answer)
            undo = self._undo
        _undo(undo, answer)


def _undo(undo: Callable[[_T], object] | None, answer: _T) -> None:
    if undo is None:
        return
    try:
        undo(answer)
    except Exception as error:  # noqa: BLE001  # nobody waits for it any more
        _LOGGER.warning("what a call that was given up did cannot be undone: %s", error)
