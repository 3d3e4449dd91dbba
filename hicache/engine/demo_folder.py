"""The folder of a demo, with its L3: what one that was killed has left there, the next one uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb

from hicache.errors import ConfigError
from hicache.storage.page_store import summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DemoFolder"]

_PREFIX = "demo-"
_STORAGE = "storage"


class DemoFolder:
    """A folder that no other demo has, until it is closed or this process ends.

    Locks tell whose run still lives. The kernel drops them when a process dies in whatever way.

    Args:
        root: holds the folders of all demos; made if it is not there.
        name: of all runs that may go on from each other, in letters and digits.

    Attributes:
        path: of the folder. It has nothing but `storage`, if a run of the same name has left that.
        storage: where L3 is.
        num_pages, num_bytes: that were in L3 already.

    Raises:
        OSError: the file system does not let this user have such a folder, or lock it.
    """

    def __init__(self, root: Path, *, name: str) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            self.path, self._lock = _take_over(root, f"{_PREFIX}{name}-")
        self.storage = self.path / _STORAGE
        self.num_pages, self.num_bytes = _stored(self.storage)

    def remove(self) -> None:
        """Remove the folder with all that is stored: the run has come to its end.

        Raises:
            OSError: something of it cannot be removed.
        """
        with _locked(self._root):
            shutil.rmtree(self.path)

    def close(self) -> bool:
        """Let the next run of this name have the folder; return whether it finds pages there.

        A folder without pages is removed. The processes of this run must have ended.
        """
        try:
            has_pages = _stored(self.storage)[0] > 0
            if not has_pages:
                with _locked(self._root):
                    shutil.rmtree(self.path, ignore_errors=True)
            return has_pages
        finally:
            os.close(self._lock)


def _take_over(root: Path, prefix: str) -> tuple[Path, int]:
    """Return a folder and its lock; remove all others whose runs have died."""
    taken: tuple[Path, int] | None = None
    for path in sorted(root.glob(f"{_PREFIX}*")):
        lock = _try_lock(path)
        if lock is None:
            continue
        if taken is None and path.name.startswith(prefix):
            _empty(path)
            taken = path, lock
        else:
            # Processes of a run that was just killed may still write, for a moment.
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    if taken is not None:
        return taken
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    lock = _try_lock(path)
    assert lock is not None, "nobody else looks for folders meanwhile"
    return path, lock


def _empty(path: Path) -> None:
    """Remove what a run leaves beside its storage: the next one writes the same files."""
    for file in path.iterdir():
        if file.name != _STORAGE:
            file.unlink()


def _stored(storage: Path) -> tuple[int, int]:
    """Return how many pages a store has and their bytes; one that cannot be read is removed."""
    try:
        namespaces = summarize(str(storage)).namespaces
    except (ConfigError, OSError, lmdb.Error):
        shutil.rmtree(storage, ignore_errors=True)
        return 0, 0
    pages = [(one.num_pages, one.num_pages * one.page_bytes) for one in namespaces]
    return sum(number for number, _ in pages), sum(size for _, size in pages)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Keep other demos from looking for folders meanwhile."""
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the folder until it is closed; None if a demo lives there."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock
