"""The files that payloads and headers lie in."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING

from hicache.storage import native_io
from hicache.storage.page_store.blocks import BLOCK_BYTES, BlockKind
from hicache.storage.page_store.fallocate import punch_range, reserve_range
from hicache.storage.vectored_io import write_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.storage.page_store.blocks import Extent

__all__ = ["FULL_ERRNOS", "Segments"]

FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the kernel says when a file system, a quota or a file may take no more."""


class Segments:
    """The segment files of one store, opened when they are first needed. Thread-safe.

    A file is `<number>.pages` or `<number>.headers`. It is as long as what was ever reserved in it,
    with holes where space was given back. Descriptors and mappings stay until `close`, so that no
    call can meet one that means another file by now.
    """

    def __init__(self, directory: str, *, mapped_bytes: int = 0) -> None:
        """Use an existing directory.

        Args:
            directory: where the files are.
            mapped_bytes: how much of each payload file can be mapped; 0 for none.
        """
        self._directory = directory
        self._mapped_bytes = mapped_bytes
        # Guards the opening of files; look-ups in the dictionary need no lock.
        self._lock = threading.Lock()
        self._fds: dict[tuple[BlockKind, int, bool], int] = {}
        # Of files that were deleted under us; another thread may still use them.
        self._retired_fds: list[int] = []
        # Addresses; 0 where a file cannot be mapped.
        self._mappings: dict[int, int] = {}
        self._retired_mappings: list[int] = []
        self._created = False
        self._can_punch = True

    @property
    def can_punch(self) -> bool:
        """Whether the file system is not known to be unable to take space back."""
        return self._can_punch

    def fd(self, kind: BlockKind, segment: int, *, create: bool = False) -> int:
        """Return the file's descriptor, for buffered I/O.

        Raises:
            OSError: the file is not there (and `create` is not set) or cannot be opened.
        """
        known = self._fds.get((kind, segment, False))
        return self._open(kind, segment, create=create) if known is None else known

    def direct_fd(self, segment: int) -> int:
        """Return a descriptor of a payload file that is there, for direct I/O.

        Raises:
            OSError: it cannot be opened; `EINVAL` if the file system knows no direct I/O.
        """
        known = self._fds.get((BlockKind.PAYLOAD, segment, True))
        return self._open(BlockKind.PAYLOAD, segment, direct=True) if known is None else known

    def mapping(self, segment: int, end: int) -> int:
        """Return the address at which an opened payload file is mapped, for reading.

        What is read there counts as memory of the process, though it is the page cache's still.

        Args:
            segment: number of the file.
            end: up to where it is wanted, in bytes from its start.

        Returns:
            0 if it is not mapped as far as that. Beyond the end of the file nothing can be read.
        """
        if end > self._mapped_bytes:
            return 0
        known = self._mappings.get(segment)
        return self._map(segment) if known is None else known

    def size(self, segment: int) -> int:
        """Return the length of a payload file in bytes; 0 if it is not there.

        Raises:
            OSError: from the kernel, which does not say.
        """
        try:
            status = os.fstat(self.fd(BlockKind.PAYLOAD, segment))
            if not status.st_nlink:
                self._retire(segment)
                status = os.fstat(self.fd(BlockKind.PAYLOAD, segment))
        except FileNotFoundError:
            return 0
        return status.st_size

    def reserve(self, kind: BlockKind, extent: Extent) -> None:
        """Give an extent its space on the disk, where the file system can do that.

        Raises:
            OSError: from the kernel, such as `ENOSPC`.
        """
        fd = self.fd(kind, extent.segment, create=True)
        reserve_range(fd, extent.block * BLOCK_BYTES, extent.num_blocks * BLOCK_BYTES)

    def punch(self, kind: BlockKind, extent: Extent) -> bool:
        """Give the space of an extent back; return `False` where the file system cannot."""
        try:
            fd = self.fd(kind, extent.segment)
            offset, num_bytes = extent.block * BLOCK_BYTES, extent.num_blocks * BLOCK_BYTES
            self._can_punch = punch_range(fd, offset, num_bytes)
        except OSError:
            return False
        return self._can_punch

    def write_header(self, extent: Extent, header: bytes) -> None:
        """Write a group's header.

        Raises:
            OSError: from the kernel.
        """
        fd = self.fd(BlockKind.HEADER, extent.segment, create=True)
        write_at(fd, [memoryview(header)], extent.block * BLOCK_BYTES, len(header))

    def wipe_header(self, extent: Extent) -> None:
        """Make a header unreadable, so that no index rebuilt later has its pages.

        Best effort: pages that come back by a header that stays are right, and verified as all are.
        """
        with contextlib.suppress(OSError):
            fd = self.fd(BlockKind.HEADER, extent.segment)
            os.pwrite(fd, bytes(8), extent.block * BLOCK_BYTES)

    def sync(self, files: Iterable[tuple[BlockKind, int]]) -> None:
        """Wait until what was written to these files is on the disk, and they under their names.

        Raises:
            OSError: from the kernel; what was written may be lost.
        """
        for kind, segment in files:
            os.fdatasync(self.fd(kind, segment))
        if self._created:
            self._created = False
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            except OSError:
                self._created = True
                raise
            finally:
                os.close(fd)

    def close(self) -> None:
        """Close all files; to be called when no other call is under way."""
        mappings = [*self._mappings.values(), *self._retired_mappings]
        self._mappings, self._retired_mappings = {}, []
        for mapping in filter(None, mappings):
            native_io.page_io.unmap(mapping, self._mapped_bytes)
        fds = [*self._fds.values(), *self._retired_fds]
        self._fds, self._retired_fds = {}, []
        for fd in fds:
            os.close(fd)

    def path(self, kind: BlockKind, segment: int) -> str:
        """Return the path of a file."""
        return f"{self._directory}/{segment}.{kind.value}"

    def _retire(self, segment: int) -> None:
        """Forget the descriptors of a payload file that was deleted, and of headers with it."""
        with self._lock:
            for name in list(self._fds):
                if name[0] is BlockKind.HEADER or name[1] == segment:
                    self._retired_fds.append(self._fds.pop(name))
            self._retired_mappings.append(self._mappings.pop(segment, 0))

    def _map(self, segment: int) -> int:
        with self._lock:
            fd = self._fds.get((BlockKind.PAYLOAD, segment, False))
            if fd is None:
                return 0
            if segment not in self._mappings:
                try:
                    address = native_io.page_io.map_file(fd, self._mapped_bytes)
                except OSError:
                    address = 0
                self._mappings[segment] = address
            return self._mappings[segment]

    def _open(
        self, kind: BlockKind, segment: int, *, create: bool = False, direct: bool = False
    ) -> int:
        name, path = (kind, segment, direct), self.path(kind, segment)
        flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        with self._lock:
            if name in self._fds:
                return self._fds[name]
            try:
                fd = os.open(path, flags)
            except FileNotFoundError:
                if not create:
                    raise
                # Whoever deleted segments may have deleted their directory, but not the store's.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._directory)
                fd = os.open(path, flags | os.O_CREAT, 0o666)
                self._created = True
            self._fds[name] = fd
            return fd
