"""How many pages one call to a store moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache.config import StorageConfig

__all__ = ["pages_per_call", "pages_per_query"]

_CALL_BYTES: Final = 32 << 20
"""Some milliseconds of a disk: what a call costs beside its bytes is small, and an end that is
asked for, a deadline or another operation does not wait for long."""

_MAX_CALL_PAGES: Final = 1024

_QUERY_PAGES: Final = 128
"""A question moves no bytes, and ends at the first page that is not stored."""


def pages_per_call(page_bytes: int, config: StorageConfig | None = None) -> int:
    """Return the pages of a call at most.

    Args:
        page_bytes: of a page on this rank.
        config: of the store; its `batch_pages` counts where it is given.
    """
    if config is not None and config.batch_pages is not None:
        return config.batch_pages
    return max(1, min(_CALL_BYTES // page_bytes, _MAX_CALL_PAGES))


def pages_per_query(config: StorageConfig) -> int:
    """Return the pages that a call asks for at most whether they are stored."""
    return _QUERY_PAGES if config.batch_pages is None else config.batch_pages
