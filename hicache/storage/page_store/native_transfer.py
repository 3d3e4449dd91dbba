"""Pages moved in one call each, with their checksums, where the native module was built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage import native_io
from hicache.storage.page_store.blocks import BLOCK_BYTES
from hicache.storage.page_store.group import CHECKSUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from hicache.storage.base import Page
    from hicache.storage.page_store.layout import PageLayout

__all__ = ["NativeTransfer"]

_CHUNK_BYTES = 512 << 10
"""What is read and then looked at has to stay in a core's own cache; measured: 256 KiB to 1 MiB."""

_DIRECT_CHUNK_BYTES = 4 << 20
"""A disk wants large requests."""

_CALL_BYTES = 8 << 20
"""A call takes a millisecond or two: between two of them deadlines are looked at."""


class NativeTransfer:
    """Reads and writes pages without Python between them. Thread-safe.

    Does what goes well: where the memory is not aligned for direct I/O, a file ends or the kernel
    reports an error, it gives up, and `PageTransfer` finds out what is the matter.

    With direct I/O other threads compute the checksums: a disk is slower than they are, but not by
    so much that it could wait for them.
    """

    def __init__(
        self, fd_of: Callable[[int, bool], int], *, direct_with: Executor | None = None
    ) -> None:
        """Use the descriptors of segments, given by number and whether to make a missing one."""
        self._fd_of = fd_of
        self._checkers = direct_with

    def cut(self, layout: PageLayout, num_pages: int) -> Iterator[tuple[int, int]]:
        """Yield, for one call after the other, which page is its first and how many it moves."""
        call_bytes = _CALL_BYTES if self._checkers is None else _DIRECT_CHUNK_BYTES
        step = max(1, call_bytes // layout.stride_bytes)
        for first in range(0, num_pages, step):
            yield first, min(step, num_pages - first)

    def begin_read(
        self, layout: PageLayout, first: int, pages: Sequence[Page], start: int, num_pages: int
    ) -> Callable[[], bytes] | None:
        """Read pages from the `first` on into `pages[start:]`.

        Returns:
            What returns their checksums, and may wait for them: until then the memory is in use.
            `None` where a segment ends too early.

        Raises:
            OSError: from the kernel.
        """
        places = self._places(layout, first, num_pages, create=False)
        arguments = (places, pages, start, num_pages, layout.gap_bytes)
        if self._checkers is None:
            checksums = native_io.page_io.read_pages(*arguments, _CHUNK_BYTES)
            complete = len(checksums) == num_pages * CHECKSUM_BYTES
            return (lambda: checksums) if complete else None
        if native_io.page_io.read_unchecked(*arguments, _DIRECT_CHUNK_BYTES) < num_pages:
            return None
        return self._checkers.submit(native_io.page_io.checksums, pages, start, num_pages).result

    def write(
        self, layout: PageLayout, first: int, pages: Sequence[Page], start: int, num_pages: int
    ) -> bytes:
        """Write `pages[start:]` to the places of the `first` and those behind it.

        Returns:
            Their checksums.

        Raises:
            OSError: from the kernel; any part may have been written.
        """
        places = self._places(layout, first, num_pages, create=True)
        arguments = (places, pages, start, num_pages, layout.gap_bytes)
        if self._checkers is None:
            return native_io.page_io.write_pages(*arguments, _CHUNK_BYTES)
        checksums = self._checkers.submit(native_io.page_io.checksums, pages, start, num_pages)
        try:
            native_io.page_io.write_unchecked(*arguments, _DIRECT_CHUNK_BYTES)
        finally:
            # Also after a failure: nobody may read the memory any more.
            found = checksums.result()
        return found

    def _places(
        self, layout: PageLayout, first: int, num_pages: int, *, create: bool
    ) -> list[tuple[int, int, int]]:
        return [
            (self._fd_of(segment, create), block * BLOCK_BYTES, num_blocks * BLOCK_BYTES)
            for segment, block, num_blocks in layout.extents_of(first, num_pages)
        ]
