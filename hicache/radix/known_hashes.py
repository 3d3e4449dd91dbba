"""Page hashes of runs that may soon be in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.hashing import TOKEN_BYTES, hash_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.types import PageHash

__all__ = ["KnownHashes"]

_MAX_RUNS = 64
"""Runs that are remembered; beyond, the oldest is forgotten and hashed once more."""


class KnownHashes:
    """Hashes pages, but not those that were hashed before to look them up in storage.

    A request's prompt is hashed when storage is asked for it, and what storage does not have is
    computed and comes into the tree, mostly in several runs. A hash follows from its tokens and
    the hash before, so what is remembered is never wrong.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        # By what is before the run and its first page, which hardly two runs share.
        self._runs: dict[bytes, tuple[bytes, Sequence[PageHash]]] = {}

    def note(self, prior: bytes, tokens: bytes, hashes: Sequence[PageHash]) -> None:
        """Remember the `hashes` of the full pages of `tokens`; `prior` as for `hash_pages`."""
        if hashes:
            self._runs[self._start(prior, tokens)] = tokens, hashes
            if len(self._runs) > _MAX_RUNS:
                del self._runs[next(iter(self._runs))]

    def hash_run(self, prior: bytes, run: bytes) -> list[PageHash]:
        """Return what `hash_pages` returns for the whole pages `run`."""
        tokens, hashes = self._runs.pop(self._start(prior, run), (b"", ()))
        num_known = len(hashes)
        if num_known * self._page_bytes > len(run):
            num_known = len(run) // self._page_bytes
        cut = num_known * self._page_bytes
        if not num_known or tokens[:cut] != run[:cut]:
            return hash_pages(run, self._page_size, prior)
        # The next run of the same prompt begins where this one ends.
        self.note(hashes[num_known - 1], tokens[cut:], hashes[num_known:])
        known = list(hashes[:num_known])
        return known + hash_pages(run[cut:], self._page_size, known[-1])

    def _start(self, prior: bytes, tokens: bytes) -> bytes:
        return prior + tokens[: self._page_bytes]
