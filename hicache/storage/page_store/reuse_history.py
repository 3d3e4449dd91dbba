"""How often pages are used and how long they wait for it, learnt by all processes together."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from hicache.survival import hazards_by_class, worth_by_age

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NUM_AGES", "NUM_CELLS", "NUM_CLASSES", "ReuseHistory", "age_limits", "class_of"]

_CLASS_OF_USES: Final = (0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 5)
"""Uses are told apart less finely the more there are; beyond the last they are all alike."""

NUM_CLASSES: Final = 6

_AGE_SHIFT: Final = 2
"""Ages below 4 ticks are alike: a request is some reads and writes."""

NUM_AGES: Final = 20
"""Below 4 ticks, then octaves: 4 to 7, 8 to 15 and so on; the last is open to the end."""

NUM_CELLS: Final = NUM_CLASSES * NUM_AGES
"""Pairs of a class of uses and an octave of age."""

_COHORT_TICKS: Final = 4
_COHORTS_PER_OCTAVE: Final = 4
_COHORTS_PER_MERGE: Final = 8

_LEAST_HALF_LIFE: Final = 1024
"""Ticks in which half of the past is forgotten; in a larger store, as many as it has leaves."""

_MAX_WEIGHT: Final = 2.0**64

_HEAD: Final = struct.Struct("<QdI")


def class_of(num_uses: int) -> int:
    """Return the class of so many uses, in which they are equally likely to be used again."""
    return _CLASS_OF_USES[num_uses if num_uses < len(_CLASS_OF_USES) else -1]


def age_limits(octave: int) -> tuple[int, int | None]:
    """Return the least and the largest age in ticks of an octave; `None` if it has no end."""
    youngest = ((1 << octave) >> 1) << _AGE_SHIFT
    return youngest, None if octave == NUM_AGES - 1 else (1 << octave + _AGE_SHIFT) - 1


def _cell_of(use_class: int, age: int) -> int:
    octave = (max(age, 0) >> _AGE_SHIFT).bit_length()
    return use_class * NUM_AGES + min(octave, NUM_AGES - 1)


class _Cohort:
    """Waits that began within some ticks.

    Attributes:
        start: the first of these ticks.
        weight: of one wait.
        waiting: weight of those that go on, for each class.
    """

    __slots__ = ("start", "waiting", "weight")

    def __init__(self, start: int, weight: float, waiting: list[float]) -> None:
        self.start = start
        self.weight = weight
        self.waiting = waiting


class ReuseHistory:
    """The chances that leaves are used again, by their uses so far and their age.

    A leaf waits from its last use until it is used again, is given up, or gets a child; then
    whatever hangs below waits in its place. It is counted in which cell waits end, and by what.
    Waits that go on count for what they have lasted, without which only the impatient would be
    seen. So is known how many waits came through each cell, and how many were ended there by a use.
    A parent that goes on waiting for a child that is gone counts from there.

    Time is counted in ticks, the writes and noted reads of all processes, so ages mean the same
    everywhere and after any pause. Later waits weigh more, so that the past is forgotten.

    Attributes:
        now: ticks so far.
        num_leaves: groups that stand in the order of eviction, for each class of uses.
    """

    def __init__(self) -> None:
        self.now = 0
        self.num_leaves = [0] * NUM_CLASSES
        self._weight = 1.0
        self._used = [0.0] * NUM_CELLS
        self._left = [0.0] * NUM_CELLS
        self._cohorts = [_Cohort(0, 1.0, [0.0] * NUM_CLASSES)]
        self._starts = [0]

    def tick(self) -> int:
        """Let time go on, and return it."""
        self.now += 1
        if self.now - self._cohorts[-1].start >= _COHORT_TICKS:
            self._begin_cohort()
        return self.now

    def begin_wait(self, use_class: int, last_use: int) -> None:
        """Note that one waits that was used at `last_use`; earlier ages were not seen."""
        cohort = self._cohort(last_use)
        cohort.waiting[use_class] += cohort.weight
        self._left[_cell_of(use_class, self.now - last_use)] -= cohort.weight

    def end_wait(self, use_class: int, last_use: int, *, used: bool) -> None:
        """Note that one waits no longer, because it is used or for another reason."""
        cohort = self._cohort(last_use)
        cohort.waiting[use_class] -= cohort.weight
        ended = self._used if used else self._left
        ended[_cell_of(use_class, self.now - last_use)] += cohort.weight

    def worth(self) -> list[float]:
        """Return for each cell the worth of keeping a leaf's pages, in uses per time.

        What uses have not shown is assumed, see `hazards_by_class`: with too few of them what was
        not used longest is worth least.
        """
        used = [weight / self._weight for weight in self._used]
        worth: list[float] = []
        for hazards in hazards_by_class(used, self._exposed(), NUM_AGES):
            worth += worth_by_age(hazards)
        return worth

    def encode(self) -> bytes:
        """Return the record."""
        numbers = [*self._used, *self._left]
        for cohort in self._cohorts:
            numbers += [cohort.weight, *cohort.waiting]
        head = _HEAD.pack(self.now, self._weight, len(self._starts))
        return (
            head
            + array("q", [*self.num_leaves, *self._starts]).tobytes()
            + array("f", numbers).tobytes()
        )

    @classmethod
    def decode(cls, data: bytes) -> ReuseHistory:
        """Read a record; without a whole one nothing is known."""
        self = cls()
        if len(data) < _HEAD.size:
            return self
        now, weight, num_cohorts = _HEAD.unpack_from(data)
        end = _HEAD.size + 8 * (NUM_CLASSES + num_cohorts)
        if len(data) != end + 4 * (2 * NUM_CELLS + num_cohorts * (1 + NUM_CLASSES)):
            return self
        self.now, self._weight = now, weight
        counts = array("q", data[_HEAD.size : end]).tolist()
        numbers = array("f", data[end:]).tolist()
        self.num_leaves = counts[:NUM_CLASSES]
        self._used, self._left = numbers[:NUM_CELLS], numbers[NUM_CELLS : 2 * NUM_CELLS]
        self._starts = counts[NUM_CLASSES:]
        width = 1 + NUM_CLASSES
        self._cohorts = [
            _Cohort(start, numbers[at], numbers[at + 1 : at + width])
            for at, start in zip(
                range(2 * NUM_CELLS, len(numbers), width), self._starts, strict=True
            )
        ]
        return self

    def _cohort(self, tick: int) -> _Cohort:
        return self._cohorts[max(bisect_right(self._starts, tick) - 1, 0)]

    def _begin_cohort(self) -> None:
        """Count waits apart from now on; of old ones, only so finely as their age demands."""
        half_life = max(_LEAST_HALF_LIFE, sum(self.num_leaves))
        self._weight *= 2 ** ((self.now - self._cohorts[-1].start) / half_life)
        self._cohorts.append(_Cohort(self.now, self._weight, [0.0] * NUM_CLASSES))
        if len(self._cohorts) % _COHORTS_PER_MERGE == 0:
            self._cohorts = list(self._merged())
        self._starts = [cohort.start for cohort in self._cohorts]
        if self._weight > _MAX_WEIGHT:
            self._rescale()

    def _merged(self) -> Iterator[_Cohort]:
        """Yield the cohorts with those as one that are narrow for their age."""
        older: _Cohort | None = None
        for index, cohort in enumerate(self._cohorts):
            end = self._cohorts[index + 1].start if index + 1 < len(self._cohorts) else self.now + 1
            if older is None:
                older = cohort
            elif (end - older.start) * _COHORTS_PER_OCTAVE <= self.now - end:
                older.weight = (older.weight + cohort.weight) / 2
                older.waiting = list(map(float.__add__, older.waiting, cohort.waiting))
            else:
                yield older
                older = cohort
        if older is not None:
            yield older

    def _rescale(self) -> None:
        factor = 1 / self._weight
        self._weight = 1.0
        self._used = [weight * factor for weight in self._used]
        self._left = [weight * factor for weight in self._left]
        for cohort in self._cohorts:
            cohort.weight *= factor
            cohort.waiting = [weight * factor for weight in cohort.waiting]

    def _exposed(self) -> list[float]:
        """Return how many waits came through each cell; those that ended within it count half."""
        undecided = list(self._left)
        for index, cohort in enumerate(self._cohorts):
            end = self._cohorts[index + 1].start if index + 1 < len(self._cohorts) else self.now
            age = self.now - (cohort.start + end) // 2
            for use_class, weight in enumerate(cohort.waiting):
                undecided[_cell_of(use_class, age)] += weight
        exposed = [0.0] * NUM_CELLS
        for last in range(NUM_AGES - 1, NUM_CELLS, NUM_AGES):
            older = 0.0
            for cell in range(last, last - NUM_AGES, -1):
                through = older + self._used[cell] + undecided[cell] / 2
                exposed[cell] = max(through, 0.0) / self._weight
                older += self._used[cell] + undecided[cell]
        return exposed
