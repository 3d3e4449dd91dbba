"""Tickets: what the tree remembers of copies in flight, and how their outcomes are published."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hicache.radix.records import CopyKind, HostInsertResult, Ticket, WriteCommit, join_pages
from hicache.radix.structure import PrefixTree

if TYPE_CHECKING:
    from hicache.radix.key import RadixKey
    from hicache.radix.node import RadixNode
    from hicache.types import IntArray, PageHash

__all__ = ["CopyingTree"]

_NO_PAGES: IntArray = np.empty(0, dtype=np.int64)
_NO_PAGES.setflags(write=False)


class CopyingTree(PrefixTree):
    """A prefix tree whose pages can be on their way between tiers.

    Every copy is begun (`begin_*` gives a ticket and protects what it reads) and ended exactly once
    (`commit_*` with the number of leading pages that arrived; 0 aborts it). Until then its target
    pages belong to whoever carries the copy out and match as absent. A ticket from before a reset
    publishes nothing. The target pages that no node took come back from the commit.
    """

    def _clear(self) -> None:
        super()._clear()
        self._next_serial = 0
        self._ticketed: dict[Ticket, RadixNode] = {}
        self.num_pending_evict_pages = 0

    @property
    def open_tickets(self) -> tuple[Ticket, ...]:
        """Tickets of this generation whose copies have not ended."""
        return tuple(self._ticketed)

    def begin_write(self, node: RadixNode) -> Ticket | None:
        """Begin the copy of `node` and of its ancestors that lack a host copy to the host.

        Returns None when `node` has no device pages or has, or is getting, a host copy. The device
        pages stay where they are until the commit: the ticket holds a lock.
        """
        if node.device_pages is None or node.backed_or_in_flight:
            return None
        top = node
        while top.parent is not None and not top.parent.backed_or_in_flight:
            top = top.parent
        ticket = self._open(CopyKind.WRITE, node, top.start, node.end)
        for member in self.path(node, top.start):
            member.write_ticket = ticket
            self.residency.expect_host(member)
        self.residency.lock(node)
        return ticket

    def commit_write(self, ticket: Ticket, host_pages: IntArray, num_good: int) -> WriteCommit:
        """Publish the first `num_good` of `host_pages` and carry out an eviction that waited.

        A run is published whole or not at all, and only below a run that was. With a run that
        fails, all copies in flight below it have failed too: their tickets publish nothing when
        they end.
        """
        node = self._close(ticket)
        if node is None:
            return WriteCommit(host_pages, _NO_PAGES, None)
        published = ticket.first_page
        backed: RadixNode | None = None
        for member in self.path(node, ticket.first_page):
            if member.write_ticket is not ticket:
                break
            parent = member.parent
            assert parent is not None
            if member.end - ticket.first_page > num_good or not parent.backed:
                self._fail_writes(member)
                break
            member.write_ticket = None
            pages = host_pages[published - ticket.first_page : member.end - ticket.first_page]
            self.residency.gain_host(member, pages.copy())
            published, backed = member.end, member
        self.residency.unlock(node)
        freed = self._finish_eviction(node)
        return WriteCommit(host_pages[published - ticket.first_page :], freed, backed)

    def write_has_failed(self, ticket: Ticket) -> bool:
        """Whether an open write can publish nothing any more, because one above it has failed."""
        return self._ticketed[ticket].write_ticket is not ticket

    def begin_load(self, node: RadixNode) -> Ticket | None:
        """Begin the copy of `node` and of its ancestors that the host alone holds to the device.

        Returns None when nothing is to be loaded or a part of it is being loaded already. The host
        pages are protected and, from now on, what arrives on the device is locked.
        """
        top = node
        if not node.evicted or node.load_ticket is not None:
            return None
        while top.parent is not None and top.parent.evicted:
            top = top.parent
            if top.load_ticket is not None:
                return None
        ticket = self._open(CopyKind.LOAD, node, top.start, node.end)
        for member in self.path(node, top.start):
            member.load_ticket = ticket
        self.residency.lock(node)
        self.residency.host_lock(node)
        return ticket

    def commit_load(self, ticket: Ticket, device_pages: IntArray, num_good: int) -> IntArray:
        """Publish the first `num_good` of `device_pages`; return those that no node took."""
        node = self._close(ticket)
        if node is None:
            return device_pages
        published = ticket.first_page
        for member in self.path(node, ticket.first_page):
            member.load_ticket = None
            if member.start == published and member.end - ticket.first_page <= num_good:
                pages = device_pages[published - ticket.first_page : member.end - ticket.first_page]
                self.residency.gain_device(member, pages.copy())
                published = member.end
        self.residency.host_unlock(node)
        self.residency.unlock(node)
        return device_pages[published - ticket.first_page :]

    def begin_persist(self, node: RadixNode, *, since: float = -math.inf) -> Ticket | None:
        """Begin the copy of `node` and of its ancestors that are not persisted to storage.

        A run is taken to be persisted if storage has said so at `since` or later.

        Returns None when `node` has no host pages or is, or is being, persisted.
        """
        if node.host_pages is None or node.persist_ticket is not None or _is_held(node, since):
            return None
        top = node
        while top.parent is not None and not (
            _is_held(top.parent, since) or top.parent.persist_ticket
        ):
            top = top.parent
        ticket = self._open(CopyKind.PERSIST, node, top.start, node.end)
        for member in self.path(node, top.start):
            member.persist_ticket = ticket
        self.residency.host_lock(node)
        return ticket

    def commit_persist(self, ticket: Ticket, num_good: int, *, now: float = 0.0) -> None:
        """Remember which runs storage holds, as of `now`; the others may be persisted again."""
        node = self._close(ticket)
        if node is None:
            return
        for member in self.path(node, ticket.first_page):
            member.persist_ticket = None
            parent = member.parent
            assert parent is not None
            if member.end - ticket.first_page <= num_good and parent.persisted:
                member.persisted, member.stored_at = True, now
        self.residency.host_unlock(node)

    def begin_prefetch(self, anchor: RadixNode, num_pages: int) -> Ticket | None:
        """Begin the arrival of up to `num_pages` host pages below `anchor`.

        Returns None when `anchor` has no host copy and none in flight: host pages below it would
        not be reachable. The anchor cannot go until the commit.
        """
        if not anchor.backed_or_in_flight:
            return None
        self.residency.host_lock(anchor)
        return self._open(CopyKind.PREFETCH, anchor, anchor.end, anchor.end + num_pages)

    def can_commit_prefetch(self, ticket: Ticket) -> bool:
        """Whether the anchor's own copy is not in flight any more."""
        anchor = self._ticketed.get(ticket)
        return anchor is None or anchor.write_ticket is None

    def commit_prefetch(
        self,
        ticket: Ticket,
        key: RadixKey,
        host_pages: IntArray,
        num_good: int,
        *,
        now: float = 0.0,
    ) -> HostInsertResult:
        """Insert the first `num_good` of `host_pages` below the anchor; storage holds them `now`.

        Runs that got a host copy meanwhile keep it; runs that are only on the device adopt the
        pages, which hold the same bytes; a run whose write is in flight ends the insertion.
        """
        anchor = self._close(ticket)
        if anchor is None:
            return HostInsertResult(host_pages, self.root)
        self.residency.host_unlock(anchor)
        if not anchor.backed or not num_good:
            return HostInsertResult(host_pages, anchor)
        return self._insert_host(anchor, key, host_pages, anchor.end + num_good, now)

    def ticket_device_pages(self, ticket: Ticket) -> IntArray:
        """Return the device pages that a write reads."""
        chunks = [node.device_pages for node in self._members(ticket)]
        return join_pages([pages for pages in chunks if pages is not None])

    def ticket_host_pages(self, ticket: Ticket) -> IntArray:
        """Return the host pages that a load or a persist reads."""
        chunks = [node.host_pages for node in self._members(ticket)]
        return join_pages([pages for pages in chunks if pages is not None])

    def ticket_hashes(self, ticket: Ticket) -> tuple[bytes, list[PageHash]]:
        """Return the hash before the ticket's first page, and the hash of each of its pages."""
        members = self._members(ticket)
        hashes = [page_hash for node in members for page_hash in self.page_hashes(node)]
        return self.prior_hash(members[0]), hashes

    def _members(self, ticket: Ticket) -> list[RadixNode]:
        node = self._ticketed[ticket]
        return [node] if node.start == ticket.first_page else self.path(node, ticket.first_page)

    def _open(self, kind: CopyKind, node: RadixNode, first_page: int, last_page: int) -> Ticket:
        serial = self._next_serial
        self._next_serial += 1
        ticket = Ticket(kind, node.id, first_page, last_page, self.generation, serial)
        self._ticketed[ticket] = node
        return ticket

    def _close(self, ticket: Ticket) -> RadixNode | None:
        """Return the node of `ticket`; None when a reset has made it void."""
        if ticket.generation != self.generation:
            return None
        return self._ticketed.pop(ticket)

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        # The upper half was just used: only the lower one's eviction still waits.
        if node.evict_tick:
            self.num_pending_evict_pages -= num_pages
        return super()._split(node, num_pages)

    def _fail_writes(self, top: RadixNode) -> None:
        """Note that `top` gets no host copy, nor does what is being written below it."""
        stack = [top]
        while stack:
            node = stack.pop()
            node.write_ticket = None
            children = (node.children or {}).values()
            stack += [child for child in children if child.write_ticket is not None]
            self.residency.unexpect_host(node)

    def _finish_eviction(self, node: RadixNode) -> IntArray:
        """Evict `node` if its eviction waited for the write that has just ended.

        Used again meanwhile, it stays. When the write failed its bytes are dropped: the memory was
        asked for.
        """
        if not node.evict_tick:
            return _NO_PAGES
        rescued = node.last_access > node.evict_tick
        node.evict_tick = 0
        self.num_pending_evict_pages -= node.num_pages
        removable = node.host_pages is not None or not node.host_lock_ref
        if rescued or node.lock_ref or node.device_children or not removable:
            return _NO_PAGES
        return self._evict_now(node)

    def _evict_now(self, node: RadixNode) -> IntArray:
        """Take the device pages of an evictable node; without a host copy it is deleted."""
        pages = self.residency.lose_device(node)
        if node.host_pages is None:
            self._remove(node)
        return pages

    def _insert_host(
        self, anchor: RadixNode, key: RadixKey, host_pages: IntArray, end_page: int, now: float
    ) -> HostInsertResult:
        data = key.data[: end_page * self._page_bytes]
        untaken: list[IntArray] = []
        node, first = anchor, anchor.end
        while node.end < end_page:
            position = node.end * self._page_bytes
            page = data[position : position + self._page_bytes]
            slot = key.namespace + page if position == 0 else page
            child = node.children.get(slot) if node.children else None
            if child is None:
                child = self._add_child(node, slot, key.namespace, data[position:])
                self.residency.expect_host(child)
            elif not data.startswith(child.key, position):
                common = self._common_bytes(child.key, data, position)
                child = self._split(child, common // self._page_bytes)
            if child.write_ticket is not None:
                break
            pages = host_pages[child.start - first : child.end - first]
            if child.host_pages is not None:
                untaken.append(pages)
            else:
                if child.device_pages is not None:
                    self.residency.expect_host(child)
                self.residency.gain_host(child, pages.copy())
            # Its bytes came from storage, and so did those of every page before them.
            child.persisted = child.persisted or node.persisted
            child.stored_at = max(child.stored_at, now)
            node = child
        untaken.append(host_pages[node.end - first :])
        return HostInsertResult(join_pages(untaken), node)


def _is_held(node: RadixNode, since: float) -> bool:
    return node.persisted and node.stored_at >= since
