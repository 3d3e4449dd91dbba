"""Threads that carry out storage work, one backend call at a time."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hicache.clock import Clock

__all__ = ["Executor", "ThreadExecutor", "Work"]


class Work(Protocol):
    """A storage operation that goes on call by call, so that several progress side by side."""

    def step(self) -> bool:
        """Make one backend call, which may block; return whether there is more to do.

        Reports its results itself and raises nothing.
        """

    def overdue(self) -> None:
        """Report that the call under way is past its deadline; no further step will follow."""

    def refuse(self, reason: str) -> None:
        """Report that the work ends before its next step."""


class Executor(Protocol):
    """Runs `Work` in turn."""

    @property
    def num_abandoned(self) -> int:
        """Calls past their deadline that have not returned yet."""

    def submit(self, work: Work) -> None:
        """Queue `work`; returns at once."""

    def poll(self) -> None:
        """Notice calls that are past their deadline; never blocks."""

    def close(self, timeout_seconds: float) -> bool:
        """Refuse what is queued, let calls under way return, stop. Idempotent.

        Returns:
            False when a call was still running after `timeout_seconds`; its thread is left behind
            and a later `close` looks again.
        """


class _Worker:
    """One thread and the call that it is in."""

    def __init__(self, executor: ThreadExecutor, name: str) -> None:
        self.work: Work | None = None
        self.since = 0.0
        self.replaced = False
        # A hung call must not keep the interpreter from ending.
        self.thread = threading.Thread(target=executor.run, args=(self,), name=name, daemon=True)


class ThreadExecutor:
    """A fixed number of threads over one queue; a thread whose call hangs is replaced.

    Args:
        num_workers: calls in progress at a time.
        clock: what `call_timeout_seconds` is measured on.
        call_timeout_seconds: a call under way for longer is overdue.
        max_abandoned: hung threads that are replaced. Beyond these the pool shrinks, and when no
            thread is left, queued work is refused, so that nothing waits for ever. A thread whose
            call returns after all fills a gap in the pool.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        clock: Clock,
        call_timeout_seconds: float,
        max_abandoned: int = 8,
    ) -> None:
        self._num_workers = num_workers
        self._clock = clock
        self._call_timeout_seconds = call_timeout_seconds
        self._max_abandoned = max_abandoned
        # Guards everything below; held for moments only, never during a call.
        self._condition = threading.Condition()
        self._queue: deque[Work] = deque()
        self._workers: list[_Worker] = []
        self._hung: list[_Worker] = []
        self._num_started = 0
        self._closing = False
        # No call can be overdue before; for the one thread that calls `poll`.
        self._look_again_at = clock.now() + call_timeout_seconds
        for _ in range(num_workers):
            self._start_worker()

    @property
    def num_abandoned(self) -> int:
        """See `Executor.num_abandoned`."""
        with self._condition:
            return len(self._hung)

    def submit(self, work: Work) -> None:
        """See `Executor.submit`."""
        with self._condition:
            accepted = not self._closing and bool(self._workers)
            if accepted:
                self._queue.append(work)
                self._condition.notify()
        if not accepted:
            work.refuse("no storage worker is left; calls hang or the executor is closed")

    def poll(self) -> None:
        """See `Executor.poll`; takes no lock while no call can be overdue."""
        now = self._clock.now()
        if now <= self._look_again_at:
            return
        overdue: list[Work] = []
        stranded: list[Work] = []
        with self._condition:
            # A call that begins from here on is overdue later than one that begins now.
            oldest = self._clock.now()
            for worker in list(self._workers):
                if worker.work is None:
                    continue
                if now - worker.since <= self._call_timeout_seconds:
                    oldest = min(oldest, worker.since)
                    continue
                worker.replaced = True
                self._workers.remove(worker)
                self._hung.append(worker)
                overdue.append(worker.work)
                if len(self._hung) <= self._max_abandoned and not self._closing:
                    self._start_worker()
            if not self._workers:
                stranded = list(self._queue)
                self._queue.clear()
            self._look_again_at = oldest + self._call_timeout_seconds
        for work in overdue:
            work.overdue()
        for work in stranded:
            work.refuse("every storage worker is in a call that hangs")

    def close(self, timeout_seconds: float) -> bool:
        """See `Executor.close`."""
        with self._condition:
            self._closing = True
            refused = list(self._queue)
            self._queue.clear()
            self._condition.notify_all()
            threads = [worker.thread for worker in [*self._workers, *self._hung]]
        for work in refused:
            work.refuse("the storage workers were stopped")
        end = self._clock.now() + timeout_seconds
        for thread in threads:
            thread.join(max(0.0, end - self._clock.now()))
        return not any(thread.is_alive() for thread in threads)

    def run(self, worker: _Worker) -> None:
        """Serve the queue until the executor closes; the body of a worker's thread."""
        _leave_wakers_their_core()
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    self._condition.wait()
                if not self._queue:
                    return
                work = worker.work = self._queue.popleft()
                worker.since = self._clock.now()
            more = work.step()
            with self._condition:
                worker.work = None
                # A call can return in the moment in which it is declared overdue.
                requeue = more and not worker.replaced and not self._closing
                if requeue:
                    self._queue.append(work)
                    self._condition.notify()
                needed = not worker.replaced or self._take_back(worker)
            if more and not requeue:
                work.refuse("the storage workers were stopped, or the call was past its deadline")
            if not needed:
                return

    def _take_back(self, worker: _Worker) -> bool:
        """Let a thread whose call hung fill a gap in the pool; False when there is none."""
        self._hung.remove(worker)
        worker.replaced = len(self._workers) >= self._num_workers
        if not worker.replaced:
            self._workers.append(worker)
        return not worker.replaced

    def _start_worker(self) -> None:
        worker = _Worker(self, f"hicache-storage-{self._num_started}")
        self._num_started += 1
        self._workers.append(worker)
        worker.thread.start()


def _leave_wakers_their_core() -> None:
    """Let the calling thread wait for a core, when it is woken, rather than take its waker's.

    Where no core is free, the kernel runs a thread that has slept for long in place of the one that
    wakes it: so to queue a job could cost the scheduler's thread milliseconds. Threads of the batch
    class never do that. They have the same share of the cores as others, and changing to it needs
    no privilege. Another class was chosen by somebody and stays, and so does everything on systems
    that lack this or refuse it.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
