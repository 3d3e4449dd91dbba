"""Leaves a backend alone that fails again and again."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING, NoReturn, TypeVar

from hicache.errors import StorageError
from hicache.storage.answers import (
    count_outcomes,
    error_text,
    is_page_count,
    read_failed,
    write_failed,
)
from hicache.storage.wrapper import StorageVerb, StorageWrapper
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache.clock import Clock
    from hicache.storage.base import HiCacheStorage, Page
    from hicache.types import PageHash

__all__ = ["CircuitBreakerStorage", "CircuitState"]

_AnswerT = TypeVar("_AnswerT")

_FAILURES = frozenset({PageOutcome.FAILED, PageOutcome.TIMEOUT})


class CircuitState(str, Enum):
    """Whether calls reach a backend."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """They do not."""
    HALF_OPEN = "half_open"
    """One is under way, to find out."""


class _Circuit:
    """The state of one verb; thread-safe.

    closed --max_failures in a row--> open --first call after the cool-down--> half open
      ^                                ^                                           |
      |                                +----------------- it fails ----------------+
      +---------------------------------------------------- it is good ------------+
    """

    def __init__(self, *, max_failures: int, cooldown_seconds: float, clock: Clock) -> None:
        self._max_failures = max_failures
        self._cooldown_seconds = cooldown_seconds
        self._clock = clock
        # Guards what follows; held for moments only, never during a call.
        self._lock = threading.Lock()
        self._num_failures = 0
        self._cool_at = 0.0
        self._probing = False
        self._last_error: str | None = None

    @property
    def state(self) -> CircuitState:
        with self._lock:
            if self._num_failures < self._max_failures:
                return CircuitState.CLOSED
            return CircuitState.HALF_OPEN if self._probing else CircuitState.OPEN

    @property
    def admits(self) -> bool:
        """Whether `begin` would let a call through."""
        with self._lock:
            return self._num_failures < self._max_failures or self._is_cool()

    @property
    def last_error(self) -> str | None:
        """Why the newest failing call failed, if anybody knows."""
        with self._lock:
            return self._last_error

    def begin(self) -> bool:
        """Let a call through, whose `end` is to follow, or not."""
        with self._lock:
            if self._num_failures < self._max_failures:
                return True
            if not self._is_cool():
                return False
            # A probe that never returns must not be the last one.
            self._cool_at = self._clock.now() + self._cooldown_seconds
            self._probing = True
            return True

    def end(self, failed: bool | None, *, error: str | None = None) -> None:
        """Take the result of a call that was let through; `None` says nothing about the backend."""
        with self._lock:
            self._probing = False
            if failed:
                self._last_error = error
                self._num_failures += 1
                self._cool_at = self._clock.now() + self._cooldown_seconds
            elif failed is not None:
                self._num_failures = 0

    def _is_cool(self) -> bool:
        return self._clock.now() >= self._cool_at


class CircuitBreakerStorage(StorageWrapper):
    """Answers by itself, at once, while the backend is known to fail.

    A call fails when it raises, for whatever reason, when its answer is none, or when a page is
    `FAILED` or `TIMEOUT`, or has `NO_SPACE` and no other was stored either: a store that is full
    keeps the beginning of a prompt and needs no rest. `max_failures` calls of one verb in a row
    open the circuit of that verb: `batch_exists` then raises `StorageError`, as nobody can tell,
    and pages are `FAILED`. After `cooldown_seconds` one call is let through; a good one closes the
    circuit, another begins the next cool-down. A call whose deadline had passed before it began,
    and an empty batch, say nothing.

    Each verb has a circuit of its own, because a backend that no longer reads may still answer
    `batch_exists` from memory, and one that is read-only still reads. Yet pages that cannot be read
    are not looked for either: while the circuit of `batch_get` lets nothing through, `batch_exists`
    does not. `clear`, which only a person asks for, always reaches the backend. Thread-safe.
    """

    def __init__(
        self, inner: HiCacheStorage, *, max_failures: int, cooldown_seconds: float, clock: Clock
    ) -> None:
        """Stand around `inner`, with closed circuits.

        Args:
            inner: does the work.
            max_failures: failing calls of a verb in a row, at least 1, that open its circuit.
            cooldown_seconds: how long an open circuit lets nothing through.
            clock: the backend's own.
        """
        super().__init__(inner)
        self._clock = clock
        self._closed = False
        self._circuits = {
            verb: _Circuit(
                max_failures=max_failures, cooldown_seconds=cooldown_seconds, clock=clock
            )
            for verb in (StorageVerb.EXISTS, StorageVerb.GET, StorageVerb.SET)
        }

    def states(self) -> dict[StorageVerb, CircuitState]:
        """Return the state of each verb that has a circuit."""
        return {verb: circuit.state for verb, circuit in self._circuits.items()}

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        """See `HiCacheStorage.batch_exists`."""
        if not (self._circuits[StorageVerb.GET].admits or self._closed):
            self._refuse_look_up(StorageVerb.GET)
        return self._guard(
            StorageVerb.EXISTS,
            lambda: self._inner.batch_exists(keys),
            failed=lambda found: _judge_count(found, len(keys)),
            refusal=lambda: self._refuse_look_up(StorageVerb.EXISTS),
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
        return self._guard(
            StorageVerb.GET,
            lambda: self._inner.batch_get(keys, parent_keys, pages, deadline=deadline),
            failed=self._judge_pages(len(keys), deadline),
            refusal=lambda: read_failed(len(keys)),
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
        return self._guard(
            StorageVerb.SET,
            lambda: self._inner.batch_set(keys, parent_keys, pages, deadline=deadline),
            failed=self._judge_pages(len(keys), deadline),
            refusal=lambda: write_failed(keys, parent_keys),
        )

    def close(self) -> None:
        """See `HiCacheStorage.close`; a closed backend is asked whatever the circuits say."""
        self._closed = True
        super().close()

    def _judge_pages(self, num_pages: int, deadline: float) -> Callable[[object], bool | None]:
        """Return what decides whether an answer to a call that begins now is a failure."""
        says_nothing = num_pages == 0 or self._clock.now() >= deadline

        def failed(answer: object) -> bool | None:
            counts = count_outcomes(answer, num_pages)
            if counts is None:
                return True
            return None if says_nothing else _has_failed(counts)

        return failed

    def _guard(
        self,
        verb: StorageVerb,
        call: Callable[[], _AnswerT],
        *,
        failed: Callable[[_AnswerT], bool | None],
        refusal: Callable[[], _AnswerT],
    ) -> _AnswerT:
        circuit = self._circuits[verb]
        if not circuit.begin() and not self._closed:
            return refusal()
        try:
            answer = call()
        except BaseException as error:
            circuit.end(failed=True, error=error_text(error))
            raise
        has_failed = failed(answer)
        circuit.end(has_failed, error=self._newest_error() if has_failed else None)
        return answer

    def _refuse_look_up(self, verb: StorageVerb) -> NoReturn:
        error = self._circuits[verb].last_error
        raise StorageError(
            f"not asked for a while, as {verb.value} failed again and again"
            + (f" ({error})" if error else "")
        )


def _judge_count(found: object, num_keys: int) -> bool | None:
    """Return whether the answer to a look-up is a failure."""
    if not is_page_count(found, num_keys):
        return True
    return False if num_keys else None


def _has_failed(counts: Mapping[PageOutcome, int]) -> bool:
    is_full = PageOutcome.NO_SPACE in counts and PageOutcome.OK not in counts
    return is_full or bool(_FAILURES & counts.keys())
