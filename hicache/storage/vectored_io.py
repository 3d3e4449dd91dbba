"""Complete reads and writes between one file descriptor and many buffers.

The kernel may move less than it was asked to, and takes a bounded number of buffers a call.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["read_fully", "write_fully"]

_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


def read_fully(fd: int, buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` in order from the position of `fd`, which moves on.

    Returns:
        The number of bytes read: less than the buffers hold only at the end of the file.

    Raises:
        OSError: from the kernel.
    """
    return _move_fully(os.readv, fd, buffers)


def write_fully(fd: int, buffers: Sequence[memoryview]) -> None:
    """Write `buffers` in order at the position of `fd`, which moves on.

    Raises:
        OSError: from the kernel, or because it takes no more bytes without saying why.
    """
    num_bytes = sum(len(buffer) for buffer in buffers)
    num_written = _move_fully(os.writev, fd, buffers)
    if num_written < num_bytes:
        raise OSError(errno.EIO, f"wrote {num_written} of {num_bytes} bytes")


def _move_fully(
    move: Callable[[int, Sequence[memoryview]], int], fd: int, buffers: Sequence[memoryview]
) -> int:
    left = list(buffers)
    total = 0
    while left:
        num_moved = move(fd, left[:_MAX_BUFFERS])
        if num_moved == 0:
            break
        total += num_moved
        left = _after(left, num_moved)
    return total


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what remains of byte `buffers` behind their first `num_bytes`."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
