"""Whether a power loss may have torn the index of a store."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

__all__ = ["UnsyncedMark"]

_NAME = "UNSYNCED"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOTHING = "nothing"
_MARK_BYTES = 64


class UnsyncedMark:
    """A file that says under which boot of the kernel the index has commits that are not synced.

    The page cache outlives every process, so under the same boot the index is whole, whatever was
    killed. Under another one it may be anything, as commits do not wait for the disk, and the
    kernel writes them back in any order. Where the kernel does not tell its boot, a mark that was
    left counts as one of another boot.

    For whoever holds the lock of the store's directory. The file stays once it is there and is
    written in place, so that a full disk is in nobody's way. Errors are `OSError`.
    """

    def __init__(self, directory: str, *, boot_id: str | None = None) -> None:
        """Use an existing directory; `boot_id` is the kernel's unless tests give another."""
        self._directory = directory
        self._path = f"{directory}/{_NAME}"
        self._boot_id = boot_id or _read_boot_id()

    @property
    def is_of_another_boot(self) -> bool:
        """Whether it was set, and not cleared, before the machine was started the last time."""
        return self._read() not in (_NOTHING, self._boot_id)

    def set(self) -> None:
        """Make it say this boot; it is on the disk when this returns."""
        if self._read() != self._boot_id:
            self._write(self._boot_id)

    def clear(self) -> None:
        """Make it say that everything is synced; to be called when it is."""
        self._write(_NOTHING)

    def _read(self) -> str:
        try:
            with open(self._path, "rb") as file:
                return file.read(_MARK_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return _NOTHING

    def _write(self, text: str) -> None:
        is_new = not os.path.exists(self._path)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(fd, text.ljust(_MARK_BYTES - 1).encode() + b"\n", 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        return f"unknown {secrets.token_hex(8)}"
