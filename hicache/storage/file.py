"""A storage backend that keeps each page in a file of its own.

It needs no index and no server, and any number of processes can share a directory. What it costs
is one open and one rename per page; it puts no bound on the space it takes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from hicache.errors import ConfigError, StorageError
from hicache.storage.base import HiCacheStorageConfig, StorageCapabilities
from hicache.storage.namespace_directory import NamespaceDirectory
from hicache.storage.page_file import HEADER_BYTES, PageFormat
from hicache.storage.page_memory import page_checksum, page_views
from hicache.storage.pagewise import PagewiseStorage
from hicache.storage.vectored_io import read_fully
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.storage.base import Page

__all__ = ["FileStorage"]

_DAMAGED = (PageOutcome.TRUNCATED, PageOutcome.CORRUPT, PageOutcome.FOREIGN)
_NO_SPACE_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class FileStorage(PagewiseStorage):
    """Keeps each page in a file under a directory that instances and processes can share.

    Bytes go between file and page memory without a copy in between. A page appears by a rename, so
    it is never seen half written; each read checks length, header and checksum of the whole page,
    and removes the file when they do not fit. `batch_exists` looks at the length alone.

    Options in `extra_config`:

    - `path` (str, required): the directory; made if it is not there.
    - `fsync` (bool, default `False`): whether a page is on the disk before it is `OK`. Without it
      a power loss can lose or tear the newest pages; a torn page is a miss, by its checksum.

    Permissions of files and directories follow the umask of the process; KV tells as much as the
    prompts it was computed from.
    """

    def __init__(self, config: HiCacheStorageConfig) -> None:
        """Open the namespace's directory and remove what dead writers left in it.

        Raises:
            ConfigError: an option is unknown, missing or of the wrong type, or the directory
                cannot be used.
        """
        super().__init__(config)
        options = config.checked_extra_config("file", {"path": str, "fsync": bool})
        if not options.get("path"):
            raise ConfigError(
                "storage backend 'file' needs the option 'path': the directory for its pages"
            )
        self._format = PageFormat(config.namespace.digest, config.page_bytes)
        self._directory = NamespaceDirectory(
            options["path"],
            config.namespace,
            page_bytes=config.page_bytes,
            fsync=options.get("fsync", False),
        )

    @property
    def capabilities(self) -> StorageCapabilities:
        """See `HiCacheStorage.capabilities`."""
        return StorageCapabilities(durable=True, shared_between_processes=True)

    def _has_page(self, key: PageHash) -> bool:
        try:
            status = os.stat(self._directory.page_path(key))
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self._format.file_bytes

    def _read_page(self, key: PageHash, page: Page) -> PageOutcome:
        path = self._directory.page_path(key)
        try:
            with _open_for_reading(path) as fd:
                outcome = self._load(fd, key, page_views(page))
                if outcome in _DAMAGED:
                    _unlink_if_same(path, fd)
                return outcome
        except FileNotFoundError:
            return PageOutcome.MISS
        except OSError as error:
            self._note_error(error)
            return PageOutcome.FAILED

    def _write_page(self, key: PageHash, parent_key: bytes, page: Page) -> PageOutcome:
        if self._holds_page(key):
            return PageOutcome.PRESENT
        views = page_views(page)
        header = self._format.encode(key, parent_key, page_checksum(views))
        try:
            self._directory.publish_page(key, [memoryview(header), *views])
        except OSError as error:
            self._note_error(error)
            full = error.errno in _NO_SPACE_ERRNOS
            return PageOutcome.NO_SPACE if full else PageOutcome.FAILED
        return PageOutcome.OK

    def _clear_pages(self) -> int:
        try:
            return self._directory.remove_pages()
        except OSError as error:
            raise StorageError(f"cannot remove all pages ({error}); check permissions") from error

    def _holds_page(self, key: PageHash) -> bool:
        """Return whether the page's file has the right length and header; if not, replace it."""
        try:
            with _open_for_reading(self._directory.page_path(key)) as fd:
                return self._load(fd, key, []) is PageOutcome.OK
        except OSError:
            return False

    def _load(self, fd: int, key: PageHash, views: list[memoryview]) -> PageOutcome:
        """Read and verify the header and, unless `views` is empty, the payload."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return PageOutcome.FOREIGN
        if status.st_size > self._format.file_bytes:
            return PageOutcome.CORRUPT
        if status.st_size < self._format.file_bytes:
            return PageOutcome.TRUNCATED
        header = bytearray(HEADER_BYTES)
        wanted_bytes = self._format.file_bytes if views else HEADER_BYTES
        # The file can be cut between the look at its length and the read.
        if read_fully(fd, [memoryview(header), *views]) < wanted_bytes:
            return PageOutcome.TRUNCATED
        outcome = self._format.check(header, key)
        if outcome is not PageOutcome.OK or not views:
            return outcome
        if page_checksum(views) != self._format.payload_checksum(header):
            return PageOutcome.CORRUPT
        return PageOutcome.OK


@contextlib.contextmanager
def _open_for_reading(path: str) -> Iterator[int]:
    # Non-blocking, so that a FIFO in place of a page does not hang a worker.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _unlink_if_same(path: str, fd: int) -> None:
    """Remove `path` while it is still the file that `fd` has open.

    Another writer may put a sound page there between the check and the removal; that page is then
    lost, which is a miss.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            os.unlink(path)
