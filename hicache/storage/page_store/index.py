"""The LMDB environment that holds a store's index, shared by all processes that have it open.

| database | key | value |
|---|---|---|
| `meta` | name | number, or what `reuse_history` knows |
| `namespaces` | namespace digest | `NamespaceRecord` |
| `pages` | namespace id, page key | group id, position in the group, pages of the group |
| `groups` | group id | the group's header, see `group` |
| `states` | group id | `GroupState` |
| `leaves` | class of uses, last use, group id | nothing: groups whose last page has no child |
| `children` | namespace id, page key | how many groups hang below that page, stored or not |
| `space` | kind and state, owner, segment, block | number of blocks: what is free, leased, a hole |
| `owners` | owner id | the owner's limits |

Numbers in keys are big endian, so that their order is that of the bytes.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import lmdb

from hicache.errors import ConfigError, StorageError
from hicache.storage.page_store.counters import REUSE_HISTORY
from hicache.storage.page_store.reuse_history import ReuseHistory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmdb import _Database

__all__ = ["Databases", "Index", "IndexDamaged", "WriteTransaction"]

_MAP_BYTES = 1 << 36
"""Address space for the index, of which only what is used costs anything: some 10^8 pages."""

_MAX_READERS = 1024
_VERSION = "index 2"
"""Follows the store's id, so that other versions take this index for that of another store."""

_PATIENCE_SECONDS = 0.05
_LOOK_SECONDS = 0.0001


class IndexDamaged(StorageError):
    """The index cannot be opened as one; it can be rebuilt from the headers."""


class Databases(NamedTuple):
    """Handles of the databases, see the module."""

    meta: _Database
    namespaces: _Database
    pages: _Database
    groups: _Database
    states: _Database
    leaves: _Database
    children: _Database
    space: _Database
    owners: _Database


class _KnownHistory(NamedTuple):
    """A history as it was committed, and itself, which saves reading it in the next transaction."""

    data: bytes
    history: ReuseHistory


class WriteTransaction:
    """The one write transaction that a store has at a time, over all processes.

    Attributes:
        txn: of LMDB.
        dbs: handles of the databases.
    """

    def __init__(
        self, txn: lmdb.Transaction[Any], dbs: Databases, known: _KnownHistory | None
    ) -> None:
        self.txn = txn
        self.dbs = dbs
        self._known = known
        self._history: ReuseHistory | None = None

    @property
    def history(self) -> ReuseHistory:
        """Uses and waits of all leaves; what it notes is committed with the transaction."""
        if self._history is None:
            data, known = self.txn.get(REUSE_HISTORY, b"", db=self.dbs.meta), self._known
            if known is not None and known.data == data:
                self._history = known.history
            else:
                self._history = ReuseHistory.decode(data)
        return self._history

    def finish(self) -> _KnownHistory | None:
        """Write what is only in memory, and return what the next transaction is to be given."""
        if self._history is None:
            return self._known
        data = self._history.encode()
        self.txn.put(REUSE_HISTORY, data, db=self.dbs.meta)
        return _KnownHistory(data, self._history)


class _Readers:
    """The readers of this process, by how many commits came before them. Thread-safe.

    A thread that reads can be kept from running for long. If commits go on meanwhile, each of them
    takes new space: LMDB cannot use any again that was given up since that reader came. So commits
    wait a little for readers that are older than the newest commit.
    """

    def __init__(self) -> None:
        # Guards the two below, and is notified when a reader leaves; held for a look at them only.
        self._left = threading.Condition(threading.Lock())
        self._epoch = 0
        self._counts: Counter[int] = Counter()

    def enter(self) -> int:
        """Count a reader, and return what to `leave` with."""
        with self._left:
            self._counts[self._epoch] += 1
            return self._epoch

    def leave(self, epoch: int) -> None:
        """Count a reader no longer."""
        with self._left:
            self._counts[epoch] -= 1
            if not self._counts[epoch]:
                del self._counts[epoch]
                self._left.notify_all()

    def begin_epoch(self) -> None:
        """Note a commit."""
        with self._left:
            self._epoch += 1

    def wait_for_old_ones(self) -> None:
        """Wait for readers from before the newest commit, but not for long."""
        with self._left:
            self._left.wait_for(self._are_new, _PATIENCE_SECONDS)

    def _are_new(self) -> bool:
        return all(epoch == self._epoch for epoch in self._counts)


class Index:
    """Opens the environment and gives out transactions. Thread-safe.

    A commit outlives every process, but waits for no disk: `unsynced_mark` says what follows from
    that for a power loss. LMDB forbids to open an environment twice in a process: whoever uses
    this class makes sure of that.
    """

    def __init__(self, path: str, store_id: str, *, create: bool) -> None:
        """Open the environment in directory `path`, or make it.

        Args:
            path: of the directory.
            store_id: what the index belongs to.
            create: whether to make a new one; else it must be there.

        Raises:
            IndexDamaged: there is none, or it is no sound index of this store.
            ConfigError: it cannot be shared with a process that has it open.
            lmdb.Error, OSError: it cannot be opened for another reason.
        """
        self._path = f"{path}/data.mdb"
        # Serialises write transactions of this process: LMDB does so as well, but a thread that
        # waits within LMDB cannot take part in a commit that another one makes for it.
        self.lock = threading.Lock()
        self._broken = False
        self._known: _KnownHistory | None = None
        self._readers = _Readers()
        self._slow_reader: float | None = None
        if not create and not os.path.exists(self._path):
            raise IndexDamaged(f"{path} has no index")
        try:
            self._env = lmdb.open(
                path,
                map_size=_MAP_BYTES,
                sync=False,
                mode=0o666,
                create=create,
                readahead=False,
                max_readers=_MAX_READERS,
                max_dbs=len(Databases._fields),
            )
        except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError) as error:
            raise IndexDamaged(f"{path} holds no index ({error})") from error
        except lmdb.LockError as error:
            # To open is also to read, for which a process has one place in LMDB's table.
            raise ConfigError(
                f"{path} is in use by a process with the number of this one, {os.getpid()}, which "
                "must be in another container: let the containers share process numbers (such as "
                "hostPID), or give each a directory of its own"
            ) from error
        try:
            self._check_length()
            self.dbs = self._open_databases(store_id, create=create)
            self._env.reader_check()
            self._file_id = self._look()
        except BaseException:
            self._env.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Length of the index's file."""
        return os.stat(self._path).st_size

    @property
    def present(self) -> bool:
        """Whether this is of use: the file opened is the one under its name, and LMDB works."""
        return not self._broken and self.same_file

    @property
    def same_file(self) -> bool:
        """Whether the file opened is still the one under its name."""
        try:
            return self._look() == self._file_id
        except OSError:
            return False

    @contextlib.contextmanager
    def read(self) -> Iterator[lmdb.Transaction[bytes]]:
        """Give a read transaction, to be used for a short time.

        While it lives, no space of the index is used again that later commits give up.
        """
        epoch = self._readers.enter()
        try:
            with self._env.begin() as txn:
                yield txn
        finally:
            self._readers.leave(epoch)

    @contextlib.contextmanager
    def write(self) -> Iterator[WriteTransaction]:
        """Commit what the body does, or nothing of it if it raises.

        Blocks while another thread or process writes.
        """
        with self.lock, self.transaction() as write:
            yield write

    @contextlib.contextmanager
    def transaction(self) -> Iterator[WriteTransaction]:
        """Do the work of `write` for a thread that has taken `lock`."""
        self._readers.wait_for_old_ones()
        try:
            with self._env.begin(write=True) as txn:
                self._wait_for_others()
                write = WriteTransaction(txn, self.dbs, self._known)
                # Until the commit, it may be changed for nothing.
                self._known = None
                yield write
                known = write.finish()
            self._known = known
            self._readers.begin_epoch()
        except lmdb.PanicError:
            # A commit could not be written and not be undone: only opening it anew helps.
            self._broken = True
            raise

    def sync(self) -> None:
        """Wait until all commits are on the disk for good."""
        self._env.sync(True)

    def drop_dead_readers(self) -> None:
        """Forget read transactions of processes that have died: they hold up space."""
        self._env.reader_check()

    def close(self) -> None:
        """Close the environment; to be called when no transaction is under way."""
        self._env.close()

    def _wait_for_others(self) -> None:
        """Wait for readers of any process from before the newest commit, but not for long.

        To be called within a write transaction, so that none comes that will be old. One that has
        been waited for in vain is not waited for again.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        newest = self._env.info()["last_txnid"]
        while (oldest := _oldest_reader(self._env.readers())) < newest:
            if oldest == self._slow_reader:
                return
            if time.monotonic() >= end:
                self._slow_reader = oldest
                # It may be one of a process that is dead.
                self.drop_dead_readers()
                return
            time.sleep(_LOOK_SECONDS)

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._path)
        return status.st_dev, status.st_ino

    def _check_length(self) -> None:
        """Refuse a file that is shorter than it says: to touch what is missing is fatal."""
        info, page_bytes = self._env.info(), self._env.stat()["psize"]
        if (info["last_pgno"] + 1) * page_bytes > self.num_bytes:
            raise IndexDamaged(f"{self._path} has been cut short")

    def _open_databases(self, store_id: str, *, create: bool) -> Databases:
        # Only handles opened in a write transaction outlive it; one that writes nothing costs none.
        with self._env.begin(write=True) as txn:
            names = [name.encode() for name in Databases._fields]
            try:
                dbs = Databases(*(self._env.open_db(n, txn=txn, create=create) for n in names))
            except lmdb.NotFoundError as error:
                raise IndexDamaged(f"{self._path} is no index of a page store") from error
            expected = f"{store_id} {_VERSION}".encode()
            if create:
                txn.put(b"store", expected, db=dbs.meta)
            elif (found := txn.get(b"store", b"", db=dbs.meta)) != expected:
                if found.startswith(store_id.encode()):
                    raise IndexDamaged(f"{self._path} is an index of another version")
                raise IndexDamaged(f"{self._path} belongs to another store")
        return dbs


def _oldest_reader(table: str) -> float:
    """Return the number of the oldest transaction in LMDB's table of readers, of all processes."""
    numbers = (line.split()[-1] for line in table.splitlines()[1:])
    return min((int(number) for number in numbers if number.isdigit()), default=math.inf)
