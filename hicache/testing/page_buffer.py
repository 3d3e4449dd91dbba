"""Host memory for one page in a test."""

from __future__ import annotations

import ctypes

from hicache.storage.base import Page, Piece

__all__ = ["PageBuffer"]

_GUARD = b"\xab" * 64


class PageBuffer:
    """Memory for one page, in pieces of given lengths with guard bytes around each.

    The guards show a backend that writes outside of the pieces: every `read` checks them.
    """

    def __init__(self, *piece_bytes: int) -> None:
        """Allocate pieces of these lengths, filled with the guards' byte."""
        num_bytes = sum(piece_bytes) + len(_GUARD) * (len(piece_bytes) + 1)
        self._memory = bytearray(_GUARD[:1] * num_bytes)
        self._starts: list[int] = []
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        pieces: list[Piece] = []
        start = len(_GUARD)
        for length in piece_bytes:
            self._starts.append(start)
            pieces.append(Piece(base + start, length))
            start += length + len(_GUARD)
        self._page = tuple(pieces)

    @classmethod
    def holding(cls, payload: bytes, *piece_bytes: int) -> PageBuffer:
        """Return a page that holds `payload`, in one piece or in pieces of these lengths."""
        buffer = cls(*(piece_bytes or (len(payload),)))
        done = 0
        for start, (_, length) in zip(buffer._starts, buffer._page, strict=True):
            buffer._memory[start : start + length] = payload[done : done + length]
            done += length
        assert done == len(payload), f"{done} bytes of pieces for {len(payload)} bytes"
        return buffer

    @property
    def page(self) -> Page:
        """The pieces; valid while this object lives."""
        return self._page

    def read(self) -> bytes:
        """Return the bytes of the pieces in order."""
        parts: list[bytearray] = []
        done = 0
        for start, (_, length) in zip(self._starts, self._page, strict=True):
            assert self._memory[done:start] == _GUARD, f"bytes before byte {start} were changed"
            done = start + length
            parts.append(self._memory[start:done])
        assert self._memory[done:] == _GUARD, f"bytes behind byte {done} were changed"
        return b"".join(parts)
