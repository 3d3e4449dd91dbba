"""The part of the contract that is the same for every backend: arguments, counters, closing."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

from hicache.errors import ClosedError, StorageError
from hicache.storage import native_io
from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig, StorageStats
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import Page
    from hicache.types import PageHash

__all__ = ["CheckedStorage"]

_KEY_BYTES = 32


class CheckedStorage(HiCacheStorage):
    """Refuses misuse, counts outcomes and ends with `close`.

    A subclass supplies `_count_leading`, `_read_pages`, `_write_pages` and `_clear_pages`. They get
    sound arguments, are called from several threads at once, and answer with outcomes; they never
    raise for what happens to data, but report the error behind a failure to `_note_error`. The
    first, which has no outcomes, reports it and raises `StorageError`.
    """

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self._page_bytes = config.page_bytes
        self._clock = config.clock
        self._closed = False
        # Guards the counters below; held for their update only, never around I/O.
        self._stats_lock = threading.Lock()
        self._get_outcomes: Counter[PageOutcome] = Counter()
        self._set_outcomes: Counter[PageOutcome] = Counter()
        self._last_error: str | None = None

    @abstractmethod
    def _count_leading(self, keys: Sequence[PageHash]) -> int:
        """Return how many leading pages seem to be stored.

        Raises:
            StorageError: nobody can tell at present.
        """

    @abstractmethod
    def _read_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        """Read pages, and return what became of each."""

    @abstractmethod
    def _write_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        """Store pages unless they are stored already, and return what became of each."""

    @abstractmethod
    def _clear_pages(self) -> int:
        """Remove all pages of the namespace and return how many those were."""

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        """See `HiCacheStorage.batch_exists`."""
        self._check_open()
        _check_keys(keys)
        return self._count_leading(keys)

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_get`."""
        self._check_open()
        _check_keys(keys)
        _check_parent_keys(len(keys), parent_keys)
        self._check_pages(len(keys), pages)
        outcomes = self._read_pages(keys, parent_keys, pages, deadline)
        with self._stats_lock:
            _count(self._get_outcomes, outcomes)
        return outcomes

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_set`."""
        self._check_open()
        _check_keys(keys)
        _check_parent_keys(len(keys), parent_keys)
        self._check_pages(len(keys), pages)
        outcomes = self._write_pages(keys, parent_keys, pages, deadline)
        with self._stats_lock:
            _count(self._set_outcomes, outcomes)
        return outcomes

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`; unless a subclass does, nobody needs it."""
        self._check_open()

    def clear(self) -> int:
        """See `HiCacheStorage.clear`."""
        self._check_open()
        return self._clear_pages()

    def stats(self) -> StorageStats:
        """See `HiCacheStorage.stats`."""
        with self._stats_lock:
            return StorageStats(
                get_outcomes=dict(self._get_outcomes),
                set_outcomes=dict(self._set_outcomes),
                read_bytes=self._get_outcomes[PageOutcome.OK] * self._page_bytes,
                written_bytes=self._set_outcomes[PageOutcome.OK] * self._page_bytes,
                last_error=self._last_error,
            )

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        self._closed = True

    def _note_error(self, error: Exception) -> None:
        with self._stats_lock:
            self._last_error = f"{type(error).__name__}: {error}"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__} is closed; build a new one")

    def _check_pages(self, num_keys: int, pages: Sequence[Page]) -> None:
        if len(pages) != num_keys:
            raise StorageError(f"{num_keys} keys need as many pages, got {len(pages)}")
        if native_io.HAS_NATIVE_IO and native_io.page_io.have_length(pages, self._page_bytes):
            return
        for page in pages:
            if any(num_bytes < 1 for _, num_bytes in page):
                raise StorageError(f"every piece of a page needs at least 1 byte, got {page}")
            page_bytes = sum(num_bytes for _, num_bytes in page)
            if page_bytes != self._page_bytes:
                raise StorageError(
                    f"pages of this storage have {self._page_bytes} bytes, got one with "
                    f"{page_bytes}; a partial page is never stored"
                )


def _check_keys(keys: Sequence[bytes]) -> None:
    for length in set(map(len, keys)) - {_KEY_BYTES}:
        raise StorageError(f"a page key has {_KEY_BYTES} bytes, got {length}")


def _check_parent_keys(num_keys: int, parent_keys: Sequence[bytes]) -> None:
    if len(parent_keys) != num_keys:
        raise StorageError(f"{num_keys} keys need as many parent keys, got {len(parent_keys)}")
    for length in set(map(len, parent_keys)) - {0, _KEY_BYTES}:
        raise StorageError(
            f"a parent key has {_KEY_BYTES} bytes, or none for a first page; got {length}"
        )


def _count(counts: Counter[PageOutcome], outcomes: list[PageOutcome]) -> None:
    """Count by kind: a batch has few, and to hash an enum member is slow."""
    rest = outcomes
    while rest:
        outcome = rest[0]
        count = rest.count(outcome)
        counts[outcome] += count
        if count == len(rest):
            break
        rest = [other for other in rest if other is not outcome]
