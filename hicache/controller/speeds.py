"""How long it takes to read, to load and to compute, and which of them is worth it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hicache.controller.affine_fit import Line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NUM_AGREED_SPEEDS", "Speeds"]

NUM_AGREED_SPEEDS = 6
"""Integers that stand for the speeds of a rank."""

_PICOSECONDS = 10**12
_UNKNOWN = 1 << 62
"""Picoseconds of what nobody has measured; longer than anything that was."""

_WORTH_OF_ENGINE = 0.25
"""What a second of computing pages that could be loaded has to save at least, in seconds: computing
takes the engine from everybody, loading only the link."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speeds:
    """What was measured lately; None where nothing was.

    Attributes:
        read: seconds of a call to storage, by pages.
        load: seconds of a load from the host, by pages.
        compute: seconds of a token in a forward pass, by the tokens before it.
    """

    read: Line | None = None
    load: Line | None = None
    compute: Line | None = None

    def to_integers(self) -> list[int]:
        """Return them as integers, the smaller, the slower; the least of what is unknown.

        So the minimum over ranks is the slowest of each, or unknown where one has measured nothing.
        """
        lines = (self.read, self.load, self.compute)
        return [part for line in lines for part in _to_integers(line)]

    @classmethod
    def from_integers(cls, values: Sequence[int]) -> Speeds:
        """Return the speeds that `to_integers` has given, rounded to picoseconds."""
        read, load, compute = (_from_integers(*values[at : at + 2]) for at in (0, 2, 4))
        return cls(read=read, load=load, compute=compute)

    def read_seconds(
        self, num_pages: int, *, num_calls: int = 1, num_pages_ahead: int = 0
    ) -> float | None:
        """Return how long storage takes for pages, behind those that are read before them."""
        if self.read is None:
            return None
        return self.read.base * num_calls + self.read.slope * (num_pages + num_pages_ahead)

    def compute_seconds(self, first_token: int, last_token: int) -> float | None:
        """Return how long the tokens `[first_token, last_token)` of a prompt take to compute."""
        if self.compute is None:
            return None
        span = np.asarray([first_token, last_token], dtype=np.float64)
        below = _seconds_up_to(span, self.compute)
        return float(below[1] - below[0])

    def leading_pages_to_load(
        self,
        num_pages: int,
        *,
        page_size: int,
        first_token: int,
        num_tokens: int,
        chunk_tokens: int | None = None,
        num_pages_ahead: int = 0,
    ) -> int:
        """Return how many pages from the host to load, so that the request is done soonest.

        The others are computed, as is the rest of the prompt, whose first pass goes on while layers
        are loaded. Never more than takes as long as loading all or nothing. All of them where
        nothing was measured.

        Args:
            num_pages: that the host has.
            page_size: tokens in a page.
            first_token: of the first of these pages.
            num_tokens: of the prompt.
            chunk_tokens: that a pass computes at most; None for all.
            num_pages_ahead: that the link carries before.
        """
        if self.load is None or self.compute is None:
            return num_pages
        last = first_token + num_pages * page_size
        end = float(max(last, num_tokens))
        loaded = np.arange(num_pages + 1, dtype=np.float64)
        first = first_token + loaded * page_size
        pass_end = np.minimum(first + (chunk_tokens or end), end)
        load = self.load.base + self.load.slope * (loaded + num_pages_ahead)
        load[0] = 0.0
        before_pass, behind_pass = (
            _seconds_up_to(place, self.compute) for place in (first, pass_end)
        )
        whole = _seconds_up_to(np.asarray([float(last), end]), self.compute)
        total = np.maximum(load, behind_pass - before_pass) + (whole[1] - behind_pass)
        weighed = total + _WORTH_OF_ENGINE * (whole[0] - before_pass)
        weighed[total > min(total[0], total[-1])] = np.inf
        # The most pages of those that are as good.
        return num_pages - int(np.argmin(weighed[::-1]))


def _seconds_up_to(place: npt.NDArray[np.float64], compute: Line) -> npt.NDArray[np.float64]:
    """Return the seconds of all tokens before each place; attention grows with what is before."""
    return np.asarray(place * (compute.base + compute.slope / 2 * place), dtype=np.float64)


def _to_integers(line: Line | None) -> tuple[int, int]:
    if line is None:
        return -_UNKNOWN, -_UNKNOWN
    base, slope = (min(round(part * _PICOSECONDS), _UNKNOWN - 1) for part in line)
    return -base, -slope


def _from_integers(base: int, slope: int) -> Line | None:
    if -_UNKNOWN in (base, slope):
        return None
    return Line(-base / _PICOSECONDS, -slope / _PICOSECONDS)
