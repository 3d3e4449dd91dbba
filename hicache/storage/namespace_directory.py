"""The directory that holds the page files of one namespace.

    <root>/<model>-<digest>/namespace.json          what the directory is for
    <root>/<model>-<digest>/tmp/                    files being written
    <root>/<model>-<digest>/<2 hex>/<64 hex>.kv     pages, by the first byte of their key

Files being written have a place of their own, so that what a dead process left behind is found
without a scan of all pages.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.storage.atomic_file import AtomicWriter
from hicache.storage.page_file import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache.hashing import StorageNamespace
    from hicache.types import PageHash

__all__ = ["NamespaceDirectory", "directory_name"]

_PAGE_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_SHARD_NAME = re.compile(r"[0-9a-f]{2}")

_MAX_READABLE_CHARS = 40
_DIGEST_CHARS = 32


def directory_name(namespace: StorageNamespace) -> str:
    """Return the directory's name: at most 73 characters, portable, different per namespace.

    The digest alone tells namespaces apart, also where file names ignore case; the model's name
    in front is for people.
    """
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", namespace.model).strip("._-")
    return f"{readable[:_MAX_READABLE_CHARS] or 'model'}-{namespace.digest.hex()[:_DIGEST_CHARS]}"


class NamespaceDirectory:
    """Names, publishes and removes the page files of one namespace. Thread-safe."""

    def __init__(
        self, root: str, namespace: StorageNamespace, *, page_bytes: int, fsync: bool
    ) -> None:
        """Open the directory, make it if need be, and remove what dead writers left in it.

        Raises:
            ConfigError: it cannot be made or written, or belongs to something else.
        """
        self._path = os.path.join(os.path.abspath(root), directory_name(namespace))
        temporary_directory = os.path.join(self._path, "tmp")
        self._writer = AtomicWriter(temporary_directory, fsync=fsync)
        try:
            os.makedirs(temporary_directory, exist_ok=True)
            if not os.access(temporary_directory, os.W_OK | os.X_OK):
                raise PermissionError(f"no permission to write in {temporary_directory}")
            self._writer.remove_orphans()
            self._claim(_description(namespace, page_bytes))
        except OSError as error:
            raise ConfigError(
                f"storage directory {root!r} cannot be used ({error}); set option 'path' to a "
                "directory that this process can create and write in"
            ) from error

    def page_path(self, key: PageHash) -> str:
        """Return the path of a page's file, whether it is there or not."""
        name = key.hex()
        return f"{self._path}/{name[:2]}/{name}.kv"

    def publish_page(self, key: PageHash, buffers: Sequence[memoryview]) -> None:
        """Make the page's file, whole or not at all; see `AtomicWriter.publish`."""
        self._writer.publish(self.page_path(key), buffers)

    def remove_pages(self) -> int:
        """Remove every page file and nothing else; return how many those were.

        Raises:
            OSError: from the kernel; the pages visited before are gone.
        """
        num_removed = 0
        for path in self._page_paths():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                num_removed += 1
        return num_removed

    def _page_paths(self) -> Iterator[str]:
        for shard in _list_directory(self._path):
            if _SHARD_NAME.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                for entry in _list_directory(shard.path):
                    if (
                        _PAGE_NAME.fullmatch(entry.name)
                        and entry.name.startswith(shard.name)
                        and entry.is_file(follow_symlinks=False)
                    ):
                        yield entry.path

    def _claim(self, description: bytes) -> None:
        """Check `namespace.json`, or write it if the directory is new."""
        path = os.path.join(self._path, "namespace.json")
        try:
            found = _read_start(path, len(description) + 1)
        except FileNotFoundError:
            self._writer.publish(path, [memoryview(description)])
            return
        # Compared as bytes: nothing in the directory is ever parsed.
        if found != description:
            raise ConfigError(
                f"{path} describes another namespace, page size or file format than this engine's;"
                " set option 'path' to another directory, or remove this one if it is not needed"
            )


def _description(namespace: StorageNamespace, page_bytes: int) -> bytes:
    record = {
        "digest": namespace.digest.hex(),
        "namespace": namespace.describe(),
        "page_bytes": page_bytes,
        "page_file_format": FORMAT_VERSION,
    }
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()


def _list_directory(path: str) -> list[os.DirEntry[str]]:
    # As a list, because what is yet to come must not depend on what is removed meanwhile.
    with os.scandir(path) as entries:
        return list(entries)


def _read_start(path: str, num_bytes: int) -> bytes:
    # Non-blocking, so that a FIFO of that name does not hang the start.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a regular file")
        return os.read(fd, num_bytes)
    finally:
        os.close(fd)
