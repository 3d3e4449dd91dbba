"""The directory of a store: what makes it one, and who may set it up.

FORMAT                          what the directory is; locked while somebody opens the store
UNSYNCED                        set while a power loss can tear the index, see `unsynced_mark`
index/                          the LMDB environment
data/<n>.pages, <n>.headers     segments
owners/<16 hex>                 lock files of the processes that have the store open
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache.errors import ConfigError
from hicache.storage.page_store.blocks import BLOCK_BYTES
from hicache.storage.page_store.group import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEFAULT_SEGMENT_BYTES", "StoreDirectory", "StoreFormat"]

DEFAULT_SEGMENT_BYTES = 16 << 30
"""Length that a segment file can grow to: few descriptors, and below the limits of file systems."""

_FORMAT_NAME = "FORMAT"
_MAGIC = "hicache page store"
_MAX_FORMAT_BYTES = 4096
_NAP_SECONDS = 0.01
_MAX_NAPS = 100


class StoreFormat(NamedTuple):
    """What `FORMAT` says.

    Attributes:
        store_id: told apart from every other store by it.
        segment_blocks: blocks of a segment at most.
    """

    store_id: str
    segment_blocks: int


class StoreDirectory:
    """The paths of a store, and the check that they are those of one."""

    def __init__(self, path: str) -> None:
        """Name a directory, which need not be there; a relative path means the one of now."""
        self.path = os.path.abspath(path)
        self.index = f"{self.path}/index"
        self.data = f"{self.path}/data"
        self.owners = f"{self.path}/owners"
        self._format = f"{self.path}/{_FORMAT_NAME}"

    @property
    def is_store(self) -> bool:
        """Whether somebody has set a store up here."""
        return os.path.exists(self._format)

    @contextlib.contextmanager
    def locked_soon(self) -> Iterator[bool]:
        """Keep others from opening the store; give False when somebody is just doing that."""
        fd = os.open(self._format, os.O_RDWR)
        try:
            yield _lock_soon(fd)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def locked(self, *, create: bool, segment_bytes: int) -> Iterator[StoreFormat]:
        """Check the directory, set it up if need be, and keep others from opening it meanwhile.

        Args:
            create: whether a directory that is empty or not there becomes a store.
            segment_bytes: of a new store.

        Raises:
            ConfigError: the directory is of another format version or not a store.
            OSError: from the kernel.
        """
        if create:
            os.makedirs(self.path, exist_ok=True)
        names = os.listdir(self.path) if create or self.is_store else []
        if _FORMAT_NAME not in names and (names or not create):
            raise ConfigError(
                f"{self.path} is no hicache page store"
                f"{' and not empty' if create else ''}: it has no file FORMAT (directories of one "
                "file a page, as older versions wrote them, are not read); choose another directory"
            )
        fd = os.open(self._format, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            found = os.pread(fd, _MAX_FORMAT_BYTES, 0)
            if not found:
                found = _describe_new(segment_bytes)
                os.pwrite(fd, found, 0)
                os.fsync(fd)
            store_format = self._parse(found)
            for part in (self.index, self.data, self.owners):
                os.makedirs(part, exist_ok=True)
            yield store_format
        finally:
            os.close(fd)

    def _parse(self, found: bytes) -> StoreFormat:
        try:
            fields: Any = json.loads(found)
            magic, version = fields["magic"], fields["version"]
        except (ValueError, TypeError, KeyError, RecursionError):
            magic = version = None
        if magic != _MAGIC:
            raise ConfigError(
                f"{self._format} is not that of a hicache page store; choose another directory"
            )
        try:
            if (version, fields["block_bytes"]) == (FORMAT_VERSION, BLOCK_BYTES):
                return StoreFormat(str(fields["id"]), int(fields["segment_bytes"]) // BLOCK_BYTES)
        except (ValueError, TypeError, KeyError):
            pass
        raise ConfigError(
            f"{self.path} holds a page store of format version {version}; this version of hicache "
            f"reads version {FORMAT_VERSION}: choose another directory, or remove this one"
        )


def _lock_soon(fd: int) -> bool:
    for _ in range(_MAX_NAPS):
        if _try_lock(fd):
            return True
        time.sleep(_NAP_SECONDS)
    return False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_new(segment_bytes: int) -> bytes:
    fields = {
        "magic": _MAGIC,
        "version": FORMAT_VERSION,
        "block_bytes": BLOCK_BYTES,
        "segment_bytes": segment_bytes,
        "id": secrets.token_hex(16),
    }
    return (json.dumps(fields, indent=2) + "\n").encode()
