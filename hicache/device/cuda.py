"""CUDA streams and events under the same contract. Work launches at once; the device runs it."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from hicache.device.recording import RecordedEvent, WorkErrors, own_event
from hicache.errors import ClosedError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.device.base import Event, Work

__all__ = ["CudaDevice", "CudaStream"]

# A copy of one layer takes tens of microseconds; one that takes longer is polled less often.
_FIRST_POLL_SECONDS = 20e-6
_LONGEST_POLL_SECONDS = 1e-3


class CudaDevice:
    """See `Device`. Construct it with `create_device`, which checks that the device is there."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._compute = _ComputeStream("compute", partial(torch.cuda.current_stream, torch_device))

    def create_stream(self, name: str) -> CudaStream:
        """See `Device.create_stream`."""
        torch_stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        return CudaStream(name, lambda: torch_stream)

    def create_event(self) -> RecordedEvent:
        """See `Device.create_event`."""
        return RecordedEvent()

    def compute_stream(self) -> CudaStream:
        """See `Device.compute_stream`; looks up torch's current stream at each call made on it."""
        return self._compute


class _CudaRecording:
    """A recording that is a CUDA event of its own."""

    __slots__ = ("_stream_name", "error", "torch_event")

    def __init__(
        self, torch_stream: torch.cuda.Stream, stream_name: str, error: BaseException | None
    ) -> None:
        self._stream_name = stream_name
        self.error = error
        self.torch_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.torch_event.record(torch_stream)

    @property
    def done(self) -> bool:
        """See `Recording.done`; a kernel that failed counts as done, with its error."""
        try:
            return bool(self.torch_event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if self.error is None:
                self.error = error
            return True

    def wait(self, timeout_seconds: float) -> None:
        """See `Recording.wait`; polls, because CUDA's own wait has no deadline."""
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_POLL_SECONDS
        while not self.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(
                    f"stream {self._stream_name!r} did not reach an event within "
                    f"{timeout_seconds} s: its work hangs or is slow; wait longer if it is slow"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)


class CudaStream:
    """A CUDA stream, given by a function that says which one it is at the moment."""

    def __init__(self, name: str, torch_stream: Callable[[], torch.cuda.Stream]) -> None:
        self.name = name
        self._torch_stream = torch_stream
        self._closed = False
        self._errors = WorkErrors()

    def enqueue(self, work: Work) -> None:
        """See `Stream.enqueue`; calls `work` now with this stream current."""
        with torch.cuda.stream(self._open_stream()):
            self._errors.run(work)

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        target = own_event(event)
        target.set(_CudaRecording(self._open_stream(), self.name, self._errors.take()))

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; the device waits, without a deadline."""
        recording = own_event(event).latest()
        assert isinstance(recording, _CudaRecording), "the event was recorded on another device"
        self._open_stream().wait_event(recording.torch_event)

    def close(self, timeout_seconds: float) -> bool:
        """See `Stream.close`."""
        self._closed = True
        try:
            _CudaRecording(self._torch_stream(), self.name, None).wait(timeout_seconds)
        except TransferError:
            return False
        return True

    def _open_stream(self) -> torch.cuda.Stream:
        if self._closed:
            raise ClosedError(f"stream {self.name!r} is closed; create a new one")
        return self._torch_stream()


class _ComputeStream(CudaStream):
    """The engine's stream, which is not ours to close."""

    def close(self, timeout_seconds: float) -> bool:
        """See `Stream.close`."""
        return True
