"""How many pages one call to a store moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.storage import DEFAULT_CALL_BYTES

if TYPE_CHECKING:
    from hicache.config import StorageConfig

__all__ = ["pages_per_call", "pages_per_query"]

_MAX_CALL_PAGES: Final = 1024

_QUERY_PAGES: Final = 128
"""A question moves no bytes, and ends at the first page that is not stored."""


def pages_per_call(
    page_bytes: int,
    config: StorageConfig | None = None,
    *,
    call_bytes: int = DEFAULT_CALL_BYTES,
) -> int:
    """Return the pages of a call at most.

    Args:
        page_bytes: of a page on this rank.
        config: of the store; its `batch_pages` counts where it is given.
        call_bytes: see `StorageCapabilities`.
    """
    if config is not None and config.batch_pages is not None:
        return config.batch_pages
    return max(1, min(call_bytes // page_bytes, _MAX_CALL_PAGES))


def pages_per_query(config: StorageConfig) -> int:
    """Return the pages that a call asks for at most whether they are stored."""
    return _QUERY_PAGES if config.batch_pages is None else config.batch_pages
