"""A batch of pages on its way into the store."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import lmdb

from hicache.storage.page_store.blocks import BlockKind
from hicache.storage.page_store.group import MAX_PAGES
from hicache.storage.page_store.group_writer import GroupWriter, outcome_of
from hicache.storage.page_store.limits import changes_per_commit
from hicache.storage.page_store.publisher import ORPHANED
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache.storage.page_store.allocator import Claim
    from hicache.storage.page_store.batch import Batch
    from hicache.storage.page_store.open_store import OpenStore
    from hicache.storage.page_store.publisher import Draft
    from hicache.storage.page_store.transfer import PageTransfer

__all__ = ["BatchWriter", "skip_behind_failures"]


class BatchWriter:
    """Writes those pages of one batch that are not stored, as groups, and publishes them.

    Attributes:
        outcomes: one a page; those that are stored already are there from the start.
        error: the newest one behind an outcome.
        is_orphaned: whether pages of it went that others hang below: it is worth another try.
    """

    def __init__(
        self, store: OpenStore, transfer: PageTransfer, batch: Batch, present: Iterable[int]
    ) -> None:
        """Begin; `present` are the places of the pages that are stored already."""
        self._store = store
        self._batch = batch
        self._groups = GroupWriter(store, transfer, batch)
        self.outcomes = [PageOutcome.SKIPPED] * len(batch.keys)
        for index in present:
            self.outcomes[index] = PageOutcome.PRESENT
        self.error: Exception | None = None
        self.is_orphaned = False
        # Places of pages whose key comes before in the batch, and the places where.
        self._repeats: list[tuple[int, int]] = []
        self._not_good: set[bytes] = set()

    def run(self) -> list[PageOutcome]:
        """Write and publish, and return an outcome per page; does not raise for disk and index."""
        for index, num_pages in self._chains():
            self._write_chain(index, num_pages)
        self._publish()
        for index, first in self._repeats:
            outcome = self.outcomes[first]
            self.outcomes[index] = PageOutcome.PRESENT if outcome.good else outcome
        skip_behind_failures(self._batch.keys, self._batch.parent_keys, self.outcomes)
        return self.outcomes

    def _chains(self) -> list[tuple[int, int]]:
        """Return place and length of the runs that are to be written, each page below the last."""
        batch = self._batch
        num_new = self.outcomes.count(PageOutcome.SKIPPED)
        is_chain = list(batch.parent_keys[1:]) == list(batch.keys[:-1])
        if is_chain and num_new == len(set(batch.keys)) == len(batch.keys):
            # As most batches are.
            return [(0, num_new)]
        first_of: dict[bytes, int] = {}
        chains: list[tuple[int, int]] = []
        for index, key in enumerate(batch.keys):
            if self.outcomes[index] is PageOutcome.PRESENT:
                continue
            if key in first_of:
                self._repeats.append((index, first_of[key]))
                continue
            first_of[key] = index
            start, num_pages = chains[-1] if chains else (0, 0)
            if start + num_pages == index > 0 and batch.parent_keys[index] == batch.keys[index - 1]:
                chains[-1] = (start, num_pages + 1)
            else:
                chains.append((index, 1))
        return chains

    def _write_chain(self, index: int, num_pages: int) -> None:
        end = index + num_pages
        while index < end:
            if self._batch.expired():
                self._fail(index, end, PageOutcome.TIMEOUT)
                return
            if self._batch.parent_keys[index] in self._not_good:
                self._fail(index, end, PageOutcome.SKIPPED)
                return
            claims = self._claim_groups(end - index)
            if not claims:
                assert self.error is not None
                self._fail(index, end, outcome_of(self.error))
                return
            num_written, failure = self._groups.write(index, claims, self._publish_ahead)
            self.error = self._groups.error or self.error
            index += num_written
            if num_written < sum(claim.num_pages for claim in claims):
                self._fail(index, end, failure)
                return

    def _fail(self, index: int, end: int, outcome: PageOutcome) -> None:
        """Note why the page at `index` is not stored; those behind it are not tried."""
        self._not_good.update(self._batch.keys[index:end])
        self.outcomes[index] = outcome
        timed_out = outcome is PageOutcome.TIMEOUT
        behind = PageOutcome.TIMEOUT if timed_out else PageOutcome.SKIPPED
        self.outcomes[index + 1 : end] = [behind] * (end - index - 1)

    def _claim_groups(self, num_pages: int) -> list[Claim]:
        """Return blocks for some pages, at least one, or nothing with the reason in `error`."""
        allocator, page_bytes = self._store.allocator, self._batch.page_bytes
        most = min(MAX_PAGES, changes_per_commit(allocator.strictest))
        num_first = num_pages - self._groups.num_last(num_pages)
        claims: list[Claim] = []
        claim = self._claim(num_pages, min(num_first, most))
        while claim is not None:
            claims.append(claim)
            num_pages -= claim.num_pages
            num_first -= claim.num_pages
            # What is missing now is got when these are written.
            wanted = min(num_first if num_first > 0 else num_pages, most)
            claim = allocator.claim(wanted, page_bytes, at_least=wanted) if num_pages else None
        return claims

    def _claim(self, num_pages: int, most: int) -> Claim | None:
        """Return blocks for one group of `most` pages at most, or `None`, see `_claim_groups`."""
        allocator, page_bytes = self._store.allocator, self._batch.page_bytes
        error: Exception = OSError(errno.ENOSPC, "the limits of the page store leave no room")
        more = True
        while more:
            claim = allocator.claim(most, page_bytes, at_least=most)
            if claim is not None:
                return claim
            try:
                more = allocator.refill(num_pages, page_bytes, self._protected)
            except (OSError, lmdb.Error) as caught:
                error, more = caught, False
        claim = allocator.claim(most, page_bytes)
        if claim is None:
            self.error = error
        return claim

    def _protected(self) -> set[bytes]:
        """Return the names of pages that must not make room for this batch."""
        batch = self._batch
        return {batch.prefix + key for key in (*batch.keys, *batch.parent_keys)}

    def _publish_ahead(self) -> bool:
        """Publish what is written; return whether what comes behind it is of use.

        It is not if its parent is not stored: nobody would ever find it.
        """
        groups = [draft.group for _, draft in self._groups.drafts]
        self._publish()
        # While the disk is busy anyway. What fails here fails again for whoever needs the blocks.
        with contextlib.suppress(OSError, lmdb.Error):
            self._store.allocator.refill_ahead(
                len(self._batch.keys), self._batch.page_bytes, self._protected
            )
        return not groups or groups[-1].key(groups[-1].num_pages - 1) not in self._not_good

    def _publish(self) -> None:
        written, self._groups.drafts = self._groups.drafts, []
        if not written:
            return
        drafts = [draft for _, draft in written]
        num_published = 0
        try:
            if self._batch.fsync:
                self._store.segments.sync(_files_of(drafts))
        except OSError as error:
            self.error = error
        else:
            publication = self._store.publisher.publish(drafts)
            self.error = publication.error or self.error
            num_published = len(publication.stored)
            for (index, draft), stored in zip(written, publication.stored, strict=False):
                self._note_published(index, draft, stored)
        for index, draft in written[num_published:]:
            assert self.error is not None
            self._fail(index, index + draft.group.num_pages, outcome_of(self.error))
            self._store.allocator.unclaim(BlockKind.PAYLOAD, draft.group.extents)
            self._store.allocator.unclaim(BlockKind.HEADER, [draft.group.header_extent])

    def _note_published(self, index: int, draft: Draft, stored: int) -> None:
        num_pages = draft.group.num_pages
        if stored == ORPHANED:
            self.is_orphaned = True
            self._fail(index, index + num_pages, PageOutcome.SKIPPED)
            return
        if stored == (1 << num_pages) - 1:
            self.outcomes[index : index + num_pages] = [PageOutcome.OK] * num_pages
            return
        for position in range(num_pages):
            outcome = PageOutcome.OK if stored >> position & 1 else PageOutcome.PRESENT
            self.outcomes[index + position] = outcome


def skip_behind_failures(
    keys: Sequence[bytes], parent_keys: Sequence[bytes], outcomes: list[PageOutcome]
) -> None:
    """Mark pages as skipped whose parent came before them and is not good."""
    if outcomes.count(PageOutcome.OK) + outcomes.count(PageOutcome.PRESENT) == len(outcomes):
        return
    not_good: set[bytes] = set()
    for index, outcome in enumerate(outcomes):
        if parent_keys[index] in not_good and outcome is not PageOutcome.TIMEOUT:
            outcomes[index] = PageOutcome.SKIPPED
        if not outcomes[index].good:
            not_good.add(keys[index])


def _files_of(drafts: Iterable[Draft]) -> set[tuple[BlockKind, int]]:
    """Return the segments that groups and their headers lie in."""
    files: set[tuple[BlockKind, int]] = set()
    for draft in drafts:
        files.add((BlockKind.HEADER, draft.group.segment))
        files.update((BlockKind.PAYLOAD, extent.segment) for extent in draft.group.extents)
    return files
