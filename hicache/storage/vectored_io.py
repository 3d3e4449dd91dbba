"""Complete reads and writes between a place in a file and many buffers.

The kernel may move less than it was asked to, and takes a bounded number of buffers a call.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["read_at", "split_buffers", "write_at"]

_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


def read_at(fd: int, buffers: Sequence[memoryview], offset: int, num_bytes: int) -> int:
    """Fill byte `buffers`, which hold `num_bytes`, in order from `offset` on.

    Returns:
        The number of bytes read: less than the buffers hold only at the end of the file.

    Raises:
        OSError: from the kernel.
    """
    return _move(os.preadv, fd, buffers, offset, num_bytes)


def write_at(fd: int, buffers: Sequence[memoryview], offset: int, num_bytes: int) -> None:
    """Write byte `buffers`, which hold `num_bytes`, in order from `offset` on.

    Raises:
        OSError: from the kernel, or because it takes no more bytes without saying why.
    """
    num_written = _move(os.pwritev, fd, buffers, offset, num_bytes)
    if num_written < num_bytes:
        raise OSError(errno.EIO, f"wrote {num_written} of {num_bytes} bytes")


def split_buffers(
    buffers: Sequence[memoryview], num_bytes: int
) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first `num_bytes` of byte `buffers`, and the others."""
    head: list[memoryview] = []
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            if num_bytes:
                head.append(buffer[:num_bytes])
            return head, [buffer[num_bytes:], *buffers[index + 1 :]]
        head.append(buffer)
        num_bytes -= len(buffer)
    return head, []


def _move(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    num_bytes: int,
) -> int:
    left = buffers
    total = 0
    while left:
        num_moved = move(fd, left[:_MAX_BUFFERS], offset + total)
        total += num_moved
        if num_moved == 0 or total == num_bytes:
            break
        _, left = split_buffers(left, num_moved)
    return total
