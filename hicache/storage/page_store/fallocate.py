"""Giving a range of a file its space on the disk, and giving that space back."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["punch_range", "reserve_range"]

_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS)

# Not `os.posix_fallocate`: where the file system cannot reserve, that writes into every block.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_LIBC.fallocate.restype = ctypes.c_int


def reserve_range(fd: int, offset: int, num_bytes: int) -> bool:
    """Give a range its space, so that writing there needs no more; the file grows if need be.

    Returns:
        Whether the file system can do that.

    Raises:
        OSError: from the kernel, such as `ENOSPC`; part of the range may have its space.
    """
    return _fallocate(fd, 0, offset, num_bytes)


def punch_range(fd: int, offset: int, num_bytes: int) -> bool:
    """Give the space of a range back to the file system; the range then reads as zeros.

    Returns:
        Whether the file system can do that.

    Raises:
        OSError: from the kernel.
    """
    return _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, num_bytes)


def _fallocate(fd: int, mode: int, offset: int, num_bytes: int) -> bool:
    while _LIBC.fallocate(fd, mode, offset, num_bytes):
        error = ctypes.get_errno()
        if error in _UNSUPPORTED:
            return False
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error))
    return True
