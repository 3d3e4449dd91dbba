"""Which groups have been used since the index was last told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage.page_store.catalogue import Catalogue

if TYPE_CHECKING:
    from hicache.storage.page_store.index import WriteTransaction

__all__ = ["Touches"]

_MAX_GROUPS = 256


class Touches:
    """Uses of groups, kept in memory until there is a commit to take them along.

    Thread-safe: each operation on the dictionary is one. A use noted while they are written can be
    lost, which costs its group a place in the order of eviction.
    """

    def __init__(self) -> None:
        self._groups: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def full(self) -> bool:
        """Whether they are worth a commit of their own."""
        return len(self._groups) >= _MAX_GROUPS

    def note(self, group_id: int) -> None:
        """Note that pages of a group have been used just now."""
        self._groups[group_id] = self._groups.pop(group_id, 0) + 1

    def write(self, write: WriteTransaction) -> None:
        """Write all uses, in their order."""
        groups, self._groups = self._groups, {}
        catalogue = Catalogue(write)
        for group_id, num_uses in list(groups.items()):
            catalogue.touch(group_id, num_uses)
