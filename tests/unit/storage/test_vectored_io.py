"""Reads and writes are complete however little the kernel moves at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.storage.vectored_io import read_fully, write_fully

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def stingy(
    move: Callable[[int, Sequence[memoryview]], int], limits: Sequence[int]
) -> Callable[[int, Sequence[memoryview]], int]:
    """Return a system call that moves at most one byte of `limits` after the other."""
    calls = iter(limits)

    def moves_less(fd: int, buffers: Sequence[memoryview]) -> int:
        limit = next(calls, None)
        if limit is None:
            return move(fd, buffers)
        taken = []
        for buffer in buffers:
            taken.append(buffer[:limit])
            limit -= len(taken[-1])
        return move(fd, taken)

    return moves_less


buffer_sizes = st.lists(st.integers(0, 50), max_size=12)
limits = st.lists(st.integers(1, 60), max_size=12)


@settings(deadline=None)
@given(sizes=buffer_sizes, limits=limits)
def test_a_short_write_is_continued_where_it_ended(sizes: list[int], limits: list[int]) -> None:
    payload = bytes(range(256)) * 3
    buffers, start = [], 0
    for size in sizes:
        buffers.append(memoryview(payload)[start : start + size])
        start += size
    fd = os.memfd_create("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", stingy(os.writev, limits))
        write_fully(fd, buffers)
    assert os.pread(fd, start + 1, 0) == payload[:start]
    os.close(fd)


@settings(deadline=None)
@given(sizes=buffer_sizes, limits=limits, file_bytes=st.integers(0, 700))
def test_a_short_read_is_continued_and_ends_with_the_file(
    sizes: list[int], limits: list[int], file_bytes: int
) -> None:
    payload = (bytes(range(1, 251)) * 3)[:file_bytes]
    fd = os.memfd_create("page")
    os.pwrite(fd, payload, 0)
    buffers = [bytearray(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "readv", stingy(os.readv, limits))
        num_read = read_fully(fd, [memoryview(buffer) for buffer in buffers])
    os.close(fd)
    assert num_read == min(file_bytes, sum(sizes))
    filled = b"".join(buffers)
    assert filled[:num_read] == payload[:num_read]
    assert not any(filled[num_read:])


def test_more_buffers_than_one_call_takes_are_moved(tmp_path: Path) -> None:
    payload = os.urandom(3 * os.sysconf("SC_IOV_MAX") + 1)
    with (tmp_path / "page").open("w+b", buffering=0) as file:
        view = memoryview(payload)
        write_fully(file.fileno(), [view[i : i + 1] for i in range(len(payload))])
        file.seek(0)
        target = memoryview(bytearray(len(payload)))
        pieces = [target[i : i + 1] for i in range(len(payload))]
        assert read_fully(file.fileno(), pieces) == len(payload)
    assert target == payload


def test_a_write_that_gets_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote 0 of 4 bytes"):
        write_fully(-1, [memoryview(b"page")])
