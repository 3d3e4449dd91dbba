"""A CPU as a device: every stream is a worker thread, so ordering bugs show without a GPU."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from hicache.device.inline import InlineStream
from hicache.device.recording import RecordedEvent, WorkErrors, own_event
from hicache.errors import CapacityError, ClosedError, ConfigError, TransferError

if TYPE_CHECKING:
    from hicache.device.base import Event, Work

__all__ = ["CpuDevice", "CpuStream"]


class CpuDevice:
    """See `Device`.

    Args:
        wait_timeout_seconds: after how long a stream gives up a `Stream.wait`.
        max_pending: how much one stream queues, in calls of `enqueue`, `record` and `wait`; the
            next one raises `CapacityError`.
    """

    def __init__(self, *, wait_timeout_seconds: float = 30.0, max_pending: int = 65_536) -> None:
        if not 0 < wait_timeout_seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"wait_timeout_seconds must be above 0 and finite, not {wait_timeout_seconds}"
            )
        if max_pending < 1:
            raise ConfigError(f"max_pending must be at least 1, not {max_pending}")
        self.torch_device = torch.device("cpu")
        self._wait_timeout_seconds = wait_timeout_seconds
        self._max_pending = max_pending
        self._compute = InlineStream("compute", wait_timeout_seconds=wait_timeout_seconds)

    def create_stream(self, name: str) -> CpuStream:
        """See `Device.create_stream`; starts a thread."""
        return CpuStream(
            name,
            wait_timeout_seconds=self._wait_timeout_seconds,
            max_pending=self._max_pending,
        )

    def create_event(self) -> RecordedEvent:
        """See `Device.create_event`."""
        return RecordedEvent()

    def compute_stream(self) -> InlineStream:
        """See `Device.compute_stream`."""
        return self._compute


class _Latch:
    """A recording that its stream's worker opens when it gets there."""

    __slots__ = ("_opened", "_stream_name", "error")

    def __init__(self, stream_name: str) -> None:
        self._stream_name = stream_name
        self._opened = threading.Event()
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """See `Recording.done`."""
        return self._opened.is_set()

    def open(self, errors: WorkErrors) -> None:
        """Let everybody pass who waits; for the worker alone."""
        self.error = errors.take()
        self._opened.set()

    def wait(self, timeout_seconds: float) -> None:
        """See `Recording.wait`."""
        if not self._opened.wait(timeout_seconds):
            raise TransferError(
                f"stream {self._stream_name!r} did not reach an event within {timeout_seconds} s: "
                "its work hangs or is slow; wait longer if it is slow"
            )


class CpuStream:
    """A stream whose work runs on a thread of its own. Any thread may enqueue.

    The thread is a daemon, so that work that hangs cannot keep the process alive; `close` is what
    ends it in order.
    """

    def __init__(self, name: str, *, wait_timeout_seconds: float, max_pending: int) -> None:
        self.name = name
        self._wait_timeout_seconds = wait_timeout_seconds
        self._max_pending = max_pending
        # Guards _closed together with the queue's tail: nothing follows the closing None.
        self._lock = threading.Lock()
        self._closed = False
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._errors = WorkErrors()
        self._thread = threading.Thread(target=self._serve, name=f"hicache-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Work) -> None:
        """See `Stream.enqueue`; never blocks."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"stream {self.name!r} is closed; create a new one")
            if self._queue.qsize() >= self._max_pending:
                raise CapacityError(
                    f"stream {self.name!r} already holds {self._max_pending} pieces of work; "
                    "wait for one of its events before enqueueing more"
                )
            self._queue.put(work)

    def record(self, event: Event) -> None:
        """See `Stream.record`."""
        target = own_event(event)
        latch = _Latch(self.name)
        self.enqueue(partial(latch.open, self._errors))
        target.set(latch)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`; the deadline runs from when the worker begins to wait."""
        self.enqueue(partial(own_event(event).latest().wait, self._wait_timeout_seconds))

    def close(self, timeout_seconds: float) -> bool:
        """See `Stream.close`; not from the stream's own work."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._errors.run(work)
            except BaseException as error:  # noqa: BLE001 - the thread's boundary: kept as any other
                self._errors.keep(error)
            # While the thread sleeps, finished work must not keep its tensors alive.
            del work
