"""Pages moved in one call each, with their checksums, where the native module was built."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache.storage import native_io
from hicache.storage.page_store.blocks import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache.storage.base import Page
    from hicache.storage.page_store.blocks import Extent
    from hicache.storage.page_store.layout import PageLayout

__all__ = ["DIRECT_CALL_BYTES", "Mark", "NativeTransfer"]

_CALL_BYTES = 8 << 20
"""A call takes a millisecond or two: between two of them deadlines are looked at."""

_CHUNK_BYTES = 512 << 10
"""What is read and then looked at has to stay in a core's own cache; measured: 256 KiB to 1 MiB.

The page cache keeps what is written at once in pieces of that size. From larger ones it is read
back a little faster, but memory in such pieces is harder to find.
"""

DIRECT_CALL_BYTES = 64 << 20
"""A call takes ten to forty milliseconds: between two of them the disk has nothing to do."""

_DIRECT_CHUNK_BYTES = 2 << 20
_NUM_DIRECT_READS = 8
"""A disk wants large requests, and the next ones while a checksum is computed.

What is read is looked at when it has arrived, so the last request of a call must not be large.
"""

_DIRECT_WRITE_BYTES = 4 << 20
_NUM_DIRECT_WRITES = 8
"""What is written is looked at while the disk has something to do, so that requests can be large.

A disk may work at all that it has and be done with all at once: so it is given much.
"""


class Mark(NamedTuple):
    """A point in a write that somebody waits for.

    Attributes:
        num_pages: pages of the write that come before.
        reach: called with their checksums, once at most, when they are written and the disk is busy
            with what comes behind; that is written while it runs, whatever it takes.
    """

    num_pages: int
    reach: Callable[[bytes], None]


class NativeTransfer:
    """Reads and writes pages without Python between them. Thread-safe.

    Does what goes well: where the memory is not aligned for direct I/O, a file ends or the kernel
    reports an error, it gives up, and `PageTransfer` finds out what is the matter.
    """

    def __init__(
        self,
        fd_of: Callable[[int, bool], int],
        *,
        direct: bool = False,
        mapping_of: Callable[[int, int], int] | None = None,
    ) -> None:
        """Use the descriptors of segments.

        Args:
            fd_of: returns one, by the number of a segment and whether to make a missing one.
            direct: whether descriptors are for direct I/O.
            mapping_of: returns where a segment is mapped, see `Segments.mapping`; by default none
                is.
        """
        self._fd_of = fd_of
        self._call_bytes = DIRECT_CALL_BYTES if direct else _CALL_BYTES
        self._chunk_bytes = _DIRECT_CHUNK_BYTES if direct else _CHUNK_BYTES
        self._num_reads = _NUM_DIRECT_READS if direct else 1
        self._write_bytes = _DIRECT_WRITE_BYTES if direct else _CHUNK_BYTES
        self._num_writes = _NUM_DIRECT_WRITES if direct else 1
        self._mapping_of = mapping_of

    @property
    def passes_marks(self) -> bool:
        """Whether a write goes on while its `Mark` is reached: several requests are under way."""
        return self._num_writes > 1

    def cut(self, layout: PageLayout, num_pages: int) -> Iterator[tuple[int, int]]:
        """Yield, for one call after the other, which page is its first and how many it moves."""
        step = max(1, self._call_bytes // layout.stride_bytes)
        for first in range(0, num_pages, step):
            yield first, min(step, num_pages - first)

    def read(
        self, layout: PageLayout, first: int, pages: Sequence[Page], start: int, num_pages: int
    ) -> bytes:
        """Read pages from the `first` on into `pages[start:]`.

        Returns:
            The checksums of those that were read as a whole: fewer where a segment ends too early.

        Raises:
            OSError: from the kernel.
        """
        extents = layout.extents_of(first, num_pages)
        return native_io.page_io.read_pages(
            [self._mapped(self._place(extent, create=False), extent) for extent in extents],
            pages,
            start,
            num_pages,
            layout.gap_bytes,
            self._chunk_bytes,
            self._num_reads,
        )

    def write(
        self,
        layout: PageLayout,
        first: int,
        pages: Sequence[Page],
        start: int,
        num_pages: int,
        mark: Mark | None = None,
    ) -> bytes:
        """Write `pages[start:]` to the places of the `first` and those behind it.

        The `mark`, if there is one, is somewhere within them; the disk decides whether it is
        reached before all is written.

        Returns:
            Their checksums.

        Raises:
            OSError: from the kernel; any part may have been written.
        """
        extents = layout.extents_of(first, num_pages)
        return native_io.page_io.write_pages(
            [self._place(extent, create=True) for extent in extents],
            pages,
            start,
            num_pages,
            layout.gap_bytes,
            self._write_bytes,
            self._num_writes,
            *(mark or ()),
        )

    def _place(self, extent: Extent, *, create: bool) -> tuple[int, int, int]:
        """Return where an extent is, as the native module wants to know it."""
        segment, block, num_blocks = extent
        return self._fd_of(segment, create), block * BLOCK_BYTES, num_blocks * BLOCK_BYTES

    def _mapped(
        self, place: tuple[int, int, int], extent: Extent
    ) -> tuple[int, int, int] | tuple[int, int, int, int]:
        """Return a place with the mapping of its segment, if there is one."""
        if self._mapping_of is None:
            return place
        mapping = self._mapping_of(extent.segment, extent.end * BLOCK_BYTES)
        return (*place, mapping) if mapping else place
