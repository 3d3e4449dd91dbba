"""One instance's way to the store in its directory, also when that vanishes and comes back."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import ClosedError, ConfigError, StorageError
from hicache.storage.page_store.records import page_name
from hicache.storage.page_store.registry import STORES
from hicache.storage.page_store.transfer import PageTransfer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.hashing import StorageNamespace
    from hicache.storage.page_store.directory import StoreDirectory
    from hicache.storage.page_store.limits import Limits
    from hicache.storage.page_store.open_store import OpenStore

__all__ = ["Access", "StoreAccess"]


class Access(NamedTuple):
    """An open store, and what an instance is in it.

    Attributes:
        store: the store.
        namespace_id: of the instance's namespace in its index.
        prefix: what the names of the namespace's pages begin with.
        transfer: moves bytes as the instance was told to.
    """

    store: OpenStore
    namespace_id: int
    prefix: bytes
    transfer: PageTransfer


class StoreAccess:
    """Opens a store for an instance and keeps it open while it is in use. Thread-safe."""

    def __init__(
        self,
        directory: StoreDirectory,
        *,
        namespace: StorageNamespace,
        page_bytes: int,
        limits: Limits,
        eviction_policy: str,
        direct: bool,
        mapped: bool,
        segment_bytes: int,
    ) -> None:
        """Open the store in an existing directory, or set it up there.

        Raises:
            ConfigError: there is no store that this process can use.
            OSError, lmdb.Error, StorageError: it cannot be opened.
        """
        self._directory = directory
        self._namespace = namespace
        self._page_bytes = page_bytes
        self._limits = limits
        self._eviction_policy = eviction_policy
        self._direct = direct
        self._mapped = mapped
        self._segment_bytes = segment_bytes
        self._pid = os.getpid()
        self._device = os.stat(directory.path).st_dev
        # Guards the two below; held also while the store is opened again.
        self._lock = threading.Lock()
        self._closed = False
        self._access: Access | None = self._open(create=True)

    @contextlib.contextmanager
    def use(self) -> Iterator[Access]:
        """Keep the store open for a call, after opening it again if need be.

        Raises:
            ClosedError: this was closed, or the process was forked since.
            OSError, lmdb.Error, StorageError: there is no store at present.
        """
        if self._pid != os.getpid():
            raise ClosedError(
                "this page store was opened before a fork; build a new one in this process, whose "
                "parent must not have opened the directory before"
            )
        with self._lock:
            if self._closed:
                raise ClosedError("this page store is closed; build a new one")
            access = self._access
            if access is None or not access.store.index.present:
                access = self._reopen()
            STORES.use(access.store)
        try:
            yield access
        finally:
            STORES.release(access.store)

    @contextlib.contextmanager
    def use_if_open(self) -> Iterator[Access | None]:
        """Keep the store open for a call; `None` where it would have to be opened again first."""
        access: Access | None = None
        if self._pid == os.getpid():
            with self._lock:
                access = self._access
                if access is not None and access.store.index.present:
                    STORES.use(access.store)
                else:
                    access = None
        try:
            yield access
        finally:
            if access is not None:
                STORES.release(access.store)

    def close(self) -> None:
        """Give the store up; it closes behind the last call under way. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            self._give_up()

    def _give_up(self) -> None:
        access, self._access = self._access, None
        if access is not None:
            access.store.remove_limits(self._limits)
            STORES.release(access.store)

    def _reopen(self) -> Access:
        # First, so that an index that failed is closed before it is opened again.
        self._give_up()
        # A directory on another file system is what is left when a disk is no longer mounted.
        create = os.stat(self._directory.path).st_dev == self._device
        try:
            self._access = self._open(create=create)
        except ConfigError as error:
            raise StorageError(str(error)) from error
        return self._access

    def _open(self, *, create: bool) -> Access:
        store = STORES.acquire(self._directory, create=create, segment_bytes=self._segment_bytes)
        try:
            store.add_limits(self._limits, eviction_policy=self._eviction_policy)
            try:
                namespace_id = store.register_namespace(self._namespace, self._page_bytes)
            except BaseException:
                store.remove_limits(self._limits)
                raise
        except BaseException:
            STORES.release(store)
            raise
        transfer = PageTransfer(store.segments, direct=self._direct, mapped=self._mapped)
        return Access(store, namespace_id, page_name(namespace_id), transfer)
