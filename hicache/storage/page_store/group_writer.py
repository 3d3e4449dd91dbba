"""The pages of one batch on their way into blocks of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lmdb

from hicache.storage.page_store.blocks import BlockKind, blocks_for, count_blocks, cut, join
from hicache.storage.page_store.group import CHECKSUM_BYTES, Group
from hicache.storage.page_store.layout import PageLayout
from hicache.storage.page_store.native_transfer import Mark
from hicache.storage.page_store.publisher import Draft
from hicache.storage.page_store.segments import FULL_ERRNOS
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.storage.page_store.allocator import Claim
    from hicache.storage.page_store.batch import Batch
    from hicache.storage.page_store.open_store import OpenStore
    from hicache.storage.page_store.transfer import PageTransfer

__all__ = ["GroupWriter", "outcome_of"]

_MIN_OVERLAPPED_BYTES = 8 << 20
_LAST_SHARE = 4
_MAX_LAST_BYTES = 8 << 20
"""Of a batch that is large enough, all but a quarter is published while the disk has that.

A commit takes less time than a disk needs for a few MiB.
"""


def outcome_of(error: Exception) -> PageOutcome:
    """Return what an error of the disk or the index means for a page."""
    if isinstance(error, OSError):
        full = error.errno in FULL_ERRNOS
    else:
        # LMDB calls it a disk error when the disk is full.
        full = isinstance(error, (lmdb.MapFullError, lmdb.DiskError))
    return PageOutcome.NO_SPACE if full else PageOutcome.FAILED


class GroupWriter:
    """Writes pages and headers of one batch into claimed blocks, which nobody can read there yet.

    Attributes:
        drafts: what is written and to be published, with the place of each group's first page in
            the batch; whoever publishes it takes it away.
        error: the newest one behind an outcome.
    """

    def __init__(self, store: OpenStore, transfer: PageTransfer, batch: Batch) -> None:
        """Begin with a batch."""
        self._store = store
        self._transfer = transfer
        self._batch = batch
        self.drafts: list[tuple[int, Draft]] = []
        self.error: Exception | None = None

    def num_last(self, num_pages: int) -> int:
        """Return how many of some pages to put in a group of their own, behind the others.

        The others can be published while the disk has these. None where that cannot be.
        """
        page_bytes = self._batch.page_bytes
        may_overlap = self._transfer.passes_marks and not self._batch.fsync
        if not may_overlap or num_pages * page_bytes < _MIN_OVERLAPPED_BYTES:
            return 0
        return min(num_pages // _LAST_SHARE, max(1, _MAX_LAST_BYTES // page_bytes))

    def write(
        self, index: int, claims: Sequence[Claim], publish: Callable[[], bool]
    ) -> tuple[int, PageOutcome]:
        """Write the pages of some groups, the first one at `index` of the batch, and their headers.

        All pages are one stream, so that the disk has no pause between groups.

        Args:
            index: place of the first page in the batch.
            claims: blocks for the groups.
            publish: is called, perhaps, when all but the last group are written and the disk is
                busy with that one; takes `drafts`, and tells whether what comes behind them is of
                use.

        Returns:
            How many pages are written, and what is the matter with the next one.
        """
        first, num_first = claims[:-1], sum(claim.num_pages for claim in claims[:-1])
        settled: list[tuple[int, PageOutcome]] = []

        def reach(checksums: bytes) -> None:
            num_settled, failure = self._settle_all(index, first, checksums, PageOutcome.OK)
            if not publish() and failure is PageOutcome.OK:
                failure = PageOutcome.SKIPPED
            settled.append((num_settled, failure))

        mark = Mark(num_first, reach) if self.num_last(num_first + claims[-1].num_pages) else None
        checksums, failure = self._write_payloads(index, claims, mark)
        if not settled:
            return self._settle_all(index, claims, checksums, failure)
        num_settled, failure_before = settled[0]
        checksums = checksums[num_first * CHECKSUM_BYTES :]
        if failure_before is not PageOutcome.OK:
            checksums, failure = b"", failure_before
        num_more, failure = self._settle_all(index + num_first, claims[-1:], checksums, failure)
        return num_settled + num_more, failure

    def _settle_all(
        self, index: int, claims: Sequence[Claim], checksums: bytes, failure: PageOutcome
    ) -> tuple[int, PageOutcome]:
        """Write the headers of groups; return how many pages have one, and what the matter is.

        Args:
            index: place of the first page in the batch.
            claims: the groups.
            checksums: of the pages that are written.
            failure: what is the matter with the page behind those.
        """
        num_left = len(checksums) // CHECKSUM_BYTES
        num_written = 0
        for claim in claims:
            num_pages = min(claim.num_pages, num_left)
            first = num_written * CHECKSUM_BYTES
            group = self._group_of(
                index + num_written,
                claim,
                checksums[first : first + num_pages * CHECKSUM_BYTES],
            )
            error = self._write_header(group)
            if error is not None:
                num_pages = num_left = 0
                failure = outcome_of(error)
            self._settle(index + num_written, claim, group, num_pages)
            num_left -= num_pages
            num_written += num_pages
        return num_written, failure

    def _write_payloads(
        self, index: int, claims: Sequence[Claim], mark: Mark | None
    ) -> tuple[bytes, PageOutcome]:
        """Write pages until one cannot be; return their checksums and what the matter is."""
        batch = self._batch
        extents = join(extent for claim in claims for extent in claim.extents)
        layout = PageLayout(batch.page_bytes, tuple(extents))
        num_pages = sum(claim.num_pages for claim in claims)
        checksums = b""
        for done, count in self._transfer.cut(layout, num_pages):
            if done and batch.expired():
                return checksums, PageOutcome.TIMEOUT
            within = _within(mark, done, count, checksums)
            try:
                checksums += self._transfer.write(
                    layout, done, batch.memory, index + done, count, within
                )
            except OSError as error:
                self.error = error
                return checksums, outcome_of(error)
        return checksums, PageOutcome.OK

    def _group_of(self, index: int, claim: Claim, checksums: bytes) -> Group:
        """Return the group of the pages that have these checksums, the first one at `index`."""
        batch = self._batch
        num_pages = len(checksums) // CHECKSUM_BYTES
        num_blocks = num_pages * blocks_for(batch.page_bytes)
        return Group(
            claim.group_id,
            claim.header.segment,
            claim.header.block,
            batch.namespace_digest,
            batch.page_bytes,
            batch.parent_keys[index],
            b"".join(batch.keys[index : index + num_pages]),
            checksums,
            tuple(cut(claim.extents, 0, num_blocks)),
        )

    def _write_header(self, group: Group) -> OSError | None:
        """Write the header of a group that has pages; return why that failed."""
        if not group.num_pages:
            return None
        try:
            self._store.segments.write_header(group.header_extent, group.encode())
        except OSError as error:
            self.error = error
            return error
        return None

    def _settle(self, index: int, claim: Claim, group: Group, num_pages: int) -> None:
        """Keep a group to be published, if it has pages, and give back what it does not use."""
        num_used = num_pages * group.layout.page_blocks
        num_unused = count_blocks(claim.extents) - num_used
        allocator = self._store.allocator
        if num_unused:
            allocator.unclaim(BlockKind.PAYLOAD, cut(claim.extents, num_used, num_unused))
        if num_pages:
            batch = self._batch
            hangs = index > 0 and batch.parent_keys[index] == batch.keys[index - 1]
            self.drafts.append((index, Draft(group, batch.namespace_id, needs_parent=hangs)))
        else:
            allocator.unclaim(BlockKind.HEADER, [claim.header])


def _within(mark: Mark | None, first: int, num_pages: int, before: bytes) -> Mark | None:
    """Return a mark as the write of some of the pages sees it, if it is at one of them.

    `before` are the checksums of those that were written before.
    """
    if mark is None or not first <= mark.num_pages < first + num_pages:
        return None
    return Mark(mark.num_pages - first, lambda checksums: mark.reach(before + checksums))
