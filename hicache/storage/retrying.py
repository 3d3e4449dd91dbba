"""Tries failed pages again."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from typing import TYPE_CHECKING

from hicache.storage.answers import count_outcomes, num_leading_ok
from hicache.storage.wrapper import StorageWrapper
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.clock import Clock
    from hicache.storage.base import HiCacheStorage, Page
    from hicache.types import PageHash

__all__ = ["RetryCounts", "RetryingStorage"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryCounts:
    """What came of trying again; no number ever decreases.

    Attributes:
        num_attempts: further calls.
        num_recovered_pages: that had failed and were good after one of them.
    """

    num_attempts: int
    num_recovered_pages: int


class RetryingStorage(StorageWrapper):
    """Within one call, tries again those pages that are `FAILED` and those that wait for them.

    Every other outcome is final: a miss stays one, a damaged page must be written anew, and what
    had no time or no space will not have more of it in a moment. What raises, or answers with no
    answer, is not tried again either: that is a backend to be left alone.

    Before each further attempt the call sleeps, twice as long each time, and between half and the
    whole of that, so that many callers do not come back at once. An attempt that could only begin
    at or after the deadline is left out. Thread-safe.
    """

    def __init__(
        self,
        inner: HiCacheStorage,
        *,
        max_attempts: int,
        clock: Clock,
        first_pause_seconds: float = 0.05,
        longest_pause_seconds: float = 1.0,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Stand around `inner`.

        Args:
            inner: does the work.
            max_attempts: further calls for one call, at most.
            clock: the backend's own.
            first_pause_seconds: before the first of them.
            longest_pause_seconds: before any of them.
            draw: returns a random number from 0 up to 1.
            sleep: passes time.
        """
        super().__init__(inner)
        self._max_attempts = max_attempts
        self._clock = clock
        self._first_pause_seconds = first_pause_seconds
        self._longest_pause_seconds = longest_pause_seconds
        self._draw = draw
        self._sleep = sleep
        # Guards the two counters.
        self._lock = threading.Lock()
        self._num_attempts = 0
        self._num_recovered_pages = 0

    def counts(self) -> RetryCounts:
        """Return counters as they are now."""
        with self._lock:
            return RetryCounts(
                num_attempts=self._num_attempts, num_recovered_pages=self._num_recovered_pages
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
        return self._retry(
            self._inner.batch_get(keys, parent_keys, pages, deadline=deadline),
            _failed_read,
            lambda again: self._inner.batch_get(
                [keys[index] for index in again],
                [parent_keys[index] for index in again],
                [pages[index] for index in again],
                deadline=deadline,
            ),
            num_pages=len(keys),
            deadline=deadline,
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
        return self._retry(
            self._inner.batch_set(keys, parent_keys, pages, deadline=deadline),
            lambda outcomes: _failed_write(outcomes, keys, parent_keys),
            lambda again: self._inner.batch_set(
                [keys[index] for index in again],
                [parent_keys[index] for index in again],
                [pages[index] for index in again],
                deadline=deadline,
            ),
            num_pages=len(keys),
            deadline=deadline,
        )

    def _retry(
        self,
        outcomes: list[PageOutcome],
        choose: Callable[[list[PageOutcome]], list[int]],
        call: Callable[[list[int]], list[PageOutcome]],
        *,
        num_pages: int,
        deadline: float,
    ) -> list[PageOutcome]:
        """Repeat `call` for the pages that `choose` names, and return what has become of all."""
        if count_outcomes(outcomes, num_pages) is None:
            return outcomes
        pause = self._first_pause_seconds
        for _ in range(self._max_attempts):
            again = choose(outcomes) if PageOutcome.FAILED in outcomes else []
            if not again or not self._sleep_before(deadline, pause):
                break
            pause = min(2 * pause, self._longest_pause_seconds)
            answer = call(again)
            if count_outcomes(answer, len(again)) is None:
                break
            new = dict(zip(again, answer, strict=True))
            self._note(sum(outcomes[i] is PageOutcome.FAILED and new[i].good for i in again))
            outcomes = [new.get(index, outcome) for index, outcome in enumerate(outcomes)]
        return outcomes

    def _sleep_before(self, deadline: float, longest_seconds: float) -> bool:
        """Sleep for a while; False, without sleeping, when the deadline would be reached."""
        seconds = longest_seconds * (0.5 + 0.5 * self._draw())
        if self._clock.now() + seconds >= deadline:
            return False
        self._sleep(seconds)
        return True

    def _note(self, num_recovered_pages: int) -> None:
        with self._lock:
            self._num_attempts += 1
            self._num_recovered_pages += num_recovered_pages


def _failed_read(outcomes: list[PageOutcome]) -> list[int]:
    """Return the pages from the one that ended a read on, if that one failed."""
    first = num_leading_ok(outcomes)
    return list(range(first, len(outcomes))) if outcomes[first] is PageOutcome.FAILED else []


def _failed_write(
    outcomes: list[PageOutcome], keys: Sequence[PageHash], parent_keys: Sequence[bytes]
) -> list[int]:
    """Return the pages that failed and those that were skipped because they are behind one."""
    chosen: list[int] = []
    chosen_keys: set[bytes] = set()
    for index, outcome in enumerate(outcomes):
        behind = outcome is PageOutcome.SKIPPED and parent_keys[index] in chosen_keys
        if behind or outcome is PageOutcome.FAILED:
            chosen.append(index)
            chosen_keys.add(keys[index])
    return chosen
