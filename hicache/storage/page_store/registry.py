"""The stores that this process has open."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

from hicache.errors import ConfigError
from hicache.storage.page_store.index import Index, IndexDamaged
from hicache.storage.page_store.open_store import OpenStore
from hicache.storage.page_store.owner import is_alive, list_owners
from hicache.storage.page_store.rebuild import rebuild_index
from hicache.storage.page_store.unsynced_mark import UnsyncedMark

if TYPE_CHECKING:
    from hicache.storage.page_store.directory import StoreDirectory, StoreFormat

__all__ = ["STORES", "StoreRegistry"]

_LOGGER = logging.getLogger(__name__)

_Place: TypeAlias = tuple[int, int]


class StoreRegistry:
    """Opens each store once, however many use it, and closes it behind the last.

    LMDB forbids to open an environment twice in a process, so this is one for the whole process.
    A store that was opened before a fork is of no use behind it; see `acquire`. Thread-safe.

    Attributes:
        num_rebuilds: how often the index in a directory was made anew, by the directory's path.
    """

    def __init__(self) -> None:
        # Held while a store is opened or closed, which can take long; taken before the other one.
        self._opening = threading.Lock()
        # Guards the dictionaries, and is held for a look at them only.
        self._counting = threading.Lock()
        self._stores: dict[_Place, OpenStore] = {}
        self._uses: dict[OpenStore, int] = {}
        self._inherited: dict[_Place, OpenStore] = {}
        self._sees_forks = False
        self.num_rebuilds: Counter[str] = Counter()

    def acquire(self, directory: StoreDirectory, *, create: bool, segment_bytes: int) -> OpenStore:
        """Return the store in a directory; whoever gets it calls `release`.

        Args:
            directory: where it is.
            create: whether to set a new one up if there is none.
            segment_bytes: of a new one.

        Raises:
            ConfigError: there is no store that this process can use.
            OSError, lmdb.Error: it cannot be opened.
        """
        with self._opening:
            if not self._sees_forks:
                os.register_at_fork(after_in_child=self._forget_parent)
                self._sees_forks = True
            with directory.locked(create=create, segment_bytes=segment_bytes) as store_format:
                status = os.stat(directory.path)
                place = (status.st_dev, status.st_ino)
                if place in self._inherited:
                    raise ConfigError(
                        f"{directory.path} was opened before this process was forked, and cannot "
                        "be opened in it any more; open it behind the fork, or start the process "
                        "with the method 'spawn' or 'forkserver'"
                    )
                with self._counting:
                    known = self._stores.get(place)
                    if known is not None and known.index.present:
                        self._uses[known] += 1
                        return known
                if known is not None and known.index.same_file:
                    raise OSError(errno.EBUSY, "the index failed and is still in use; try later")
                store = _open(directory, store_format, self.num_rebuilds)
                with self._counting:
                    self._stores[place] = store
                    self._uses[store] = 1
                return store

    def use(self, store: OpenStore) -> None:
        """Keep a store open for a call, beside whoever has acquired it."""
        with self._counting:
            self._uses[store] += 1

    def release(self, store: OpenStore) -> None:
        """End what `acquire` or `use` began; the last one closes the store."""
        with self._counting:
            self._uses[store] -= 1
            if self._uses[store]:
                return
        with self._opening:
            with self._counting:
                if self._uses.get(store) != 0:
                    return
                del self._uses[store]
                self._stores = {p: s for p, s in self._stores.items() if s is not store}
            store.close()

    def _forget_parent(self) -> None:
        """Start anew in a forked process, where no store of the parent's works."""
        self._opening = threading.Lock()
        self._counting = threading.Lock()
        for store in self._uses:
            store.disown()
        # Kept: what LMDB does when they are collected is not for this process.
        self._inherited |= self._stores
        self._stores, self._uses = {}, {}


STORES = StoreRegistry()
"""Of this process."""


def _open(
    directory: StoreDirectory, store_format: StoreFormat, num_rebuilds: Counter[str]
) -> OpenStore:
    """Open a store whose directory is locked.

    Its index is rebuilt if it is missing, is damaged, or may be since the machine went down; that
    is counted.
    """
    mark = UnsyncedMark(directory.path)
    try:
        index = _open_index(directory, store_format, mark)
    except IndexDamaged as damage:
        owners = list_owners(directory.owners)
        if any(is_alive(directory.owners, owner_id) for owner_id in owners):
            raise ConfigError(
                f"{damage}, and cannot be rebuilt while processes use it; stop them first"
            ) from damage
        num_pages = rebuild_index(directory, store_format)
        num_rebuilds[directory.path] += 1
        _LOGGER.warning("%s; rebuilt it from the headers: %d pages", damage, num_pages)
        mark.set()
        index = Index(directory.index, store_format.store_id, create=False)
    try:
        return OpenStore(directory, store_format, index, mark)
    except BaseException:
        index.close()
        raise


def _open_index(directory: StoreDirectory, store_format: StoreFormat, mark: UnsyncedMark) -> Index:
    """Open the index as it is, or make one for a directory without anything."""
    is_new = not os.listdir(directory.index) and not os.listdir(directory.data)
    if mark.is_of_another_boot and not is_new:
        raise IndexDamaged(
            f"the machine went down while {directory.path} was in use, which can tear its index"
        )
    mark.set()
    return Index(directory.index, store_format.store_id, create=is_new)
