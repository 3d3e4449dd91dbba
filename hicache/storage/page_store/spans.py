"""Stored pages of a batch as they are read: by what lies together, whoever wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import Extent
from hicache.storage.page_store.group import CHECKSUM_BYTES, Group
from hicache.storage.page_store.layout import PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.storage.page_store.lookup import Run

__all__ = ["Span", "join_runs", "span_of"]


class Span(NamedTuple):
    """Pages that follow each other in a batch and over some extents.

    Attributes:
        start: place of the first one in the batch.
        layout: where they lie.
        checksums: what their payloads must have, one after the other.
    """

    start: int
    layout: PageLayout
    checksums: bytes

    @property
    def num_pages(self) -> int:
        """How many pages."""
        return len(self.checksums) // CHECKSUM_BYTES


def span_of(group: Group, first: int, num_pages: int = 1, *, start: int = 0) -> Span:
    """Return pages of one group, from the `first` on."""
    checksums = group.checksums[first * CHECKSUM_BYTES : (first + num_pages) * CHECKSUM_BYTES]
    extents = group.layout.extents_of(first, num_pages)
    layout = PageLayout(group.page_bytes, tuple(extents))
    return Span(start, layout, checksums)


def join_runs(runs: Iterable[Run], namespace_digest: bytes) -> list[Span]:
    """Return the pages of leading runs as spans, neighbours on the disk joined.

    Ends before the first run whose record is not sound or not one of this namespace.
    """
    spans: list[Span] = []
    for run in runs:
        group = Group.decode(run.header)
        if group is None or group.namespace_digest != namespace_digest:
            break
        span = span_of(group, run.entry.position, run.num_pages, start=run.start)
        if spans and _can_be_joined(spans[-1], span):
            spans.append(_join(spans.pop(), span))
        else:
            spans.append(span)
    return spans


def _can_be_joined(left: Span, right: Span) -> bool:
    last, first = left.layout.extents[-1], right.layout.extents[0]
    return (last.segment, last.end) == (first.segment, first.block)


def _join(left: Span, right: Span) -> Span:
    *before, last = left.layout.extents
    first, *behind = right.layout.extents
    middle = Extent(last.segment, last.block, last.num_blocks + first.num_blocks)
    layout = PageLayout(left.layout.page_bytes, (*before, middle, *behind))
    return Span(left.start, layout, left.checksums + right.checksums)
