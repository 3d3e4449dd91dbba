"""How likely runs are used again, learnt while requests come in."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Final

import numpy as np

from hicache.survival import hazards_by_class, worth_by_age

__all__ = ["NUM_AGES", "NUM_CELLS", "ReuseStatistics", "cell_of"]

_HORIZON: Final = 1 << 13
"""Requests over which a reuse is seen."""

_CLASS_OF_USES: Final = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5)
"""Uses are told apart less finely the more there are; beyond the last they are all alike."""

_NUM_CLASSES: Final = 6
NUM_AGES: Final = _HORIZON.bit_length()
"""Age 0, then octaves: 1, 2 to 3, 4 to 7 and so on; the last is open to the end."""

NUM_CELLS: Final = _NUM_CLASSES * NUM_AGES
"""Pairs of a class of uses and an octave of age."""

_ONE_REQUEST: Final = 1 << 30
"""What all pages of one request weigh together."""

_SHORT_SHIFT: Final = 1
"""Requests below half the mean length weigh less."""

_RECENT_SHIFT: Final = 6
"""The mean is over about 64 requests."""

_PERIOD: Final = 32
"""Requests between two estimates."""

_FORGET_SHIFT: Final = 5
"""Each estimate takes a 32nd off the weight of the past: half of it in about 700 requests."""

_FADING_SHIFT: Final = 16
_FADING: Final = tuple(
    int((1 - 0.5**_FORGET_SHIFT) ** (0.75 * 2**octave / _PERIOD) * (1 << _FADING_SHIFT))
    for octave in range(NUM_AGES)
)
"""What a request weighs when its pages have waited so long, times `1 << _FADING_SHIFT`.

All that is known of one request fades alike, whether its pages have waited to the end or not.
"""

_PAGES_SHIFT: Final = 16
"""Pages are counted in so fine parts that forgetting some of them leaves a part."""

_UNIT: Final = _ONE_REQUEST << _FADING_SHIFT
"""The weight of one request that has not faded."""

_LOSS_SHIFT: Final = 7
"""What is given up as hopeless may cost a 128th of the uses."""

_PRIOR_HAZARD: Final = 0.1
_PRIOR_REQUESTS: Final = 4.0
_CELL_PRIOR_REQUESTS: Final = 2.0
_MAX_HAZARD: Final = 0.95


def cell_of(num_uses: int, age: int) -> int:
    """Return the cell of a run that so many requests have used, the last one `age` requests ago."""
    uses = _CLASS_OF_USES[num_uses if num_uses < len(_CLASS_OF_USES) else -1]
    return uses * NUM_AGES + min(age.bit_length(), NUM_AGES - 1)


class ReuseStatistics:
    """The worth of keeping a page, for each cell of past uses and age.

    A page stays at risk of being used again from one use to the next. For each cell it is counted
    how many pages came through and how many were used there; pages whose wait is not over count for
    what they have waited, without which only the impatient would be seen. That gives a hazard for
    each cell, and the hazards give its worth: the most uses per request of keeping the page that
    any length of stay yields (Gittins' index). So a page that will hardly be used soon is kept
    while it is worth more later than its rivals are now.

    Each request weighs the same, however long, except that one below half the mean length weighs
    less. What uses have not shown is assumed, see `hazards_by_class`: with too few of them what was
    not used longest is worth least. The past is forgotten gradually. Sums are of integers, so that
    all ranks get the same.

    The hazards also say how likely a page is used again at all. Of what is offered for keeping the
    cells with the least prospects are hopeless: as many as together hardly cost any of the uses.

    Memory is constant, and so is the cost per call, amortised.

    Attributes:
        now: requests so far.
        version: counts estimates.
        worth: of each cell, in uses per page and request; comparable among each other.
        proven_worth: likewise, of a further copy: nothing is assumed for what was seen unused.
        hopeless: whether pages of a cell may be given up although there is room for them.
        stay_per_use: requests that evicted pages stayed after their last use, by uses of pages.
    """

    def __init__(self) -> None:
        self.now = 0
        self.version = 0
        self.worth = [0.0] * NUM_CELLS
        self.proven_worth = [0.0] * NUM_CELLS
        self.hopeless = [False] * NUM_CELLS
        self.stay_per_use = 0.0
        self._used_pages = 0
        self._stay = 0
        self._offered_pages = [0] * NUM_CELLS
        self._recent_pages = 0
        self._page_weights = array("q", bytes(8 * _HORIZON))
        self._waiting = array("q", bytes(8 * _HORIZON * _NUM_CLASSES))
        self._reused = [0] * NUM_CELLS
        self._left = [0] * NUM_CELLS
        self._estimate()

    def begin_request(self, num_pages: int) -> None:
        """Note that a request of `num_pages` begins; what is used from now on, it uses."""
        self.now += 1
        row = self.now % _HORIZON
        self._recent_pages += num_pages - (self._recent_pages >> _RECENT_SHIFT)
        least = self._recent_pages >> _RECENT_SHIFT + _SHORT_SHIFT
        self._page_weights[row] = _ONE_REQUEST // max(num_pages, least, 1)
        # What has waited since a whole horizon ago has faded away.
        for first in range(0, _HORIZON * _NUM_CLASSES, _HORIZON):
            self._waiting[first + row] = 0
        if self.now % _PERIOD == 0:
            self._estimate()

    def wait(self, num_uses: int, num_pages: int) -> None:
        """Note that pages that have had `num_uses` with this request wait for the next use."""
        row, uses = self.now % _HORIZON, cell_of(num_uses, 0) // NUM_AGES
        self._waiting[uses * _HORIZON + row] += num_pages * self._page_weights[row]

    def end_wait(self, num_uses: int, last_use: int, num_pages: int, *, reused: bool) -> None:
        """Note that pages wait no longer since the request `last_use`.

        Args:
            num_uses: as given to `wait`.
            last_use: `now` when they began to wait.
            num_pages: how many; others of the same run may go on waiting.
            reused: whether this request uses them; otherwise a use would not be seen any more.
        """
        if reused:
            self._used_pages += num_pages << _PAGES_SHIFT
        age = self.now - last_use
        if age >= _HORIZON:
            return
        row, cell = last_use % _HORIZON, cell_of(num_uses, age)
        weight = num_pages * self._page_weights[row]
        self._waiting[cell // NUM_AGES * _HORIZON + row] -= weight
        (self._reused if reused else self._left)[cell] += weight * _FADING[cell % NUM_AGES]

    def offer(self, cell: int, num_pages: int) -> bool:
        """Note that pages could be kept in a further place; return whether they are hopeless."""
        self._offered_pages[cell] += num_pages << _PAGES_SHIFT
        return self.hopeless[cell]

    def note_stay(self, last_use: int, num_pages: int) -> None:
        """Note that pages are evicted that were used in the request `last_use`."""
        self._stay += (self.now - last_use) * num_pages << _PAGES_SHIFT

    def _estimate(self) -> None:
        self.version += 1
        waiting, exposed = self._waiting_by_cell(), [0.0] * NUM_CELLS
        for last in range(NUM_AGES - 1, NUM_CELLS, NUM_AGES):
            older = 0
            for cell in range(last, last - NUM_AGES, -1):
                undecided = self._left[cell] + waiting[cell]
                exposed[cell] = (older + self._reused[cell] + undecided / 2) / _UNIT
                older += self._reused[cell] + undecided
        reused = [count / _UNIT for count in self._reused]
        worth = map(worth_by_age, hazards_by_class(reused, exposed, NUM_AGES))
        self.worth = [*chain.from_iterable(worth)]
        prospects: list[float] = []
        hazards = _hazards_by_age(reused, exposed)
        for first in range(0, NUM_CELLS, NUM_AGES):
            cells = slice(first, first + NUM_AGES)
            hazards = _hazards_beside(reused[cells], exposed[cells], hazards)
            self.proven_worth[cells] = worth_by_age(hazards)
            prospects += _prospects(hazards)
        self._give_up(prospects)
        self.stay_per_use = self._stay / max(self._used_pages, 1)
        self._forget()

    def _give_up(self, prospects: list[float]) -> None:
        """Find the hopeless cells: the least prospects first, while that costs hardly any use."""
        may_cost = self._used_pages / (1 << _LOSS_SHIFT)
        self.hopeless = [False] * NUM_CELLS
        for cell in sorted(range(NUM_CELLS), key=prospects.__getitem__):
            may_cost -= prospects[cell] * self._offered_pages[cell]
            if may_cost <= 0:
                break
            self.hopeless[cell] = self._offered_pages[cell] > 0

    def _forget(self) -> None:
        self._used_pages -= self._used_pages >> _FORGET_SHIFT
        self._stay -= self._stay >> _FORGET_SHIFT
        self._offered_pages = [count - (count >> _FORGET_SHIFT) for count in self._offered_pages]
        self._reused = [count - (count >> _FORGET_SHIFT) for count in self._reused]
        self._left = [count - (count >> _FORGET_SHIFT) for count in self._left]

    def _waiting_by_cell(self) -> list[int]:
        """Return the faded weight of what waits in each cell."""
        rings = np.frombuffer(self._waiting, dtype=np.int64).reshape(_NUM_CLASSES, _HORIZON)
        waiting = [0] * NUM_CELLS
        for octave in range(NUM_AGES):
            youngest, oldest = (1 << octave) >> 1, (1 << octave) - 1
            # What lies before the beginning of a ring is at its end.
            stop = (self.now - youngest) % _HORIZON + 1
            start = stop - (oldest - youngest + 1)
            total = rings[:, max(start, 0) : stop].sum(axis=1)
            if start < 0:
                total = total + rings[:, start:].sum(axis=1)
            waiting[octave::NUM_AGES] = [int(weight) * _FADING[octave] for weight in total]
        return waiting


def _hazards_by_age(reused: list[float], exposed: list[float]) -> list[float]:
    """Return the chance of a use in each octave of age over all classes.

    Unlike `hazards_by_class` it lets what came through unused count against a cell at once: what
    is to be kept in doubt, rather than something older, is not to be copied in doubt.
    """
    mean = (sum(reused) + _PRIOR_HAZARD * _PRIOR_REQUESTS) / (sum(exposed) + _PRIOR_REQUESTS)
    return [
        (sum(reused[age::NUM_AGES]) + _PRIOR_REQUESTS * mean)
        / (sum(exposed[age::NUM_AGES]) + _PRIOR_REQUESTS)
        for age in range(NUM_AGES)
    ]


def _hazards_beside(reused: list[float], exposed: list[float], prior: list[float]) -> list[float]:
    """Return the chances of one class; where little was seen, `prior`'s shape."""
    expected = sum(map(float.__mul__, exposed, prior))
    scale = (sum(reused) + _CELL_PRIOR_REQUESTS) / (expected + _CELL_PRIOR_REQUESTS)
    return [
        min(
            (seen + _CELL_PRIOR_REQUESTS * min(scale * chance, _MAX_HAZARD))
            / (risk + _CELL_PRIOR_REQUESTS),
            _MAX_HAZARD,
        )
        for seen, risk, chance in zip(reused, exposed, prior, strict=True)
    ]


def _prospects(hazards: list[float]) -> list[float]:
    """Return, for each age, the chance that a page is used again."""
    prospects, idle = [0.0] * len(hazards), 1.0
    for age in range(len(hazards) - 1, -1, -1):
        idle *= 1 - hazards[age]
        prospects[age] = 1 - idle
    return prospects
