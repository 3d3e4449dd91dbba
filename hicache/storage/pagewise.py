"""The part of the contract that is the same for every backend that moves one page at a time."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hicache.storage.checked import CheckedStorage
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import Page
    from hicache.types import PageHash

__all__ = ["PagewiseStorage"]


class PagewiseStorage(CheckedStorage):
    """Batches and deadlines over three operations on single pages.

    A subclass supplies `_has_page`, `_read_page`, `_write_page` and `_clear_pages`, under the rules
    of `CheckedStorage`.
    """

    @abstractmethod
    def _has_page(self, key: PageHash) -> bool:
        """Return whether the page seems to be stored.

        Raises:
            StorageError: nobody can tell at present.
        """

    @abstractmethod
    def _read_page(self, key: PageHash, page: Page) -> PageOutcome:
        """Read one page into its memory and verify it."""

    @abstractmethod
    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        """Store one page unless it is stored already."""

    def _count_leading(self, keys: Sequence[PageHash]) -> int:
        for num_found, key in enumerate(keys):
            if not self._has_page(key):
                return num_found
        return len(keys)

    def _read_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        outcomes: list[PageOutcome] = []
        rest = PageOutcome.SKIPPED
        for key, page in zip(keys, pages, strict=True):
            if self._clock.now() >= deadline:
                rest = PageOutcome.TIMEOUT
                break
            outcomes.append(self._read_page(key, page))
            if outcomes[-1] is not PageOutcome.OK:
                break
        outcomes.extend([rest] * (len(keys) - len(outcomes)))
        return outcomes

    def _write_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        outcomes: list[PageOutcome] = []
        not_stored: set[bytes] = set()
        for key, parent_key, page in zip(keys, parent_keys, pages, strict=True):
            if self._clock.now() >= deadline:
                outcomes.extend([PageOutcome.TIMEOUT] * (len(keys) - len(outcomes)))
                break
            if parent_key in not_stored:
                outcome = PageOutcome.SKIPPED
            else:
                outcome = self._write_page(key, parent_key, page)
            outcomes.append(outcome)
            if not outcome.good:
                not_stored.add(key)
        return outcomes
