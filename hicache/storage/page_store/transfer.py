"""Bytes between the places of pages on the disk and host memory."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage import native_io
from hicache.storage.page_memory import CHECKSUM_BYTES
from hicache.storage.page_store.blocks import BLOCK_BYTES, BlockKind, blocks_for, cut
from hicache.storage.page_store.native_transfer import Mark, NativeTransfer
from hicache.storage.vectored_io import read_at, split_buffers, write_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.storage.page_memory import BatchMemory, PageViews
    from hicache.storage.page_store.blocks import Extent
    from hicache.storage.page_store.layout import PageLayout
    from hicache.storage.page_store.segments import Segments

__all__ = ["PageTransfer"]

_CHUNK_BYTES = 512 << 10
_DIRECT_CHUNK_BYTES = 4 << 20
"""For direct I/O, where the disk wants large requests."""

_STAGING_BYTES = 8 << 20

_MAX_SPARE_BUFFERS = 4

_LOGGER = logging.getLogger(__name__)


class PageTransfer:
    """Reads and writes pages, through the page cache or past it. Thread-safe.

    Direct I/O goes straight to and from page memory where that is aligned to blocks, else through
    a buffer for each call, of which a few are kept. When the file system refuses direct I/O, all is
    buffered from then on.

    Attributes:
        native: does the same with less work, if it was built, when nothing is the matter.
        num_direct_refusals: how often the file system has refused direct I/O: once at most.
    """

    def __init__(self, segments: Segments, *, direct: bool = False, mapped: bool = True) -> None:
        """Use opened segments; see `PageStore` for `direct_io` and `mapped_reads`."""
        self._segments = segments
        self._direct = direct
        self._mapping_of = segments.mapping if mapped else None
        self.native: NativeTransfer | None = None
        if native_io.HAS_NATIVE_IO:
            self.native = NativeTransfer(
                self._fd, direct=direct, mapping_of=None if direct else self._mapping_of
            )
        self.num_direct_refusals = 0
        # What stands between pages whose length is no multiple of a block. Nobody reads the scrap,
        # so threads may write there at once.
        self._zeros = memoryview(bytes(BLOCK_BYTES))
        self._scrap = memoryview(bytearray(BLOCK_BYTES))
        # The ends of a list are thread-safe.
        self._spare_buffers: list[mmap.mmap] = []

    @property
    def passes_marks(self) -> bool:
        """Whether a `Mark` can be reached before a write is done."""
        return self.native is not None and self.native.passes_marks

    def cut(self, layout: PageLayout, num_pages: int) -> Iterator[tuple[int, int]]:
        """Yield, for one write after the other, which page is its first and how many it moves.

        A deadline is not looked at within one.
        """
        if self.native is not None:
            return self.native.cut(layout, num_pages)
        step = self.pages_per_chunk(layout)
        return ((first, min(step, num_pages - first)) for first in range(0, num_pages, step))

    def pages_per_chunk(self, layout: PageLayout) -> int:
        """Return how many pages to read with a call: the checksum then finds them in a cache."""
        chunk_bytes = _DIRECT_CHUNK_BYTES if self._direct else _CHUNK_BYTES
        return max(1, chunk_bytes // layout.stride_bytes)

    def read(self, layout: PageLayout, first: int, target: PageViews) -> int:
        """Read pages from the `first` on into memory.

        Returns:
            How many were read as a whole: fewer where a segment ends too early or is not there.

        Raises:
            OSError: from the kernel.
        """
        gap_bytes = layout.gap_bytes
        buffers = _stream(target, gap_bytes, self._scrap)
        # What lies behind the last page is not moved.
        num_bytes = target.num_pages * layout.stride_bytes - gap_bytes
        arguments = (layout.extents, first * layout.page_blocks, buffers, num_bytes)
        try:
            num_read = self._read(*arguments)
        except OSError as error:
            if not self._gives_up_direct(error):
                raise
            num_read = self._read(*arguments)
        return (num_read + gap_bytes) // layout.stride_bytes

    def write(
        self,
        layout: PageLayout,
        first: int,
        memory: BatchMemory,
        start: int,
        num_pages: int,
        mark: Mark | None = None,
    ) -> bytes:
        """Write pages of a batch, from `start` on, to the places of the `first` and those behind.

        A `mark` within them need not be reached, see `passes_marks`. What is in front of it is not
        written any more when it was: it may be somebody else's place by then.

        Returns:
            Their checksums.

        Raises:
            OSError: from the kernel; any part may have been written.
        """
        before = b""
        if self.native is not None:
            watched = None if mark is None else _WatchedMark(mark)
            with contextlib.suppress(OSError):
                return self.native.write(
                    layout, first, memory.pages, start, num_pages, watched.mark if watched else None
                )
            before = watched.checksums if watched else b""
            num_before = len(before) // CHECKSUM_BYTES
            first, start, num_pages = first + num_before, start + num_before, num_pages - num_before
        source = memory.views(start, num_pages)
        checksums = before + source.checksums()
        buffers = _stream(source, layout.gap_bytes, self._zeros)
        num_bytes = num_pages * layout.stride_bytes - layout.gap_bytes
        arguments = (layout.extents, first * layout.page_blocks, buffers, num_bytes)
        try:
            self._write(*arguments)
        except OSError as error:
            if not self._gives_up_direct(error):
                raise
            self._write(*arguments)
        return checksums

    def _gives_up_direct(self, error: OSError) -> bool:
        """Go on without direct I/O if an error says that there is none; return whether it does."""
        if not self._direct or error.errno != errno.EINVAL:
            return False
        self._direct = False
        if self.native is not None:
            self.native = NativeTransfer(self._fd, mapping_of=self._mapping_of)
        self.num_direct_refusals += 1
        _LOGGER.warning("the file system refuses direct I/O (%s); it is buffered", error)
        return True

    def _write(
        self,
        extents: Sequence[Extent],
        first_block: int,
        buffers: list[memoryview],
        num_bytes: int,
    ) -> None:
        if not self._needs_staging(buffers):
            self._move_out(_places(extents, first_block, buffers, num_bytes))
            return
        with self._staging(num_bytes) as staging:
            start = 0
            for buffer in buffers:
                staging[start : start + len(buffer)] = buffer
                start += len(buffer)
            self._move_out(_places(extents, first_block, [staging], len(staging)))

    def _read(
        self,
        extents: Sequence[Extent],
        first_block: int,
        buffers: list[memoryview],
        num_bytes: int,
    ) -> int:
        if not self._needs_staging(buffers):
            return self._move_in(_places(extents, first_block, buffers, num_bytes))
        with self._staging(num_bytes) as staging:
            num_read = self._move_in(_places(extents, first_block, [staging], len(staging)))
            start = 0
            for buffer in buffers:
                buffer[:] = staging[start : start + len(buffer)]
                start += len(buffer)
        return min(num_read, num_bytes)

    def _needs_staging(self, buffers: Sequence[memoryview]) -> bool:
        """Whether direct I/O does not take the memory as it is."""
        return self._direct and not all(map(_is_aligned, buffers))

    def _move_in(self, places: list[_Place]) -> int:
        total = 0
        for segment, offset, num_bytes, buffers in places:
            try:
                num_read = read_at(self._fd(segment), buffers, offset, num_bytes)
            except FileNotFoundError:
                break
            total += num_read
            if num_read < num_bytes:
                break
        return total

    def _move_out(self, places: list[_Place]) -> None:
        for segment, offset, num_bytes, buffers in places:
            write_at(self._fd(segment, True), buffers, offset, num_bytes)

    def _fd(self, segment: int, create: bool = False) -> int:
        buffered = self._segments.fd(BlockKind.PAYLOAD, segment, create=create)
        return self._segments.direct_fd(segment) if self._direct else buffered

    @contextlib.contextmanager
    def _staging(self, num_bytes: int) -> Iterator[memoryview]:
        """Lend an aligned buffer of whole blocks."""
        num_bytes = blocks_for(num_bytes) * BLOCK_BYTES
        try:
            buffer = self._spare_buffers.pop()
        except IndexError:
            buffer = mmap.mmap(-1, max(num_bytes, _STAGING_BYTES))
        if len(buffer) < num_bytes:
            buffer = mmap.mmap(-1, num_bytes)
        with memoryview(buffer) as whole, whole[:num_bytes] as view:
            yield view
        if len(self._spare_buffers) < _MAX_SPARE_BUFFERS:
            self._spare_buffers.append(buffer)


class _WatchedMark:
    """Knows whether a mark was reached: then it has the checksums of what comes before."""

    def __init__(self, mark: Mark) -> None:
        self.checksums = b""
        self._reach = mark.reach
        self.mark = Mark(mark.num_pages, self._note)

    def _note(self, checksums: bytes) -> None:
        self.checksums = checksums
        self._reach(checksums)


def _stream(memory: PageViews, gap_bytes: int, between: memoryview) -> list[memoryview]:
    """Return the memory of pages in order, with what lies between them on the disk."""
    if not gap_bytes:
        return memory.all_pieces()
    gap = between[:gap_bytes]
    return [view for pieces in memory.each() for view in (*pieces, gap)][:-1]


def _is_aligned(buffer: memoryview) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return (address | len(buffer)) % BLOCK_BYTES == 0


class _Place(NamedTuple):
    segment: int
    offset: int
    num_bytes: int
    buffers: list[memoryview]


def _places(
    extents: Sequence[Extent], first_block: int, buffers: list[memoryview], num_bytes: int
) -> list[_Place]:
    """Return where on the disk the parts of `buffers` belong, which hold `num_bytes`."""
    if len(extents) == 1:
        segment, block, _ = extents[0]
        return [_Place(segment, (block + first_block) * BLOCK_BYTES, num_bytes, buffers)]
    places: list[_Place] = []
    for segment, block, num_blocks in cut(extents, first_block, blocks_for(num_bytes)):
        part_bytes = min(num_bytes, num_blocks * BLOCK_BYTES)
        part, buffers = split_buffers(buffers, part_bytes)
        places.append(_Place(segment, block * BLOCK_BYTES, part_bytes, part))
        num_bytes -= part_bytes
    return places
