"""The way from an event loop to the thread that owns a cache, and back."""

from __future__ import annotations

import asyncio
import logging
import queue
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hicache.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CommandFailed", "Mailbox", "NoAnswer"]

_log = logging.getLogger(__name__)
_AnswerT = TypeVar("_AnswerT")


class NoAnswer(HiCacheError):
    """The scheduler's thread has not answered in time, or nobody is there to answer."""


class CommandFailed(HiCacheError):
    """A command ended with an error that is none of hicache's."""


class _Letter(Generic[_AnswerT]):
    """A command and where its answer goes."""

    def __init__(self, command: Callable[[], _AnswerT]) -> None:
        self._command = command
        self.answer: Future[_AnswerT] = Future()

    def carry_out(self) -> None:
        """Run the command, unless whoever asked has given up, and answer with what came of it."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self._command())
        except HiCacheError as error:
            self.answer.set_exception(error)
        except Exception as error:  # noqa: BLE001  # the boundary: a command ends no scheduler
            # Where, not what: the message may hold a secret.
            place = "".join(traceback.format_tb(error.__traceback__))
            name = type(error).__name__
            _log.error("a command failed with %s:\n%s", name, place)
            self.answer.set_exception(CommandFailed(f"failed with {name}; the log says where"))


class Mailbox:
    """Commands that wait for the scheduler's thread, which carries them out between its steps.

    Args:
        max_commands: that wait at a time; one more is refused at once.
        deadline_seconds: how long an answer may take.
    """

    def __init__(self, *, max_commands: int = 32, deadline_seconds: float = 10.0) -> None:
        self._deadline_seconds = deadline_seconds
        self._letters: queue.Queue[_Letter[Any]] = queue.Queue(max_commands)
        self._closed = False

    async def ask(self, command: Callable[[], _AnswerT]) -> _AnswerT:
        """Have `command` called on the scheduler's thread and return its answer; blocks no loop.

        Raises:
            NoAnswer: too many commands wait, or the deadline has passed. A command that had not
                begun by then never does; the message says which it is.
            CommandFailed: the command raised what is no error of hicache.
            HiCacheError: what the command raised.
        """
        letter = _Letter(command)
        if self._closed:
            raise NoAnswer("the scheduler has ended")
        try:
            self._letters.put_nowait(letter)
        except queue.Full:
            raise NoAnswer(
                f"{self._letters.maxsize} commands wait for the scheduler already; nothing was done"
            ) from None
        answer = asyncio.wrap_future(letter.answer)
        done, _ = await asyncio.wait([answer], timeout=self._deadline_seconds)
        if done:
            if answer.cancelled():
                raise NoAnswer("the scheduler has ended; nothing was done")
            return answer.result()
        withdrawn = letter.answer.cancel()
        answer.cancel()
        end = (
            "; nothing was done" if withdrawn else " and is still at it; ask later what came of it"
        )
        raise NoAnswer(f"the scheduler has not answered within {self._deadline_seconds:g} s{end}")

    def serve(self, *, wait_seconds: float = 0.0) -> int:
        """Carry out what waits, on the thread that calls; return how many commands that were.

        Args:
            wait_seconds: how long to wait for a first one.
        """
        num_served = 0
        # No more than the mailbox holds, so that whoever keeps asking cannot keep the scheduler.
        for _ in range(self._letters.maxsize):
            try:
                letter = self._letters.get(timeout=0.0 if num_served else wait_seconds)
            except queue.Empty:
                break
            letter.carry_out()
            num_served += 1
        return num_served

    def close(self) -> None:
        """Refuse what waits and what comes; the scheduler serves no more."""
        self._closed = True
        while not self._letters.empty():
            self._letters.get_nowait().answer.cancel()
