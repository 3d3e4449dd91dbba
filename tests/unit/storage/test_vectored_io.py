"""Reads and writes are complete however little the kernel moves at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.vectored_io import read_at, split_buffers, write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

OFFSET = 5


def stingy(
    move: Callable[[int, Sequence[memoryview], int], int], limits: Sequence[int]
) -> Callable[[int, Sequence[memoryview], int], int]:
    """Return a system call that moves at most one byte of `limits` after the other."""
    calls = iter(limits)

    def moves_less(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = next(calls, None)
        if limit is None:
            return move(fd, buffers, offset)
        taken, _ = split_buffers(buffers, limit)
        return move(fd, taken, offset)

    return moves_less


buffer_sizes = st.lists(st.integers(0, 50), max_size=12)
limits = st.lists(st.integers(1, 60), max_size=12)


@given(sizes=buffer_sizes, num_bytes=st.integers(0, 700))
def test_a_split_keeps_every_byte_in_order(sizes: list[int], num_bytes: int) -> None:
    payload = bytes(range(256)) * 3
    buffers, start = [], 0
    for size in sizes:
        buffers.append(memoryview(payload)[start : start + size])
        start += size
    num_bytes = min(num_bytes, start)
    head, tail = split_buffers(buffers, num_bytes)
    assert b"".join(head) == payload[:num_bytes]
    assert b"".join(tail) == payload[num_bytes:start]


@settings(deadline=None)
@given(sizes=buffer_sizes, limits=limits)
def test_a_short_write_is_continued_where_it_ended(sizes: list[int], limits: list[int]) -> None:
    payload = bytes(range(256)) * 3
    buffers, start = [], 0
    for size in sizes:
        buffers.append(memoryview(payload)[start : start + size])
        start += size
    fd = os.memfd_create("segment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", stingy(os.pwritev, limits))
        write_at(fd, buffers, OFFSET, start)
    assert os.pread(fd, start + 1, OFFSET) == payload[:start]
    os.close(fd)


@settings(deadline=None)
@given(sizes=buffer_sizes, limits=limits, file_bytes=st.integers(0, 700))
def test_a_short_read_is_continued_and_ends_with_the_file(
    sizes: list[int], limits: list[int], file_bytes: int
) -> None:
    payload = (bytes(range(1, 251)) * 3)[:file_bytes]
    fd = os.memfd_create("segment")
    os.pwrite(fd, payload, OFFSET)
    buffers = [bytearray(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", stingy(os.preadv, limits))
        num_read = read_at(fd, [memoryview(buffer) for buffer in buffers], OFFSET, sum(sizes))
    os.close(fd)
    assert num_read == min(file_bytes, sum(sizes))
    filled = b"".join(buffers)
    assert filled[:num_read] == payload[:num_read]
    assert not any(filled[num_read:])


def test_more_buffers_than_one_call_takes_are_moved(tmp_path: Path) -> None:
    payload = os.urandom(3 * os.sysconf("SC_IOV_MAX") + 1)
    with (tmp_path / "segment").open("w+b", buffering=0) as file:
        view = memoryview(payload)
        pieces = [view[i : i + 1] for i in range(len(payload))]
        write_at(file.fileno(), pieces, OFFSET, len(payload))
        target = memoryview(bytearray(len(payload)))
        pieces = [target[i : i + 1] for i in range(len(payload))]
        assert read_at(file.fileno(), pieces, OFFSET, len(payload)) == len(payload)
    assert target == payload


def test_a_write_that_gets_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote 0 of 4 bytes"):
        write_at(-1, [memoryview(b"page")], 0, 4)
