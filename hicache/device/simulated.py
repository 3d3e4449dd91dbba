"""A device on which nothing runs until it is told to, so that a test decides the interleaving.

Single-threaded and deterministic: the same calls give the same order. No time passes, so a wait
has no deadline: it runs what it waits for, or fails at once because that can never run.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from hicache.device.inline import InlineStream
from hicache.device.recording import RecordedEvent, Recording, WorkErrors, own_event
from hicache.errors import ClosedError, ConfigError, TransferError

if TYPE_CHECKING:
    import random

    from hicache.device.base import Event, Work

__all__ = ["SimulatedDevice", "SimulatedStream"]


class SimulatedDevice:
    """See `Device`; `step` runs the next piece of work of a stream."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._streams: dict[str, SimulatedStream] = {}
        self._running: list[str] = []
        self._compute = InlineStream("compute", wait_timeout_seconds=0.0)

    @property
    def pending(self) -> int:
        """Pieces of work that wait in all open streams together."""
        return sum(stream.pending for stream in self._streams.values())

    def create_stream(self, name: str) -> SimulatedStream:
        """See `Device.create_stream`; no two open streams share a name, for `step` to find them."""
        if name in self._streams and not self._streams[name].closed:
            raise ConfigError(f"a stream {name!r} is open already; choose another name")
        stream = self._streams[name] = SimulatedStream(name, self._running)
        return stream

    def create_event(self) -> RecordedEvent:
        """See `Device.create_event`."""
        return RecordedEvent()

    def compute_stream(self) -> InlineStream:
        """See `Device.compute_stream`; its `wait` runs the event's stream up to the event."""
        return self._compute

    def step(self, stream_name: str | None = None, rng: random.Random | None = None) -> bool:
        """Run one piece of work.

        Args:
            stream_name: whose; None for any stream that can run.
            rng: chooses among several; without it the stream created first runs.

        Returns:
            False when nothing could run: all is done, or waits for what can only run elsewhere.
        """
        if stream_name is not None:
            if stream_name not in self._streams:
                raise ConfigError(
                    f"no stream {stream_name!r}; there are {', '.join(self._streams) or 'none'}"
                )
            return self._streams[stream_name].run_one()
        runnable = [stream for stream in self._streams.values() if stream.runnable]
        if not runnable:
            return False
        return (runnable[0] if rng is None else rng.choice(runnable)).run_one()


class _Place:
    """A recording on a simulated stream."""

    __slots__ = ("_stream", "done", "error")

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream
        self.done = False
        self.error: BaseException | None = None

    def reach(self, errors: WorkErrors) -> None:
        self.error = errors.take()
        self.done = True

    def wait(self, timeout_seconds: float) -> None:
        """See `Recording.wait`; runs the stream up to here instead of blocking."""
        while not self.done:
            self._stream.advance()


class _Pending(NamedTuple):
    work: Work
    after: Recording | None = None


class SimulatedStream:
    """A list of pending work.

    Args:
        name: see `Stream.name`.
        running: names of the device's streams that are running now, innermost last; shared by them.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, name: str, running: list[str]) -> None:
        self.name = name
        self._running = running
        self.closed = False
        self._queue: deque[_Pending] = deque()
        self._errors = WorkErrors()

    @property
    def pending(self) -> int:
        """Calls of `enqueue`, `record` and `wait` that have not taken effect."""
        return len(self._queue)

    @property
    def runnable(self) -> bool:
        """Whether `run_one` would run something."""
        if not self._queue or self.name in self._running:
            return False
        after = self._queue[0].after
        return after is None or after.done

    def run_one(self) -> bool:
        """Run the next piece of work unless it waits for another stream; return whether it ran."""
        if not self.runnable:
            return False
        self.advance()
        return True

    def advance(self) -> None:
        """Run the next piece of work, before it whatever it waits for on other streams.

        Raises:
            TransferError: that can never run, because it waits for work that is running now.
        """
        if self.name in self._running:
            chain = self._running[self._running.index(self.name) :]
            raise TransferError(
                f"streams wait for each other: {' -> '.join([*chain, self.name])}; "
                "work must not wait for what its own stream runs later"
            )
        self._running.append(self.name)
        try:
            after = self._queue[0].after
            if after is not None:
                after.wait(0.0)
            self._errors.run(self._queue.popleft().work)
        finally:
            self._running.pop()

    def enqueue(self, work: Work) -> None:
        """See `Stream.enqueue`; unbounded, as nothing runs by itself."""
        self._push(_Pending(work))

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        target = own_event(event)
        place = _Place(self)
        self._push(_Pending(partial(place.reach, self._errors)))
        target.set(place)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        self._push(_Pending(_nothing, after=own_event(event).latest()))

    def close(self, timeout_seconds: float) -> bool:
        """See `Stream.close`; runs all that is pending, and what that waits for."""
        self.closed = True
        while self._queue:
            self.advance()
        return True

    def _push(self, item: _Pending) -> None:
        if self.closed:
            raise ClosedError(f"stream {self.name!r} is closed; create a new one")
        self._queue.append(item)


def _nothing() -> None:
    """The work of a wait."""
