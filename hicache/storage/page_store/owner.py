"""Processes that have a store open, told apart and known to be alive by locks on files.

The kernel drops a lock (`flock`) when its process dies in whatever way. Process ids would not tell:
they repeat from one container to the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets

__all__ = ["Owner", "is_alive", "list_owners"]

_NAME = re.compile(r"[0-9a-f]{16}")


class Owner:
    """This process as an owner of leases, until `close` or its end.

    Attributes:
        owner_id: 8 bytes, never used twice.
    """

    def __init__(self, directory: str) -> None:
        """Make the lock file in an existing directory, while nobody looks for dead owners there.

        Raises:
            OSError: from the kernel.
        """
        self.owner_id = secrets.token_bytes(8)
        self._path = f"{directory}/{self.owner_id.hex()}"
        self._fd: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Give the lock up and remove its file, if that is still there. Idempotent."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._fd)
        self._fd = None

    def disown(self) -> None:
        """Close a descriptor inherited by a fork, which would keep a dead parent's lock."""
        if self._fd is not None:
            os.close(self._fd)


def is_alive(directory: str, owner_id: bytes) -> bool:
    """Whether the process that made this owner still has it."""
    try:
        fd = os.open(f"{directory}/{owner_id.hex()}", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def list_owners(directory: str) -> list[bytes]:
    """Return every owner that has a lock file in the directory, alive or not."""
    return [bytes.fromhex(name) for name in os.listdir(directory) if _NAME.fullmatch(name)]
