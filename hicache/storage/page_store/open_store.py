"""One store as this process has it open, shared by all instances for its directory."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import lmdb

from hicache.errors import ConfigError
from hicache.storage.page_store.allocator import Allocator
from hicache.storage.page_store.blocks import BLOCK_BYTES
from hicache.storage.page_store.catalogue import Catalogue
from hicache.storage.page_store.counters import NAMESPACES
from hicache.storage.page_store.departed import Departed
from hicache.storage.page_store.eviction_policies import create_policy
from hicache.storage.page_store.limits import Limits, changes_per_commit
from hicache.storage.page_store.owner import Owner, is_alive, list_owners
from hicache.storage.page_store.publisher import Publisher
from hicache.storage.page_store.records import NamespaceRecord
from hicache.storage.page_store.refill import StoreParts, recover_dead_owners
from hicache.storage.page_store.segments import Segments
from hicache.storage.page_store.touches import Touches

if TYPE_CHECKING:
    from hicache.hashing import StorageNamespace
    from hicache.storage.page_store.directory import StoreDirectory, StoreFormat
    from hicache.storage.page_store.index import Index
    from hicache.storage.page_store.unsynced_mark import UnsyncedMark

__all__ = ["OpenStore"]


class OpenStore:
    """Index, segments and leases of a store. Thread-safe.

    It is made while its directory is locked, and closed by `StoreRegistry` when nobody uses it.

    Attributes:
        directory: where it is.
        pid: of the process that opened it; useless in any other.
        index, segments: opened.
        touches: uses of groups that the index has not been told.
        allocator: hands out blocks.
        publisher: commits what was written.
        parts: the same, for those that need only that.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        store_format: StoreFormat,
        index: Index,
        mark: UnsyncedMark,
    ) -> None:
        """Take over an opened index, for which the mark is set; recover what dead processes left.

        Raises:
            OSError, lmdb.Error: nothing stays open but the index.
        """
        self.directory = directory
        self.pid = os.getpid()
        self.index = index
        self.segments = Segments(
            directory.data, mapped_bytes=store_format.segment_blocks * BLOCK_BYTES
        )
        self.touches = Touches()
        self._mark = mark
        dead = [o for o in list_owners(directory.owners) if not is_alive(directory.owners, o)]
        self._owner = Owner(directory.owners)
        self.parts = StoreParts(
            directory=directory,
            index=index,
            segments=self.segments,
            owner_id=self._owner.owner_id,
            segment_blocks=store_format.segment_blocks,
            departed=Departed(),
        )
        self.allocator = Allocator(self.parts, self.touches)
        self.publisher = Publisher(self.parts, self.allocator, self.touches)
        # Guards what users want, below.
        self._lock = threading.Lock()
        self._limits: list[Limits] = []
        self._policy_name = ""
        try:
            self._bury(dead)
        except BaseException:
            self._owner.close()
            raise

    def add_limits(self, limits: Limits, *, eviction_policy: str) -> None:
        """Keep limits from now on, beside those of others; shrinks the store if it is too large.

        Other processes keep them too. If the disk has no room to tell them, they do from the first
        write on, or after some reads.

        Args:
            limits: to keep.
            eviction_policy: name of the order in which it shrinks, the same for all who have the
                store open in this process.

        Raises:
            ConfigError: there is no such policy, or others have another one; nothing has changed.
            OSError, lmdb.Error: it could not be shrunk; the limits do not count.
        """
        with self._lock:
            self._use_policy(eviction_policy)
            self._limits.append(limits)
            self._use_strictest()
        try:
            with contextlib.suppress(OSError, lmdb.Error):
                self.allocator.announce()
            self.allocator.make_room(2 * changes_per_commit(self.allocator.limits))
        except BaseException:
            self.remove_limits(limits)
            raise

    def touch(self, group_id: int) -> None:
        """Note a use of a group; tells the index when there are many.

        Where that fails, they have been for nothing: a read has not failed by it.
        """
        if not self.allocator.policy.notes_uses:
            return
        self.touches.note(group_id)
        if self.touches.full:
            with contextlib.suppress(OSError, lmdb.Error):
                self.allocator.announce()
                self.allocator.make_room(len(self.touches))
                with self.index.write() as write:
                    self.touches.write(write)

    def remove_limits(self, limits: Limits) -> None:
        """No longer keep limits that were added; other processes neither, if they can be told."""
        with self._lock:
            self._limits.remove(limits)
            self._use_strictest()
            has_others = bool(self._limits)
        if has_others:
            with contextlib.suppress(OSError, lmdb.Error):
                self.allocator.announce()

    def register_namespace(self, namespace: StorageNamespace, page_bytes: int) -> int:
        """Return the id of a namespace in this index.

        Raises:
            ConfigError: its pages have another length here.
            OSError, lmdb.Error: the index cannot be read or written.
        """
        digest = namespace.digest
        with self.index.read() as txn:
            found = txn.get(digest, db=self.index.dbs.namespaces)
        record = None if found is None else NamespaceRecord.decode(found)
        if record is None or not record.description:
            record = self._write_namespace(namespace, page_bytes)
        if record.page_bytes != page_bytes:
            raise ConfigError(
                f"{self.directory.path} holds pages of {record.page_bytes} bytes for this very "
                f"namespace, but this engine's have {page_bytes}; a namespace must name all that "
                "the bytes depend on: set option 'path' to another directory"
            )
        return record.namespace_id

    def close(self) -> None:
        """Give leases back and close everything; to be called when no other call is under way."""
        with contextlib.suppress(OSError, lmdb.Error):
            self.allocator.close()
        with contextlib.suppress(OSError, lmdb.Error), self.directory.locked_soon() as locked:
            if locked:
                self._sync_if_last()
                # Before the lock goes, so that whoever closes next can be the last.
                self._owner.close()
        self.index.close()
        self.segments.close()
        self._owner.close()

    def disown(self) -> None:
        """Let a parent's lock go, in a process that was forked from the one that opened this."""
        self._owner.disown()

    def _sync_if_last(self) -> None:
        """Let the index outlive a power loss if no other process has it open.

        If one has, or this process dies instead, the mark stays, and costs a rebuild after a power
        loss.
        """
        owners = set(list_owners(self.directory.owners)) - {self._owner.owner_id}
        if self.index.present and not any(is_alive(self.directory.owners, o) for o in owners):
            self.index.sync()
            self._mark.clear()

    def _use_policy(self, name: str) -> None:
        if name == self._policy_name:
            return
        if self._limits:
            raise ConfigError(
                f"this process has {self.directory.path} open with the eviction policy "
                f"{self._policy_name!r} and cannot open it with {name!r} too; give both the same"
            )
        self.allocator.policy = create_policy(name)
        self._policy_name = name

    def _use_strictest(self) -> None:
        self.allocator.limits = Limits().strictest(self._limits)

    def _write_namespace(self, namespace: StorageNamespace, page_bytes: int) -> NamespaceRecord:
        with self.index.write() as write:
            found = write.txn.get(namespace.digest, db=write.dbs.namespaces)
            if found is None:
                namespace_id = Catalogue(write).add_to(NAMESPACES, 1)
                record = NamespaceRecord(namespace_id, page_bytes, namespace.describe())
            else:
                record = NamespaceRecord.decode(found)._replace(description=namespace.describe())
            write.txn.put(namespace.digest, record.encode(), db=write.dbs.namespaces)
            return record

    def _bury(self, dead: list[bytes]) -> None:
        """Recover leases of dead processes and remove their lock files."""
        with self.index.read() as txn, txn.cursor(self.index.dbs.owners) as cursor:
            has_owners = cursor.first()
        if has_owners:
            with self.index.write() as write:
                recover_dead_owners(write, self.parts)
        for owner_id in dead:
            with contextlib.suppress(OSError):
                os.unlink(f"{self.directory.owners}/{owner_id.hex()}")
