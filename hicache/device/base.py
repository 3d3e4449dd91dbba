"""The contract of streams and events, the same on a CPU, on CUDA and in a simulation.

What holds on every device:

- A stream runs its work in the order in which it was enqueued. Streams are unordered among
  themselves but for `Stream.wait`.
- Each `record` of an event is a recording of its own. Who waits, waits for the latest recording at
  that moment; recording the event again afterwards concerns only those who wait later.
- An event that was never recorded cannot be waited for: that is a `TransferError` at once, because
  going on would read bytes that nobody has promised.
- Work that raises does not stop its stream. The next event recorded on the stream carries the
  exception, and only that one; waiting for an event never raises what the event carries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

__all__ = ["Device", "Event", "Stream", "Work"]

Work: TypeAlias = Callable[[], None]
"""What a stream runs. It must not block on its own stream."""


class Event(Protocol):
    """A place in a stream's order. Any thread may ask or wait; `Stream.record` sets it."""

    @property
    def error(self) -> BaseException | None:
        """What went wrong since the `record` before on the same stream, if anything did.

        The first exception raised by work between the two, or the `TransferError` of a
        `Stream.wait` that passed its deadline. Final once `query` is true.
        """

    def query(self) -> bool:
        """Return whether all that was enqueued before the latest `record` has run.

        Never blocks. False when the event was never recorded.
        """

    def synchronize(self, timeout_seconds: float) -> None:
        """Block the calling thread until the latest recording is done; does not raise `error`.

        Raises:
            TransferError: not done within `timeout_seconds`, or never recorded.
        """


class Stream(Protocol):
    """A queue of work that runs in order. Without a lock of its own: one thread at a time."""

    @property
    def name(self) -> str:
        """What the stream is called in errors and in thread names."""

    def enqueue(self, work: Work) -> None:
        """Run `work` after all that was enqueued before.

        A CPU or simulated stream runs it later. A CUDA or compute stream calls it now, with the
        stream current, so that the kernels it launches run in order.

        Raises:
            ClosedError: the stream is closed.
            CapacityError: too much is queued; nothing was added.
        """

    def record(self, event: Event) -> None:
        """Make `event` mark this place in the stream; raises as `enqueue` does."""

    def wait(self, event: Event) -> None:
        """Start later work of this stream only after the latest recording of `event`.

        Returns at once except on a CPU's compute stream, which blocks its caller. A wait that
        passes the device's deadline gives up with a `TransferError`: a worker reports it through
        the next recorded event and goes on, a compute stream raises it. CUDA waits on the device
        and knows no deadline.

        Raises:
            TransferError: `event` was never recorded.
            ClosedError, CapacityError: as `enqueue`.
        """

    def close(self, timeout_seconds: float) -> bool:
        """Refuse new work, run what is queued and stop. Idempotent.

        A compute stream belongs to the engine: closing it does nothing and returns True.

        Returns:
            False when work was still running after `timeout_seconds`. It is left to end by itself;
            a later call looks again.
        """


class Device(Protocol):
    """Where the model computes, and where its streams and events come from."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of the device pool live."""

    def create_stream(self, name: str) -> Stream:
        """Return a new stream, which the caller closes."""

    def create_event(self) -> Event:
        """Return an event that was not recorded yet. Cheap: one per layer and load."""

    def compute_stream(self) -> Stream:
        """Return the stream that the model computes on.

        On CUDA torch's current stream of the calling thread. Elsewhere an inline stream, one for
        the whole device: its work runs in the calling thread at once.
        """
