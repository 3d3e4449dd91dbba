"""A page's host memory as buffers that Python's own I/O takes, and the checksum over it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.base import Page

__all__ = ["CHECKSUM_BYTES", "page_checksum", "page_views"]

CHECKSUM_BYTES = 16


def page_views(page: Page) -> list[memoryview]:
    """Return each piece of `page` as writable bytes, without copying.

    The views do not keep the memory alive: whoever gave the page does.
    """
    return [
        memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
        for address, num_bytes in page
    ]


def page_checksum(views: Sequence[memoryview | bytes]) -> bytes:
    """Return xxh3-128 over the buffers in order; how they are cut does not matter.

    It detects accidents (flipped bits, cut files), not an attacker who can write to the store.
    """
    if len(views) == 1:
        return xxhash.xxh3_128_digest(views[0])
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()
