"""What the tree answers: frozen results, and tickets for copies in flight."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.radix.node import RadixNode
    from hicache.types import IntArray, NodeId

__all__ = [
    "CopyKind",
    "EvictResult",
    "HeldPages",
    "HostInsertResult",
    "InsertResult",
    "MatchResult",
    "ResetResult",
    "Ticket",
    "WriteCommit",
    "join_pages",
]


class CopyKind(str, Enum):
    """The four movements of pages between tiers."""

    WRITE = "write"
    LOAD = "load"
    PERSIST = "persist"
    PREFETCH = "prefetch"


class Ticket(NamedTuple):
    """The right to report the outcome of one copy.

    Covers the pages `[first_page, last_page)` counted from the root, on the path that ends at the
    node: a split gives the upper half a new id and leaves the lower half its own, so the ticket
    keeps covering the same pages. For a prefetch the node is the anchor and the pages lie below it.
    """

    kind: CopyKind
    node_id: NodeId
    first_page: int
    last_page: int
    generation: int
    serial: int

    @property
    def num_pages(self) -> int:
        """Pages that the copy moves."""
        return self.last_page - self.first_page


class MatchResult(NamedTuple):
    """The longest cached prefix of a key; it may end inside the last node.

    Attributes:
        last_device_node: deepest node with readable device pages on the path (the root if none).
        last_host_node: deepest node on the path; the same node when nothing is only on the host.
        num_device_pages: leading pages readable on the device.
        num_host_pages: pages after those that are readable on the host alone.
        loading: whether some of the host pages are on their way to the device already.
        device_chunks: device page ids by node, in order.
    """

    last_device_node: RadixNode
    last_host_node: RadixNode
    num_device_pages: int
    num_host_pages: int
    loading: bool
    device_chunks: Sequence[IntArray]

    @property
    def device_pages(self) -> IntArray:
        """Device page ids of the prefix, safe to use only while `last_device_node` is locked."""
        return join_pages(self.device_chunks)[: self.num_device_pages]


class InsertResult(NamedTuple):
    """What became of a caller's device pages.

    | pages | owner afterwards | caller |
    |---|---|---|
    | `[0, already_present_pages)` | the tree's own pages hold these tokens | frees its duplicates |
    | `[already_present_pages, end_page)` | the tree took the caller's pages | forgets them |
    | `[end_page, ...)` | the caller | keeps them, may insert again |

    Attributes:
        node: the node that ends at `end_page`, for the caller to lock.
        present_chunks: the tree's device page ids for the part that was present, by node.
    """

    already_present_pages: int
    end_page: int
    node: RadixNode
    present_chunks: Sequence[IntArray]

    @property
    def present_pages(self) -> IntArray:
        """The tree's page ids for the first `already_present_pages` pages."""
        return join_pages(self.present_chunks)


class EvictResult(NamedTuple):
    """What an eviction gave.

    Attributes:
        freed: page ids that nobody owns any more; the caller returns them to the allocator.
        num_pending: pages that become free when writes in flight end.
        writes: tickets of writes that have to be carried out before their pages are free.
        num_refused: freed pages that were not worth a place on the host.
    """

    freed: IntArray
    num_pending: int
    writes: tuple[Ticket, ...]
    num_refused: int = 0


class WriteCommit(NamedTuple):
    """What became of a finished write.

    Attributes:
        untaken_host: host pages that no node took; the caller returns them.
        freed_device: device pages whose eviction waited for this write; the caller returns them.
        node: the deepest node that now has a host copy, or None.
    """

    untaken_host: IntArray
    freed_device: IntArray
    node: RadixNode | None


class HostInsertResult(NamedTuple):
    """What became of prefetched host pages: which were not taken, and where the last one ended."""

    untaken: IntArray
    node: RadixNode


@dataclasses.dataclass(frozen=True)
class HeldPages:
    """Pages that belonged to a node at reset but are still read by copies in flight."""

    tickets: tuple[Ticket, ...]
    device_pages: IntArray
    host_pages: IntArray


@dataclasses.dataclass(frozen=True)
class ResetResult:
    """Where the pages of a tree went when it was emptied."""

    device_pages: IntArray
    host_pages: IntArray
    held: tuple[HeldPages, ...]


def join_pages(chunks: Sequence[IntArray]) -> IntArray:
    """Return the page ids of `chunks` in one new array."""
    if not chunks:
        return np.empty(0, dtype=np.int64)
    # As mostly, and in far less code than a concatenation.
    return chunks[0].copy() if len(chunks) == 1 else np.concatenate(chunks)
