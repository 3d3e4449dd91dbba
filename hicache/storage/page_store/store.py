"""The embedded page store: the default backend, `file`."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import lmdb

from hicache.errors import ConfigError, StorageError
from hicache.storage.base import (
    DEFAULT_CALL_BYTES,
    HiCacheStorageConfig,
    StorageCapabilities,
    StorageFigures,
)
from hicache.storage.checked import CheckedStorage
from hicache.storage.page_memory import BatchMemory, HostRegions
from hicache.storage.page_store.access import StoreAccess
from hicache.storage.page_store.batch import Batch
from hicache.storage.page_store.clearing import clear_namespace, remove_if_same
from hicache.storage.page_store.directory import DEFAULT_SEGMENT_BYTES, StoreDirectory
from hicache.storage.page_store.figures import figures_of
from hicache.storage.page_store.group import Group
from hicache.storage.page_store.group_writer import outcome_of
from hicache.storage.page_store.lookup import Run, find_runs
from hicache.storage.page_store.native_transfer import DIRECT_CALL_BYTES
from hicache.storage.page_store.options import PageStoreOptions
from hicache.storage.page_store.page_reader import num_intact, read_pages
from hicache.storage.page_store.page_writer import BatchWriter, skip_behind_failures
from hicache.storage.page_store.spans import join_runs
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.storage.base import Page
    from hicache.storage.page_store.access import Access
    from hicache.storage.page_store.open_store import OpenStore
    from hicache.types import PageHash

__all__ = ["PageStore"]

_TROUBLE = (OSError, lmdb.Error, StorageError)
"""What disk and index can do to a call; each becomes an outcome, or fails a look-up."""

_PROBE_STEP = 16
_ATTEMPTS = 2


class PageStore(CheckedStorage):
    """Keeps the pages of all namespaces in one directory that instances and processes share.

    Pages that are written together lie together, so that a prefix is read back with a few large
    reads, straight into page memory. An index tells what is stored; each read is verified against
    the checksums there. What does not fit is made room for by pages that no other stored page is
    chained from, in the order of a policy.

    Options in `extra_config`:

    - `path` (str, required): the directory, on a local file system; made if it is not there.
    - `max_bytes` (int): what the store takes at most, index included. Without it only
      `min_free_bytes` bounds the store. Of several processes the strictest counts.
    - `min_free_bytes` (int, default 1 GiB, or 5 % of a file system below 20 GiB): what the store
      leaves free on the file system; it shrinks when others take more.
    - `eviction_policy` (str, default what the cache evicts by, or `adaptive`): which pages go
      first, see `eviction_policies`. All instances of a process have the same.
    - `direct_io` (bool, default `False`): whether payloads bypass the page cache.
    - `mapped_reads` (bool, default `True`): whether what is in the page cache is copied from there
      without a system call, which is faster. A handler of SIGBUS is installed for it, which answers
      for such copies alone.
    - `fsync` (bool, default `False`): whether a page outlives a power loss once it is `OK`. Without
      it the newest pages can be lost or torn; a torn page is a miss, by its checksum.

    A directory that vanishes makes calls fail until it is there again; then an empty one becomes a
    new store, if it is on the same file system. An instance does not work in a process forked from
    the one that made it.

    Permissions of files and directories follow the umask of the process; KV tells as much as the
    prompts it was computed from.
    """

    def __init__(
        self, config: HiCacheStorageConfig, *, segment_bytes: int = DEFAULT_SEGMENT_BYTES
    ) -> None:
        """Open the store, or set it up; give back what processes had taken that are dead.

        Shrinks a store that is larger than its limits, which takes some microseconds a page.

        Args:
            config: see `HiCacheStorageConfig`.
            segment_bytes: length of a file at most, for a new store.

        Raises:
            ConfigError: an option is unknown, missing or cannot work, or the directory is not to be
                used: another format, something else, no permission, no local file system.
        """
        super().__init__(config)
        options = PageStoreOptions.from_config(config)
        self._digest = config.namespace.digest
        self._fsync = options.fsync
        self._direct = options.direct_io
        self._regions = HostRegions()
        directory = StoreDirectory(options.path)
        try:
            os.makedirs(directory.path, exist_ok=True)
            self._access = StoreAccess(
                directory,
                namespace=config.namespace,
                page_bytes=config.page_bytes,
                limits=options.limits(directory.path),
                eviction_policy=options.eviction_policy,
                direct=options.direct_io,
                mapped=options.mapped_reads,
                segment_bytes=segment_bytes,
            )
        except _TROUBLE as error:
            raise ConfigError(
                f"storage directory {options.path!r} cannot be used ({error}); set option 'path' "
                "to a directory that this process can create and write in"
            ) from error

    @property
    def capabilities(self) -> StorageCapabilities:
        """See `HiCacheStorage.capabilities`."""
        return StorageCapabilities(
            durable=True,
            shared_between_processes=True,
            call_bytes=DIRECT_CALL_BYTES if self._direct else DEFAULT_CALL_BYTES,
        )

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`; pages in registered memory cost a little less."""
        self._check_open()
        self._regions.register(regions)

    def figures(self) -> StorageFigures:
        """Return how the store is; of one that has failed or is closed nothing is known."""
        try:
            with self._access.use_if_open() as access:
                return StorageFigures() if access is None else figures_of(access)
        except _TROUBLE as error:
            self._note_error(error)
            return StorageFigures()

    def close(self) -> None:
        """See `HiCacheStorage.close`."""
        super().close()
        self._access.close()

    def _count_leading(self, keys: Sequence[PageHash]) -> int:
        try:
            with self._access.use() as access:
                runs, num_found = _find(access, keys, lone_pages=False)
                size_of = _sizes(access.store)
                for run in runs:
                    intact = _num_intact(run, size_of)
                    if intact < run.num_pages:
                        return run.start + intact
                return num_found
        except _TROUBLE as error:
            self._note_error(error)
            raise StorageError(f"cannot tell what is stored ({error})") from error

    def _read_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        num_good = 0
        failure = PageOutcome.OK
        try:
            with self._access.use() as access:
                runs, num_found = _find(access, keys)
                memory = BatchMemory(self._regions, pages)
                for span in join_runs(runs, self._digest):
                    num_pages, failure, error = read_pages(
                        access.transfer, span, memory, expired=self._expiry(deadline)
                    )
                    num_good += num_pages
                    if error is not None:
                        self._note_error(error)
                    if failure is not PageOutcome.OK:
                        break
                else:
                    if num_good < num_found:
                        failure = PageOutcome.CORRUPT
                    elif num_found < len(keys):
                        failure = PageOutcome.MISS
                if num_good:
                    access.store.touch(_run_with(runs, num_good - 1).entry.group_id)
                if failure in (PageOutcome.CORRUPT, PageOutcome.TRUNCATED):
                    failure = self._forget(access, keys, runs, num_good, failure)
        except _TROUBLE as error:
            self._note_error(error)
            failure = PageOutcome.FAILED
        timed_out = failure is PageOutcome.TIMEOUT
        rest = PageOutcome.TIMEOUT if timed_out else PageOutcome.SKIPPED
        outcomes = [PageOutcome.OK] * num_good + [failure] + [rest] * (len(keys) - num_good - 1)
        return outcomes[: len(keys)]

    def _forget(
        self,
        access: Access,
        keys: Sequence[PageHash],
        runs: list[Run],
        index: int,
        failure: PageOutcome,
    ) -> PageOutcome:
        """Remove a page that was found damaged; return what really was the matter with it."""
        run = _run_with(runs, index)
        entry = run.entry_of(index - run.start)
        try:
            same = remove_if_same(access.store, access.prefix + keys[index], entry)
        except (OSError, lmdb.Error) as error:
            # The page stays and is found damaged again; to read it has not failed by that.
            self._note_error(error)
            return failure
        # If it has gone, or come again, since it was looked up: what was read were not its bytes,
        # and nothing is the matter with it.
        return failure if same else PageOutcome.MISS

    def _write_pages(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        deadline: float,
    ) -> list[PageOutcome]:
        expired = self._expiry(deadline)
        if expired():
            return [PageOutcome.TIMEOUT] * len(keys)
        try:
            with self._access.use() as access:
                batch = Batch(
                    namespace_id=access.namespace_id,
                    namespace_digest=self._digest,
                    prefix=access.prefix,
                    page_bytes=self._page_bytes,
                    keys=keys,
                    parent_keys=parent_keys,
                    memory=BatchMemory(self._regions, pages),
                    expired=expired,
                    fsync=self._fsync,
                )
                outcomes = self._write_batch(access, batch)
        except _TROUBLE as error:
            self._note_error(error)
            outcomes = [outcome_of(error)] * len(keys)
            skip_behind_failures(keys, parent_keys, outcomes)
        return outcomes

    def _write_batch(self, access: Access, batch: Batch) -> list[PageOutcome]:
        """Write what is not stored; once more where others made room by what is in front of it."""
        stored: set[int] = set()
        for _ in range(_ATTEMPTS):
            present = self._present(access, batch.keys)
            writer = BatchWriter(access.store, access.transfer, batch, present)
            outcomes = writer.run()
            if writer.error is not None:
                self._note_error(writer.error)
            for index in stored:
                if outcomes[index] is PageOutcome.PRESENT:
                    outcomes[index] = PageOutcome.OK
            if not writer.is_orphaned or batch.expired():
                break
            stored.update(at for at, one in enumerate(outcomes) if one is PageOutcome.OK)
        return outcomes

    def _present(self, access: Access, keys: Sequence[bytes]) -> list[int]:
        """Return the places of pages that are stored, having removed those that were cut short.

        A few stored pages between others that are not can be overlooked; publishing finds them.
        """
        if not _may_be_stored(access, keys):
            return []
        present: list[int] = []
        size_of = _sizes(access.store)
        runs, _ = _find(access, keys, past_holes=True)
        for run in runs:
            num_intact = _num_intact(run, size_of)
            present += range(run.start, run.start + num_intact)
            if num_intact:
                access.store.touch(run.entry.group_id)
            # What lies behind a page that was cut short can be sound, in another segment.
            for index in range(num_intact, run.num_pages):
                lone = Run(run.start + index, 1, run.entry_of(index), run.header)
                if _num_intact(lone, size_of):
                    present.append(lone.start)
                else:
                    remove_if_same(access.store, access.prefix + keys[lone.start], lone.entry)
        return present

    def _clear_pages(self) -> int:
        try:
            with self._access.use() as access:
                return clear_namespace(access.store, access.namespace_id)
        except (OSError, lmdb.Error) as error:
            raise StorageError(f"cannot remove all pages ({error})") from error

    def _expiry(self, deadline: float) -> Callable[[], bool]:
        return lambda: self._clock.now() >= deadline


def _find(
    access: Access, keys: Sequence[bytes], *, past_holes: bool = False, lone_pages: bool = True
) -> tuple[list[Run], int]:
    index = access.store.index
    with index.read() as txn:
        return find_runs(
            txn, index.dbs, access.prefix, keys, past_holes=past_holes, lone_pages=lone_pages
        )


def _may_be_stored(access: Access, keys: Sequence[bytes]) -> bool:
    """Look for the last page and for some before it, as most batches are stored or are not."""
    index = access.store.index
    with index.read() as txn:
        probes = (*keys[::_PROBE_STEP], *keys[-1:])
        return any(txn.get(access.prefix + key, db=index.dbs.pages) for key in probes)


def _run_with(runs: list[Run], index: int) -> Run:
    """Return the run that has the page at a place of the batch."""
    return next(run for run in reversed(runs) if run.start <= index)


def _sizes(store: OpenStore) -> Callable[[int], int]:
    """Return a function that knows the length of each segment, having looked once."""
    return functools.cache(store.segments.size)


def _num_intact(run: Run, size_of: Callable[[int], int]) -> int:
    group = Group.decode(run.header)
    if group is None:
        return 0
    return num_intact(group.layout, run.entry.position, run.num_pages, size_of)
