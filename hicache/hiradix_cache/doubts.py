"""Pages that storage said it has and did not deliver."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache.types import PageHash

__all__ = ["DoubtedPages"]

_MAX_DOUBTED = 4096
"""Pages that are remembered; beyond, the oldest is believed again."""


class DoubtedPages:
    """What not to wait for again: a page stays doubted until it has been stored anew.

    Without it a stale "present" would cost every request for the page a whole timeout. Depends on
    agreed outcomes alone and on no clock, so that all ranks doubt the same pages.
    """

    def __init__(self) -> None:
        self._hashes: dict[PageHash, None] = {}

    def add(self, page_hash: PageHash) -> None:
        """Doubt a page."""
        self._hashes[page_hash] = None
        if len(self._hashes) > _MAX_DOUBTED:
            del self._hashes[next(iter(self._hashes))]

    def remove(self, hashes: Iterable[PageHash]) -> None:
        """Believe again in pages that have just been stored."""
        if self._hashes:
            for page_hash in hashes:
                self._hashes.pop(page_hash, None)

    def clear(self) -> None:
        """Believe in every page."""
        self._hashes.clear()

    def num_credible(self, hashes: Sequence[PageHash]) -> int:
        """Return how many leading pages are not doubted."""
        if self._hashes:
            for index, page_hash in enumerate(hashes):
                if page_hash in self._hashes:
                    return index
        return len(hashes)
