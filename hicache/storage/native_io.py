"""The native module, if it was built; without it Python does the same, slower."""

from __future__ import annotations

try:
    from hicache.storage import _page_io as page_io
except ImportError:
    HAS_NATIVE_IO = False
else:
    HAS_NATIVE_IO = True

__all__ = ["HAS_NATIVE_IO", "page_io"]
