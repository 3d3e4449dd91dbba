"""A mover in another process: the deciding side here; streams, pools and storage there.

The model for an engine whose scheduler and worker are two processes. What crosses the pipe are the
plain records of `hicache.controller.records` and the configuration of a store.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from typing import TYPE_CHECKING, Any

from hicache.errors import ClosedError, HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from hicache.config import StorageConfig
    from hicache.controller import Mover
    from hicache.controller.records import LoadJob, Result, StorageJob, StorageReport, WriteJob
    from hicache.types import OperationId

__all__ = ["RemoteMover", "serve_mover"]

_POLL_SECONDS = 0.001
"""How long the moving side waits for a call before it looks for results."""

_CLOSE_SECONDS = 5.0
"""How long the moving side waits for its copies and calls when the deciding side is gone."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """A method of the mover, or a command. Without a serial number nobody waits for an answer."""

    name: str
    arguments: tuple[object, ...]
    serial: int | None = None


@dataclasses.dataclass(frozen=True)
class _Reply:
    serial: int
    value: object = None
    error: HiCacheError | None = None


class RemoteMover:
    """See `Mover`; the other end of `connection` is served by `serve_mover`.

    Belongs to one thread. Submitting, ending and polling take as long as it takes to put a record
    into the pipe; `submit_load` waits for the producer index, one round trip. A thread of its own
    empties the pipe, so that neither side can block the other.

    Once the moving process is gone, every call raises `ClosedError`, but for `close`.

    Args:
        connection: a duplex pipe; closed with the mover. This process must not hold its other end,
            or it does not notice that the moving process is gone.
        reply_timeout_seconds: how long an answer may take on top of what the call itself may; after
            that the moving process counts as gone.
    """

    def __init__(
        self, connection: Connection[Any, Any], *, reply_timeout_seconds: float = 30.0
    ) -> None:
        self._connection = connection
        self._reply_timeout_seconds = reply_timeout_seconds
        self._next_serial = 0
        self._results: queue.SimpleQueue[list[Result]] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        self._gone = threading.Event()
        self._closed = False
        self._receiver = threading.Thread(
            target=self._receive, name="hicache-remote-mover", daemon=True
        )
        self._receiver.start()

    def submit_write(self, job: WriteJob) -> None:
        """See `Mover.submit_write`."""
        self._send(_Call("submit_write", (job,)))

    def finish_write(self, operation_id: OperationId, *, wanted: bool) -> None:
        """See `Mover.finish_write`."""
        self._send(_Call("finish_write", (operation_id, wanted)))

    def submit_load(self, job: LoadJob) -> int:
        """See `Mover.submit_load`."""
        producer: int = self.call("submit_load", job)
        return producer

    def submit_storage(self, job: StorageJob) -> None:
        """See `Mover.submit_storage`."""
        self._send(_Call("submit_storage", (job,)))

    def end(self, operation_id: OperationId) -> None:
        """See `Mover.end`."""
        self._send(_Call("end", (operation_id,)))

    def poll(self) -> list[Result]:
        """See `Mover.poll`."""
        gone = self._gone.is_set()
        results: list[Result] = []
        while not self._results.empty():
            results += self._results.get()
        if gone and not results and not self._closed:
            raise _gone()
        return results

    def attach_storage(self, config: StorageConfig) -> int:
        """See `Mover.attach_storage`."""
        batch_pages: int = self.call("attach_storage", config)
        return batch_pages

    def detach_storage(self, timeout_seconds: float) -> bool:
        """See `Mover.detach_storage`."""
        detached: bool = self.call("detach_storage", timeout_seconds, may_take=timeout_seconds)
        return detached

    def discard_storage(self) -> None:
        """See `Mover.discard_storage`."""
        self.call("discard_storage")

    def clear_storage(self) -> int:
        """See `Mover.clear_storage`."""
        num_removed: int = self.call("clear_storage")
        return num_removed

    def storage_report(self) -> StorageReport:
        """See `Mover.storage_report`; one round trip."""
        report: StorageReport = self.call("storage_report")
        return report

    def close(self, timeout_seconds: float) -> bool:
        """See `Mover.close`; True as well when the moving process is gone, and all with it."""
        if self._closed:
            return True
        try:
            stopped: bool = self.call("close", timeout_seconds, may_take=timeout_seconds)
        except ClosedError:
            self._receiver.join(timeout_seconds)
            stopped = not self._receiver.is_alive()
        if stopped:
            self._closed = True
            # The moving side hangs up, or has done so.
            self._receiver.join(self._reply_timeout_seconds)
            self._connection.close()
        return stopped

    def call(self, name: str, *arguments: object, may_take: float = 0.0) -> Any:
        """Call a method of the other side's mover, or one of its commands, and wait for the answer.

        Args:
            name: of the method or command.
            arguments: records that pickle.
            may_take: seconds that the call itself may take.

        Raises:
            HiCacheError: what the call raised there; another exception comes as its text.
        """
        serial = self._next_serial
        self._next_serial += 1
        self._send(_Call(name, arguments, serial))
        try:
            reply = self._replies.get(timeout=may_take + self._reply_timeout_seconds)
        except queue.Empty:
            reply = None
        if reply is None:
            self._gone.set()
            raise _gone()
        assert reply.serial == serial
        if reply.error is not None:
            raise reply.error
        return reply.value

    def _send(self, call: _Call) -> None:
        if self._gone.is_set():
            raise _gone()
        try:
            self._connection.send(call)
        except OSError as error:
            self._gone.set()
            raise _gone() from error

    def _receive(self) -> None:
        """Empty the pipe until the other side hangs up; the body of the thread."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, _Reply):
                    self._replies.put(message)
                else:
                    self._results.put(message)
        except (EOFError, OSError):
            self._gone.set()
            self._replies.put(None)


def serve_mover(
    connection: Connection[Any, Any],
    mover: Mover,
    *,
    commands: Mapping[str, Callable[..., object]] | None = None,
) -> None:
    """Carry out what a `RemoteMover` asks for, until it has closed the mover or is gone.

    Blocks; the body of the moving process, which owns `mover` and `connection`. An error in a call
    that nobody waits for ends it, and thereby the pipe.

    Args:
        connection: the other end of the pipe.
        mover: carries out the jobs.
        commands: what `RemoteMover.call` finds besides the methods of the mover.
    """
    try:
        stopped = False
        while not stopped:
            if connection.poll(_POLL_SECONDS):
                call: _Call = connection.recv()
                function = (commands or {}).get(call.name) or getattr(mover, call.name)
                if call.serial is None:
                    function(*call.arguments)
                    continue
                reply = _answer(function, call.arguments, call.serial)
                stopped = call.name == "close" and reply.value is True
                connection.send(mover.poll())
                connection.send(reply)
            elif results := mover.poll():
                connection.send(results)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        mover.close(_CLOSE_SECONDS)
    finally:
        connection.close()


def _answer(function: Callable[..., object], arguments: tuple[object, ...], serial: int) -> _Reply:
    try:
        return _Reply(serial, function(*arguments))
    except HiCacheError as error:
        return _Reply(serial, error=error)
    except Exception as error:  # noqa: BLE001 - the process's boundary: reported to the caller
        return _Reply(serial, error=HiCacheError(f"{type(error).__name__}: {error}"))


def _gone() -> ClosedError:
    return ClosedError("the moving process is gone; start a new one and build a new cache on it")
