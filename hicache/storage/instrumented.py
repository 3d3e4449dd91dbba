"""Counts what a backend is asked and answers, and knows whether it is well."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from hicache.storage.answers import count_outcomes, error_text, is_page_count
from hicache.storage.base import StorageFigures
from hicache.storage.latency import LatencyRecorder
from hicache.storage.wrapper import StorageVerb, StorageWrapper
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache.clock import Clock
    from hicache.storage.base import HiCacheStorage, Page
    from hicache.storage.latency import LatencyHistogram
    from hicache.types import PageHash

__all__ = ["HealthState", "InstrumentedStorage", "StorageHealth", "StorageSnapshot", "VerbSnapshot"]

_AnswerT = TypeVar("_AnswerT")
_Counts: TypeAlias = "dict[PageOutcome, int]"

_BAD = (PageOutcome.FAILED, PageOutcome.TIMEOUT, PageOutcome.NO_SPACE)
_REASONED = (PageOutcome.FAILED, PageOutcome.NO_SPACE)


class HealthState(str, Enum):
    """Whether a backend does its work."""

    GREEN = "green"
    RED = "red"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageHealth:
    """How a backend is.

    Attributes:
        state: red when one of its verbs is.
        since_seconds: when the state began, on the backend's clock.
        last_error: the newest error, for people; stays when the state is green again. It can be
            one that no call failed by, such as that of a tier in front of others.
    """

    state: HealthState
    since_seconds: float
    last_error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerbSnapshot:
    """The calls of one verb so far; no number ever decreases.

    Attributes:
        num_calls: that returned.
        num_broken_calls: of these, those that raised or whose answer was none.
        pages: that the others were asked for, by outcome; what never happened is left out.
            `batch_exists` finds pages (`OK`) up to one that is a `MISS`.
        num_bytes: payload of the pages that moved.
        latency: how long the calls took.
    """

    num_calls: int
    num_broken_calls: int
    pages: Mapping[PageOutcome, int]
    num_bytes: int
    latency: LatencyHistogram


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageSnapshot:
    """What a backend has done, and how it is.

    Attributes:
        verbs: the calls so far, by verb.
        health: see `StorageHealth`.
        figures: of its store, after the newest call that moved or removed pages.
    """

    verbs: Mapping[StorageVerb, VerbSnapshot]
    health: StorageHealth
    figures: StorageFigures = dataclasses.field(default_factory=StorageFigures)


class _VerbRecord:
    """The calls of one verb, and since when they are bad; not thread-safe."""

    def __init__(self) -> None:
        self.num_broken_calls = 0
        self.pages: Counter[PageOutcome] = Counter()
        self.num_bytes = 0
        self.latency = LatencyRecorder()
        self.num_bad_in_a_row = 0
        self.red_since: float | None = None

    def add(self, counts: _Counts | None, seconds: float, *, page_bytes: int = 0) -> None:
        self.latency.add(seconds)
        if counts is None:
            self.num_broken_calls += 1
            return
        for outcome, count in counts.items():
            self.pages[outcome] += count
        self.num_bytes += counts.get(PageOutcome.OK, 0) * page_bytes

    def snapshot(self) -> VerbSnapshot:
        latency = self.latency.histogram()
        return VerbSnapshot(
            num_calls=latency.num_calls,
            num_broken_calls=self.num_broken_calls,
            pages=dict(self.pages),
            num_bytes=self.num_bytes,
            latency=latency,
        )


class InstrumentedStorage(StorageWrapper):
    """Counts calls, pages, bytes and durations, and judges every call.

    A call is bad when it raised, when its answer was none, or when a page was `FAILED`, `TIMEOUT`
    or `NO_SPACE`. The verb turns red after a bad call that did nothing good, or after
    `red_after_calls` bad ones in a row, and green again with the next good one; `clear` is counted
    and not judged. Verbs are judged apart, because a backend whose reads fail still answers
    `batch_exists` from memory. A call whose deadline had passed before it began, and an empty
    batch, say nothing.

    Thread-safe; one lock guards the counters and is never held during a call.
    """

    def __init__(self, inner: HiCacheStorage, *, clock: Clock, red_after_calls: int = 3) -> None:
        """Stand around `inner`, which is green.

        Args:
            inner: does the work.
            clock: for durations and moments.
            red_after_calls: bad calls in a row after which the backend is red.
        """
        super().__init__(inner)
        self._clock = clock
        self._red_after_calls = red_after_calls
        self._lock = threading.Lock()
        self._records = {verb: _VerbRecord() for verb in StorageVerb}
        self._green_since = clock.now()
        self._last_error: str | None = None
        # What the backend told when it was last asked.
        self._told: str | None = None
        self._figures = StorageFigures()
        # Held while the backend is asked: by one at a time, and should that hang, by no other.
        self._figures_lock = threading.Lock()

    def snapshot(self) -> StorageSnapshot:
        """Return everything as it was noted; asks nobody, so it waits for no call."""
        with self._lock:
            reds = [one.red_since for one in self._records.values() if one.red_since is not None]
            return StorageSnapshot(
                verbs={verb: record.snapshot() for verb, record in self._records.items()},
                health=StorageHealth(
                    state=HealthState.RED if reds else HealthState.GREEN,
                    since_seconds=min(reds, default=self._green_since),
                    last_error=self._last_error,
                ),
                figures=self._figures,
            )

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        """See `HiCacheStorage.batch_exists`."""
        return self._measure(
            StorageVerb.EXISTS,
            lambda: self._inner.batch_exists(keys),
            lambda answer: _count_found(answer, len(keys)),
            judged=len(keys) > 0,
        )

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_get`."""
        return self._measure(
            StorageVerb.GET,
            lambda: self._inner.batch_get(keys, parent_keys, pages, deadline=deadline),
            lambda answer: count_outcomes(answer, len(keys)),
            page_bytes=_length(pages),
            judged=len(keys) > 0 and self._clock.now() < deadline,
        )

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_set`."""
        return self._measure(
            StorageVerb.SET,
            lambda: self._inner.batch_set(keys, parent_keys, pages, deadline=deadline),
            lambda answer: count_outcomes(answer, len(keys)),
            page_bytes=_length(pages),
            judged=len(keys) > 0 and self._clock.now() < deadline,
        )

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`; with it begins the work, so figures are known."""
        super().register_memory(regions)
        self._take_figures()

    def clear(self) -> int:
        """See `HiCacheStorage.clear`."""
        return self._measure(StorageVerb.CLEAR, self._inner.clear, lambda _answer: {}, judged=False)

    def _measure(
        self,
        verb: StorageVerb,
        call: Callable[[], _AnswerT],
        count: Callable[[_AnswerT], _Counts | None],
        *,
        page_bytes: int = 0,
        judged: bool,
    ) -> _AnswerT:
        """Make a call and note its duration and the pages that `count` sees in its answer."""
        record = self._records[verb]
        began = self._clock.now()
        try:
            answer = call()
        except BaseException as raised:
            told = self._newest_error()
            with self._lock:
                self._note_told(told)
                record.add(None, self._clock.now() - began)
                if judged:
                    self._judge(verb, None, error_text(raised))
            raise
        seconds = self._clock.now() - began
        counts = count(answer)
        told = self._newest_error()
        error = _error_in(counts, told)
        with self._lock:
            self._note_told(told)
            record.add(counts, seconds, page_bytes=page_bytes)
            if judged:
                self._judge(verb, counts, error)
        if verb is not StorageVerb.EXISTS:
            self._take_figures()
        return answer

    def _take_figures(self) -> None:
        """Ask for figures now, on a thread that calls the backend anyway; a scrape must not."""
        if not self._figures_lock.acquire(blocking=False):
            return
        try:
            figures = self._inner.figures()
            if isinstance(figures, StorageFigures):
                with self._lock:
                    self._figures = figures
        except Exception as error:  # noqa: BLE001  # told; the call before has not failed by it
            with self._lock:
                self._last_error = f"figures: {error_text(error)}"
        finally:
            self._figures_lock.release()

    def _note_told(self, told: str | None) -> None:
        """Keep an error that is new, whether or not the call failed by it; the lock is held."""
        if told not in (None, self._told):
            self._last_error = self._told = told

    def _judge(self, verb: StorageVerb, counts: _Counts | None, error: str | None) -> None:
        """Let a call decide the colour of its verb; the lock is held."""
        record = self._records[verb]
        if error is None:
            record.num_bad_in_a_row = 0
            if record.red_since is not None:
                record.red_since = None
                self._green_since = self._clock.now()
            return
        self._last_error = f"{verb.value}: {error}"
        record.num_bad_in_a_row += 1
        did_nothing = counts is None or not any(outcome.good for outcome in counts)
        if record.red_since is None and (
            did_nothing or record.num_bad_in_a_row >= self._red_after_calls
        ):
            record.red_since = self._clock.now()


def _error_in(counts: _Counts | None, told: str | None) -> str | None:
    """Return what is bad about an answer, in words."""
    if counts is None:
        return "the answer has a wrong shape"
    bad = [outcome for outcome in _BAD if outcome in counts]
    if not bad:
        return None
    numbers = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in bad)
    return numbers if told is None or not {*bad} & {*_REASONED} else f"{numbers}: {told}"


def _length(pages: Sequence[Page]) -> int:
    """Return the bytes of each page; all have the same."""
    return sum(num_bytes for _, num_bytes in pages[0]) if pages else 0


def _count_found(answer: object, num_keys: int) -> _Counts | None:
    if not isinstance(answer, int) or not is_page_count(answer, num_keys):
        return None
    num_missed = min(num_keys - answer, 1)
    counts = {
        PageOutcome.OK: answer,
        PageOutcome.MISS: num_missed,
        PageOutcome.SKIPPED: num_keys - answer - num_missed,
    }
    return {outcome: count for outcome, count in counts.items() if count}
