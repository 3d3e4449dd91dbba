"""Commits of several threads as one."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import lmdb

from hicache.errors import StorageError
from hicache.storage.page_store.blocks import BlockKind, merge
from hicache.storage.page_store.catalogue import Catalogue
from hicache.storage.page_store.limits import changes_per_commit
from hicache.storage.page_store.records import page_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage.page_store.allocator import Allocator
    from hicache.storage.page_store.group import Group
    from hicache.storage.page_store.index import WriteTransaction
    from hicache.storage.page_store.refill import StoreParts
    from hicache.storage.page_store.space import Space
    from hicache.storage.page_store.touches import Touches

__all__ = ["ORPHANED", "Draft", "Publication", "Publisher"]

ORPHANED = -1
"""In `Publication.stored`: the page that the group hangs below is gone, so nothing was stored."""


class Draft(NamedTuple):
    """A group whose pages and header are written, and which is not in the index yet.

    Attributes:
        group: the group.
        namespace_id: whose pages they are.
        needs_parent: whether it is of no use if its parent is not stored, which it was: somebody
            else may have made room meanwhile.
    """

    group: Group
    namespace_id: int
    needs_parent: bool = False


class Publication:
    """What one thread wants published, and what became of it.

    Attributes:
        drafts: in the order in which they are published.
        stored: for each draft published so far, its pages that were stored by it, one bit each; the
            others were stored already. Or `ORPHANED`.
        error: why the drafts behind those are not published, and never will be.
    """

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.drafts = drafts
        self.stored: list[int] = []
        self.error: Exception | None = None
        self.room_was_made = False

    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.error is not None or len(self.stored) == len(self.drafts)


_Work: TypeAlias = tuple[Publication, Draft]


class Publisher:
    """Puts written groups into the index. Thread-safe.

    Threads that want to publish while a commit is under way wait for it, and then the first of them
    publishes for all: a commit costs something, whatever the number of pages in it.
    """

    def __init__(self, parts: StoreParts, allocator: Allocator, touches: Touches) -> None:
        self._parts = parts
        self._allocator = allocator
        self._touches = touches
        # Guards the queue; held for appending to it, taking from it and going through it.
        self._lock = threading.Lock()
        self._queue: list[Publication] = []

    def publish(self, drafts: Sequence[Draft]) -> Publication:
        """Commit groups whose blocks this process has leased; returns when it is done."""
        mine = Publication(drafts)
        with self._lock:
            self._queue.append(mine)
        while not mine.is_done():
            with self._parts.index.lock:
                num_lacking = 0 if mine.is_done() else self._commit()
            if num_lacking:
                try:
                    self._allocator.make_room(num_lacking, protected=self._queued_pages)
                except (OSError, lmdb.Error) as error:
                    mine.error = error
        with self._lock:
            if mine in self._queue:
                self._queue.remove(mine)
        return mine

    def _commit(self) -> int:
        """Publish what is queued, up to a bound.

        Returns:
            How many changes the index lacks the room for; nothing has been done then.
        """
        work: list[_Work] = []
        try:
            stored = self._publish_some(work)
        except (OSError, lmdb.Error) as error:
            _fail(work, error)
            return 0
        except BaseException:
            _fail(work, StorageError("a commit for several threads was broken off in one of them"))
            raise
        if stored is None:
            if any(one.room_was_made for one, _ in work):
                _fail(work, OSError(errno.ENOSPC, "the index of the page store may not grow"))
                return 0
            for one, _ in work:
                one.room_was_made = True
            return 2 * sum(draft.group.num_pages for _, draft in work)
        for (one, _), mask in zip(work, stored, strict=True):
            one.stored.append(mask)
        return 0

    def _publish_some(self, work: list[_Work]) -> list[int] | None:
        """Commit what is taken from the queue into `work`; `None` if the index has no room."""
        with self._parts.index.transaction() as write:
            refill = self._allocator.begin(write)
            work += self._take(changes_per_commit(refill.limits))
            num_pages = sum(draft.group.num_pages for _, draft in work)
            if not refill.has_room(num_pages + len(self._touches)):
                return None
            self._touches.write(write)
            groups = [draft.group for _, draft in work]
            space = self._parts.space(write)
            space.use(BlockKind.PAYLOAD, merge(one for group in groups for one in group.extents))
            space.use(BlockKind.HEADER, merge(group.header_extent for group in groups))
            return [self._publish(write, draft, space) for _, draft in work]

    def _queued_pages(self) -> set[bytes]:
        """Return the pages of those who wait, some of which may be stored, and their parents."""
        with self._lock:
            drafts = [draft for one in self._queue for draft in one.drafts]
        names: set[bytes] = set()
        for draft in drafts:
            names.update(draft.group.names(page_name(draft.namespace_id)))
            names.add(page_name(draft.namespace_id, draft.group.parent_key))
        return names

    def _take(self, max_pages: int) -> list[_Work]:
        """Return the next drafts of those who wait: at least one, then as many as fit."""
        work: list[_Work] = []
        with self._lock:
            self._queue = [one for one in self._queue if not one.is_done()]
            for one in self._queue:
                for draft in one.drafts[len(one.stored) :]:
                    max_pages -= draft.group.num_pages
                    if work and max_pages < 0:
                        return work
                    work.append((one, draft))
        return work

    def _publish(self, write: WriteTransaction, draft: Draft, space: Space) -> int:
        group = draft.group
        parent = page_name(draft.namespace_id, group.parent_key)
        if draft.needs_parent and write.txn.get(parent, db=write.dbs.pages) is None:
            space.free(BlockKind.PAYLOAD, merge(group.extents))
            space.free(BlockKind.HEADER, [group.header_extent])
            return ORPHANED
        stored = Catalogue(write).publish(group, draft.namespace_id, departed=self._parts.departed)
        if stored == (1 << group.num_pages) - 1:
            return stored
        for position in range(group.num_pages):
            if not stored >> position & 1:
                space.free(BlockKind.PAYLOAD, group.layout.extents_of(position, 1))
        if not stored:
            space.free(BlockKind.HEADER, [group.header_extent])
        return stored


def _fail(work: list[_Work], error: Exception) -> None:
    for one, _ in work:
        one.error = error
