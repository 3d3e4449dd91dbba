"""The storage side of a query, a prefetch and a persist, one backend call a step."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hicache.controller.records import (
    PagesResult,
    PersistJob,
    Phase,
    PrefetchJob,
    QueryJob,
    QueryResult,
    encode_outcomes,
    leading_good,
)
from hicache.storage.answers import is_answer
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.controller.records import OutcomeRuns, StorageJob, StorageResult
    from hicache.storage import HiCacheStorage, Page
    from hicache.types import IntArray, PageHash

__all__ = ["StorageContext", "StorageWork", "create_work"]


_MAX_TEXT = 200
"""Characters of a backend's own answer or error that a message repeats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageContext:
    """What every storage work needs.

    Attributes:
        query_pages, batch_pages: pages that one call asks for, or moves, at most.
        pages_of: host page ids to where their bytes lie; None for what another rank has.
        emit: takes a result; called from worker threads.
    """

    backend: HiCacheStorage
    clock: Clock
    call_timeout_seconds: float
    query_pages: int
    batch_pages: int
    page_bytes: int
    pages_of: Callable[[IntArray], Sequence[Page | None]]
    emit: Callable[[StorageResult], None]


class StorageWork(ABC):
    """A job of one storage operation. A backend that misbehaves ends the job, never the worker.

    `stop` asks it to end before its next call. After `overdue` it ends with the call under way,
    whose pages are not counted: nobody waits for them any more.
    """

    def __init__(self, context: StorageContext) -> None:
        self._context = context
        self._stopped = False
        self._overdue = False
        self._ended = False
        # Between the worker that ends a call and the thread that declares it overdue.
        self._lock = threading.Lock()

    def stop(self) -> None:
        """End before the next call, with what there is."""
        self._stopped = True

    def overdue(self) -> None:
        """See `Work.overdue`."""
        with self._lock:
            if not self._ended:
                self._overdue = True
                self._report(Phase.OVERDUE, error="a backend call is past its deadline")

    def refuse(self, reason: str) -> None:
        """See `Work.refuse`."""
        with self._lock:
            self._ended = True
            self._report(Phase.ENDED, error=reason)

    def step(self) -> bool:
        """See `Work.step`."""
        if self._stopped:
            self.refuse("")
            return False
        clock = self._context.clock
        started = clock.now()
        answer: object = None
        error = ""
        try:
            answer = self._call(started + self._context.call_timeout_seconds)
        except BaseException as caught:  # noqa: BLE001  # a worker outlives even `sys.exit`
            error = f"{type(caught).__name__}: {_text(caught, str)}"
        with self._lock:
            if not self._overdue:
                error = self._keep(answer, error)
            more = self._more() and not error and not self._overdue
            self._ended = not more
            phase = Phase.RUNNING if more else Phase.ENDED
            self._report(phase, seconds=clock.now() - started, error=error)
        return more

    @abstractmethod
    def _call(self, deadline: float) -> object:
        """Make one backend call and return its answer as it came."""

    @abstractmethod
    def _keep(self, answer: object, error: str) -> str:
        """Keep what `answer` says unless there is an `error`; return what is wrong with it."""

    @abstractmethod
    def _more(self) -> bool:
        """Whether another call follows."""

    @abstractmethod
    def _report(self, phase: Phase, *, seconds: float = 0.0, error: str = "") -> None:
        """Emit what the last call gave, if it gave anything, and the phase."""


class _QueryWork(StorageWork):
    def __init__(self, context: StorageContext, job: QueryJob) -> None:
        super().__init__(context)
        self._job = job
        self._num_pages = 0
        self._complete = False

    def _call(self, deadline: float) -> object:
        return self._context.backend.batch_exists(self._batch())

    def _batch(self) -> Sequence[PageHash]:
        return self._job.hashes[self._num_pages : self._num_pages + self._context.query_pages]

    def _keep(self, answer: object, error: str) -> str:
        asked = len(self._batch())
        if not error and (type(answer) is not int or not 0 <= answer <= asked):
            error = f"batch_exists of {asked} keys answered {_text(answer, repr)}"
        found = answer if type(answer) is int and not error else 0
        self._num_pages += found
        self._complete = found < asked or self._num_pages == len(self._job.hashes)
        return error

    def _more(self) -> bool:
        return not self._complete

    def _report(self, phase: Phase, *, seconds: float = 0.0, error: str = "") -> None:
        if phase is not Phase.RUNNING:
            self._context.emit(
                QueryResult(
                    operation_id=self._job.operation_id,
                    generation=self._job.generation,
                    phase=phase,
                    num_pages=self._num_pages,
                    seconds=seconds,
                    error=error,
                )
            )


class _PagesWork(StorageWork):
    """Batches of pages, in order; ends at the first page that is not good.

    What another rank has is good here, as the ranks agree on the minimum of what each has.
    """

    def __init__(self, context: StorageContext, job: PrefetchJob | PersistJob) -> None:
        super().__init__(context)
        self._job = job
        self._parents: Sequence[bytes] = (job.parent_hash, *job.hashes[:-1])
        self._num_good = 0
        # Of the batch under way, or of the one that is not reported yet.
        self._outcomes: OutcomeRuns = ()
        self._places: Sequence[int] = ()
        self._owned: Sequence[int] = ()
        self._all_good = True

    def _call(self, deadline: float) -> object:
        first = self._num_good
        last = min(first + self._context.batch_pages, len(self._job.hashes))
        # All are this rank's until it is known better, so that an error is one of every page.
        self._owned = self._places = range(first, last)
        pages = self._context.pages_of(self._job.host_pages[first:last])
        owned = [page for page in pages if page is not None]
        if len(owned) < len(pages):
            places = zip(self._places, pages, strict=True)
            self._owned = [place for place, page in places if page is not None]
        return self._move(self._owned, owned, deadline) if owned else []

    @abstractmethod
    def _move(self, places: Sequence[int], pages: list[Page], deadline: float) -> object:
        """Call the backend for the pages at some places of the job."""

    def _keep(self, answer: object, error: str) -> str:
        asked = len(self._owned)
        outcomes = [PageOutcome.FAILED] * asked
        if not error:
            if isinstance(answer, list) and is_answer(answer, asked):
                outcomes = answer
            else:
                error = f"a batch of {asked} pages was answered with {_text(answer, repr)}"
        self._outcomes = encode_outcomes(self._spread(outcomes))
        num_good = leading_good(self._outcomes)
        self._num_good += num_good
        self._all_good = num_good == len(self._places)
        return error

    def _spread(self, outcomes: list[PageOutcome]) -> list[PageOutcome]:
        """Return the outcome of every page of the batch from those of this rank's pages."""
        if len(outcomes) == len(self._places):
            return outcomes
        found = dict(zip(self._owned, outcomes, strict=True))
        return [found.get(place, PageOutcome.PRESENT) for place in self._places]

    def _more(self) -> bool:
        return self._all_good and self._num_good < len(self._job.hashes)

    def _report(self, phase: Phase, *, seconds: float = 0.0, error: str = "") -> None:
        outcomes, self._outcomes = self._outcomes, ()
        moved = sum([count for outcome, count in outcomes if outcome is PageOutcome.OK])
        self._context.emit(
            PagesResult(
                operation_id=self._job.operation_id,
                generation=self._job.generation,
                phase=phase,
                num_good=self._num_good,
                outcomes=outcomes,
                num_bytes=moved * self._context.page_bytes,
                seconds=seconds,
                error=error,
            )
        )


class _PrefetchWork(_PagesWork):
    def _move(self, places: Sequence[int], pages: list[Page], deadline: float) -> object:
        hashes = [self._job.hashes[place] for place in places]
        parents = [self._parents[place] for place in places]
        return self._context.backend.batch_get(hashes, parents, pages, deadline=deadline)


class _PersistWork(_PagesWork):
    def _move(self, places: Sequence[int], pages: list[Page], deadline: float) -> object:
        hashes = [self._job.hashes[place] for place in places]
        parents = [self._parents[place] for place in places]
        return self._context.backend.batch_set(hashes, parents, pages, deadline=deadline)


def _text(value: object, to_text: Callable[[object], str]) -> str:
    """Return the start of `to_text(value)`; what a backend gives may refuse even that."""
    try:
        return to_text(value)[:_MAX_TEXT]
    except Exception:  # noqa: BLE001  # reported as what it is
        return f"a {type(value).__name__} that cannot be printed"


def create_work(context: StorageContext, job: StorageJob) -> StorageWork:
    """Return the work that carries out `job`."""
    if isinstance(job, QueryJob):
        return _QueryWork(context, job)
    if isinstance(job, PrefetchJob):
        return _PrefetchWork(context, job)
    return _PersistWork(context, job)
