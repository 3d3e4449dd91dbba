"""What the decisions of an episode are made of: dice, and the keys that requests have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.radix import RadixKey
from hicache.sim.options import GEOMETRY

if TYPE_CHECKING:
    import random

__all__ = ["Choices"]

_MAX_KEYS = 14
_MAX_KEY_PAGES = 5
_NUM_STORED_KEYS = 4


class Choices:
    """Dice and keys of one episode.

    Args:
        habits: decides how different the keys are.

    Attributes:
        dice: to be set before each action.
        keys: all so far.
    """

    def __init__(self, habits: random.Random) -> None:
        self._alphabet = habits.choice([2, 2, 3])
        self.dice = habits
        self.keys: list[RadixKey] = []
        for _ in range(_NUM_STORED_KEYS):
            self._new_key()

    @property
    def stored_keys(self) -> list[RadixKey]:
        """Keys that storage has from the beginning."""
        return self.keys[:_NUM_STORED_KEYS]

    def next_key(self, live: list[RadixKey]) -> RadixKey:
        """Return a key, most often one that another request has or has had, or that was stored."""
        dice = self.dice
        if len(self.keys) < _MAX_KEYS and dice.random() < 0.3:
            return self._new_key()
        return dice.choice(dice.choice([live, self.keys, self.stored_keys]) or self.keys)

    def _new_key(self) -> RadixKey:
        """Return a key of few different pages: new, or what another begins with, or more of it."""
        dice, page_size = self.dice, GEOMETRY.page_size
        key = RadixKey([], cache_salt=dice.choice([None, None, "tenant"]))
        if self.keys and dice.random() < 0.6:
            key = dice.choice(self.keys)
            key = key.prefix(dice.randint(1, len(key) // page_size) * page_size)
        num_more = _MAX_KEY_PAGES - len(key) // page_size
        pages = dice.choices(range(self._alphabet), k=dice.randint(not len(key), num_more))
        key = key.extend(
            [page * page_size + offset for page in pages for offset in range(page_size)]
        )
        # A tail below a page is nobody's.
        key = key.extend([0] * dice.randrange(page_size))
        self.keys.append(key)
        return key
