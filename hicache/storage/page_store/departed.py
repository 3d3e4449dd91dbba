"""What this process remembers of pages that it has given up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from hicache.storage.page_store.reuse_history import class_of

if TYPE_CHECKING:
    from hicache.storage.page_store.reuse_history import ReuseHistory

__all__ = ["Departed"]

_MAX_PAGES: Final = 1 << 13
"""Beyond, the page that was given up first is forgotten."""


class _Past(NamedTuple):
    num_uses: int
    last_use: int


class Departed:
    """Uses of pages that were given up lately, for the case that they are stored again.

    They go on waiting for their next use in the history: without that, what was kept too short
    would look as if it was never wanted again. It is a guess that is lost with the process: those
    of a killed one wait on until they are forgotten, like all that is old. What a transaction has
    noted that is not committed is of no harm. Used within write
    transactions, which a process makes one at a time.
    """

    def __init__(self) -> None:
        self._pasts: dict[bytes, _Past] = {}

    def remember(self, history: ReuseHistory, name: bytes, num_uses: int, last_use: int) -> None:
        """Note that pages are given up from the one of this name on."""
        self._end(history, name, used=False)
        self._pasts[name] = _Past(num_uses, last_use)
        history.begin_wait(class_of(num_uses), last_use)
        if len(self._pasts) > _MAX_PAGES:
            self._end(history, next(iter(self._pasts)), used=False)

    def recall(self, history: ReuseHistory, name: bytes) -> int:
        """Return the uses of the page that is stored again under this name; 0 if none are known."""
        return self._end(history, name, used=True)

    def forget(self, history: ReuseHistory) -> None:
        """Let nothing wait any more: the process closes the store."""
        for name in list(self._pasts):
            self._end(history, name, used=False)

    def _end(self, history: ReuseHistory, name: bytes, *, used: bool) -> int:
        past = self._pasts.pop(name, None)
        if past is None:
            return 0
        history.end_wait(class_of(past.num_uses), past.last_use, used=used)
        return past.num_uses
