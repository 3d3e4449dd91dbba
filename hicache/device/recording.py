"""What the streams of all devices share: events as recordings, and errors kept for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache.errors import TransferError

if TYPE_CHECKING:
    from hicache.device.base import Event, Work

__all__ = ["RecordedEvent", "Recording", "WorkErrors", "own_event"]


class Recording(Protocol):
    """One `Stream.record`: a place in a stream's order, passed once and never again."""

    @property
    def done(self) -> bool:
        """Whether the stream has passed the place."""

    @property
    def error(self) -> BaseException | None:
        """See `Event.error`."""

    def wait(self, timeout_seconds: float) -> None:
        """Block until done; `TransferError` after `timeout_seconds`."""


class RecordedEvent:
    """The event of every device: a reference to its latest recording.

    Changing the reference is one assignment, so threads that hold an older recording keep it.
    """

    __slots__ = ("_recording",)

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @property
    def error(self) -> BaseException | None:
        """See `Event.error`."""
        return None if self._recording is None else self._recording.error

    def query(self) -> bool:
        """See `Event.query`."""
        return self._recording is not None and self._recording.done

    def synchronize(self, timeout_seconds: float) -> None:
        """See `Event.synchronize`."""
        self.latest().wait(timeout_seconds)

    def latest(self) -> Recording:
        """Return the latest recording; `TransferError` when there is none."""
        if self._recording is None:
            raise TransferError(
                "an event was waited for before it was recorded; record it on a stream first"
            )
        return self._recording

    def set(self, recording: Recording) -> None:
        """Make `recording` the latest."""
        self._recording = recording


def own_event(event: Event) -> RecordedEvent:
    """Return `event` as what devices make; an event from elsewhere is a programmer's error."""
    assert isinstance(event, RecordedEvent), f"{event!r} was not made by Device.create_event"
    return event


class WorkErrors:
    """The first exception of a stream's work since the last recording.

    Not thread-safe: used by the one thread that runs the stream's work.
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: BaseException | None = None

    def run(self, work: Work) -> None:
        """Call `work` and keep what it raises.

        `KeyboardInterrupt` and `SystemExit` are not kept: they belong to the thread that calls.
        """
        try:
            work()
        except Exception as error:  # noqa: BLE001 - kept here, reported by the next event
            self.keep(error)

    def keep(self, error: BaseException) -> None:
        """Keep `error` unless one is kept already."""
        if self._first is None:
            self._first = error

    def take(self) -> BaseException | None:
        """Return what is kept and forget it."""
        first, self._first = self._first, None
        return first
