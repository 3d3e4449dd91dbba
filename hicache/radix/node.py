"""One node of the tree: a run of pages that share their whole prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.radix.records import Ticket
    from hicache.types import IntArray, NodeId, PageHash

__all__ = ["Queue", "RadixNode"]


class Queue:
    """Bits of `RadixNode.queued`: the eviction queues that a node stands in."""

    DEVICE = 1
    DUPLICATE = 2
    """Its host pages only repeat device pages."""
    SOLE = 4
    """Its host pages are the only copy in memory."""


class RadixNode:
    """A run of pages `[start, end)` counted from the root, with the tiers its bytes are in.

    Owned by the tree; others read it and hand it back. Only `hicache.radix` changes one.

    Attributes:
        id: never reused; the lower half of a split keeps it.
        key: the tokens of the run as bytes.
        namespace: the key's namespace, the same on the whole path.
        children: by the bytes of their first page (below the root with the namespace before it);
            None stands for none.
        device_pages: page ids, None when the bytes are not readable on the device.
        host_pages: likewise for the host.
        lock_ref: holders + locked children; device pages stay while it is above 0.
        host_lock_ref: holders of the node's host pages and of the node itself.
        device_children: children with device pages.
        host_children: children with host pages, finished or in flight.
        queued: bits of `Queue`.
        created: tick of the tree when the run came into it.
        last_access: tick of the tree when the run was last used.
        hit_count: requests that inserted the run.
        past_hits: those before it was evicted, as far as the tree remembers.
        last_use: the latest of them, counted by `ReuseStatistics`.
        priority: given by `RadixTree.prioritize`; only the policy `priority` looks at it.
        pinned_until: given by `RadixTree.pin`; only `PinningPolicy` looks at it.
        lineage: id of the node that stood here first; see `RunHistory`.
        page_hashes: chained hash per page, None until first needed.
        write_ticket, load_ticket, persist_ticket: copies in flight that cover the run.
        persisted: whether storage is believed to hold the run and everything before it.
        stored_at: when storage last said so, in the caller's seconds.
        evict_tick: tick at which its eviction began to wait for a write, 0 when none does.
    """

    __slots__ = (
        "children",
        "created",
        "device_children",
        "device_pages",
        "end",
        "evict_tick",
        "hit_count",
        "host_children",
        "host_lock_ref",
        "host_pages",
        "id",
        "key",
        "last_access",
        "last_use",
        "lineage",
        "load_ticket",
        "lock_ref",
        "namespace",
        "page_hashes",
        "parent",
        "past_hits",
        "persist_ticket",
        "persisted",
        "pinned_until",
        "priority",
        "queued",
        "start",
        "stored_at",
        "write_ticket",
    )

    def __init__(
        self,
        node_id: NodeId,
        parent: RadixNode | None,
        key: bytes,
        namespace: bytes,
        start: int,
        end: int,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.key = key
        self.namespace = namespace
        self.start = start
        self.end = end
        self.children: dict[bytes, RadixNode] | None = None
        self.device_pages: IntArray | None = None
        self.host_pages: IntArray | None = None
        self.lock_ref = 0
        self.host_lock_ref = 0
        self.device_children = 0
        self.host_children = 0
        self.queued = 0
        self.created = 0
        self.last_access = 0
        self.hit_count = 0
        self.past_hits = 0
        self.last_use = 0
        self.lineage: int = node_id
        self.priority = 0
        self.pinned_until = 0.0
        self.page_hashes: list[PageHash] | None = None
        self.write_ticket: Ticket | None = None
        self.load_ticket: Ticket | None = None
        self.persist_ticket: Ticket | None = None
        self.persisted = False
        self.stored_at = 0.0
        self.evict_tick = 0

    def __repr__(self) -> str:
        tiers = [
            name
            for name, pages in (("device", self.device_pages), ("host", self.host_pages))
            if pages is not None
        ]
        return f"RadixNode({self.id}, pages [{self.start}, {self.end}), {'+'.join(tiers) or 'no'})"

    @property
    def num_pages(self) -> int:
        """Pages in the run."""
        return self.end - self.start

    @property
    def num_uses(self) -> int:
        """Requests that used the run, those before an eviction included while they are known."""
        return self.hit_count + self.past_hits

    @property
    def evicted(self) -> bool:
        """Whether the device pages are gone; the root never is."""
        return self.device_pages is None and self.parent is not None

    @property
    def backed(self) -> bool:
        """Whether the host holds the run; the root, which has no bytes, counts as held."""
        return self.host_pages is not None or self.parent is None

    @property
    def backed_or_in_flight(self) -> bool:
        """Whether the host holds the run or a write of it is in flight."""
        return self.backed or self.write_ticket is not None

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Copies in flight that cover the run."""
        held = (self.write_ticket, self.load_ticket, self.persist_ticket)
        return tuple(ticket for ticket in held if ticket is not None)
