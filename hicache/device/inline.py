"""The compute stream of devices whose model computes in the calling thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.device.recording import WorkErrors, own_event

if TYPE_CHECKING:
    from hicache.device.base import Event, Work

__all__ = ["InlineStream"]


class _Passed:
    """A recording that is done when it is made."""

    __slots__ = ("error",)
    done = True

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def wait(self, timeout_seconds: float) -> None:
        """See `Recording.wait`."""


class InlineStream:
    """A stream whose work runs at once in the calling thread.

    It holds no queue, so nothing bounds it and there is nothing to close. For one thread at a time:
    the engine's.
    """

    def __init__(self, name: str, *, wait_timeout_seconds: float) -> None:
        self.name = name
        self._wait_timeout_seconds = wait_timeout_seconds
        self._errors = WorkErrors()

    def enqueue(self, work: Work) -> None:
        """See `Stream.enqueue`; returns when `work` has run."""
        self._errors.run(work)

    def record(self, event: Event) -> None:
        """See `Stream.record`; `event` is done when this returns."""
        own_event(event).set(_Passed(self._errors.take()))

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; blocks the calling thread, `TransferError` at the deadline."""
        own_event(event).latest().wait(self._wait_timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """See `Stream.close`."""
        return True
