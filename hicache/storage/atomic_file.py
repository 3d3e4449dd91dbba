"""Files that appear under their name whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import secrets
from typing import TYPE_CHECKING

from hicache.storage.vectored_io import write_fully

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AtomicWriter"]

_TEMPORARY_NAME = re.compile(r"\d+-[0-9a-f]{8}-\d+\.tmp")


class AtomicWriter:
    """Writes files under temporary names and renames them into place.

    A temporary file is locked (`flock`) while it is written, and the kernel drops the lock when
    its process dies in whatever way. So a file that can be locked is an orphan; process ids alone
    would not tell, as they repeat from one container to the next.

    Thread-safe.
    """

    def __init__(self, temporary_directory: str, *, fsync: bool) -> None:
        """Use an existing directory, on the file system of the files to be written.

        Args:
            temporary_directory: for files being written; may be shared between writers.
            fsync: whether `publish` waits until file and name are on the disk.
        """
        self._directory = temporary_directory
        self._fsync = fsync
        # Together with the process id, which changes in a fork, unique without a look at the disk.
        self._token = secrets.token_hex(4)
        self._serial = itertools.count()

    def publish(self, path: str, buffers: Sequence[memoryview]) -> None:
        """Make a file of `buffers` at `path`, in place of whatever file is there.

        The directory of `path` is made if need be. After an error nothing is left behind; only an
        error from the last `fsync` comes after the file has appeared.

        Raises:
            OSError: from the kernel, such as `ENOSPC`.
        """
        name = f"{os.getpid()}-{self._token}-{next(self._serial)}.tmp"
        temporary_path = f"{self._directory}/{name}"
        fd = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # Closed before the rename: some file systems report a failed write only then. An
            # orphan hunt in between costs this one file, with an error.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_fully(fd, buffers)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            _rename(temporary_path, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary_path)
            raise
        if self._fsync:
            directory = os.path.dirname(path)
            _fsync_directory(directory)
            _fsync_directory(os.path.dirname(directory))

    def remove_orphans(self) -> int:
        """Remove temporary files that no living process is writing; return how many those were.

        Files that this process may not remove stay: they cost space and nothing else.

        Raises:
            OSError: the directory cannot be listed.
        """
        with os.scandir(self._directory) as entries:
            paths = [entry.path for entry in entries if _TEMPORARY_NAME.fullmatch(entry.name)]
        return sum(_remove_if_orphan(path) for path in paths)


def _rename(temporary_path: str, path: str) -> None:
    try:
        os.replace(temporary_path, path)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(temporary_path, path)


def _remove_if_orphan(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _fsync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
