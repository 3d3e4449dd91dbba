"""The tree that decides: eviction, locks and reset on top of look-up and tickets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.errors import HiCacheError
from hicache.radix.copies import CopyingTree
from hicache.radix.node import Queue
from hicache.radix.records import CopyKind, EvictResult, HeldPages, ResetResult, join_pages
from hicache.radix.write_rule import Admission, Duplicates

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.radix.key import RadixKey
    from hicache.radix.node import RadixNode
    from hicache.radix.records import Ticket
    from hicache.types import IntArray

__all__ = ["RadixTree"]

_DEVICE_RUNS_PER_DUPLICATE: Final = 16
"""How many runs the device could evict for each duplicate that stays; see `IF_WANTED`."""


class RadixTree(CopyingTree):
    """One radix tree over device pages and host pages.

    A pure data structure: page ids are integers, nothing is copied, allocated or waited for here.
    Page ids that the tree no longer owns come back in the results; forgetting them is a leak.
    """

    def lock(self, node: RadixNode) -> None:
        """Protect the device pages of `node` and its ancestors; to be given back by `unlock`."""
        self.residency.lock(node)

    def unlock(self, node: RadixNode) -> None:
        """Give back one lock; an `OwnershipError` when there is none."""
        self.residency.unlock(node)

    def prioritize(self, node: RadixNode, priority: int) -> None:
        """Give `node` and its ancestors at least this priority, for the policy `priority`.

        Those of them that the last insertion has made get exactly this one.
        """
        for member in self.path(node):
            before, is_new = member.priority, member.created == self._tick
            member.priority = priority if is_new else max(before, priority)
            if member.priority < before:
                # A queue finds out by itself when what orders a node grows, but not this.
                self.residency.requeue(member)

    def pin_by(self, clock: Callable[[], float]) -> None:
        """Let pins protect runs on the device and on the host, until the next `reset`.

        Args:
            clock: see `PinningPolicy`.
        """
        self.residency.pin_by(clock)

    def pin(self, node: RadixNode, until: float) -> None:
        """Let `node` and its ancestors be evicted last until then, by the clock of `pin_by`.

        A pin does no more than that: pages that are needed are taken from pinned runs when nothing
        else is left. Takes `pin_by`, or queues that are each a `PinningPolicy`; a later pin may
        lengthen one but not shorten it.
        """
        for member in self.path(node):
            member.pinned_until = max(member.pinned_until, until)
            self.residency.requeue(member)

    def unpin(self, node: RadixNode) -> None:
        """End the pins of `node` and of its ancestors, for whomever they were."""
        for member in self.path(node):
            member.pinned_until = 0.0
            self.residency.requeue(member)

    def num_held_pages(self, key: RadixKey) -> tuple[int, int]:
        """Return how many leading pages of `key` the device has, and the device or the host.

        Counts whole runs, so it may miss a part of the last one. Unlike `match` it is no use of
        them and changes nothing.
        """
        data, step, position = key.data, self._page_bytes, 0
        node, num_device, num_held = self.root, 0, 0
        page = key.namespace + data[:step]
        while node.children is not None:
            child = node.children.get(page)
            if child is None or not data.startswith(child.key, position):
                break
            if child.device_pages is not None:
                num_device = num_held = child.end
            elif child.host_pages is not None:
                num_held = child.end
            node, position = child, position + len(child.key)
            page = data[position : position + step]
        return num_device, num_held

    def evict(
        self,
        num_pages: int,
        *,
        write_back: bool = False,
        admission: Admission = Admission.ALL,
        max_writes: int | None = None,
    ) -> EvictResult:
        """Free device pages, leaves first, until `num_pages` are free or on their way.

        Nodes with a host copy stay as evicted nodes, the others are deleted. With `write_back`
        those of them that `admission` lets pass are to be written first, and their pages count as
        pending. Pages that are pending from earlier calls count too, so that repeated calls do not
        evict more than was asked for. May free more than asked, where runs go whole, and less, when
        the rest is locked.

        Args:
            num_pages: to be free in the end.
            write_back: whether what the host lacks is written before it goes.
            admission: other than `ALL` takes a `history`.
            max_writes: ends after so many writes were begun; None for as many as it takes.
        """
        freed: list[IntArray] = []
        num_freed = num_refused = 0
        writes: list[Ticket] = []
        while (missing := num_pages - num_freed - self.num_pending_evict_pages) > 0:
            node = None if len(writes) == max_writes else self._pop_victim(Queue.DEVICE, missing)
            if node is None:
                break
            if self.history is not None:
                self.history.note_device_victim(node)
            refused = write_back and not self._admits(node, admission)
            ticket = self.begin_write(node) if write_back and not refused else None
            if ticket is not None:
                node.evict_tick = self._tick
                self.num_pending_evict_pages += node.num_pages
                writes.append(ticket)
                continue
            pages = self._evict_now(node)
            freed.append(pages)
            num_freed += len(pages)
            num_refused += len(pages) if refused else 0
        pending = self.num_pending_evict_pages
        return EvictResult(join_pages(freed), pending, tuple(writes), num_refused)

    def begin_writes_ahead(
        self, num_pages: int, *, admission: Admission = Admission.ALL
    ) -> list[Ticket]:
        """Begin writes of the next device victims, so that evicting them will not have to wait.

        Looks at as many victims as have `num_pages` together; those with a host copy stay as they
        are, and so do those that `evict` would not write. Nothing is evicted.
        """
        tickets: list[Ticket] = []
        not_written: list[RadixNode] = []
        num_looked_at = 0
        while num_looked_at < num_pages:
            node = self.residency.pop(Queue.DEVICE)
            if node is None:
                break
            num_looked_at += node.num_pages
            admitted = self.history is None or self.history.would_admit(node, admission)
            ticket = self.begin_write(node) if admitted else None
            if ticket is None:
                not_written.append(node)
            else:
                tickets.append(ticket)
        for node in not_written:
            self.residency.refresh(node)
        return tickets

    def evict_host(self, num_pages: int, *, duplicates: Duplicates = Duplicates.FIRST) -> IntArray:
        """Free at least `num_pages` host pages if possible and return them.

        Only nodes without host-backed children go, so what remains is always whole prefixes.
        `duplicates` says when copies of what the device holds too go.
        """
        freed: list[IntArray] = []
        num_freed = 0
        while num_freed < num_pages:
            # A sole copy that went may have been all that kept a duplicate above it.
            node = self._pop_host_victim(duplicates, num_pages - num_freed)
            if node is None:
                break
            if self.history is not None and node.device_pages is None:
                self.history.note_host_victim(node)
            pages = self.residency.lose_host(node)
            if node.device_pages is None:
                self._remove(node)
            freed.append(pages)
            num_freed += len(pages)
        return join_pages(freed)

    def _pop_host_victim(self, duplicates: Duplicates, num_pages: int) -> RadixNode | None:
        order: tuple[int, ...] = (Queue.DUPLICATE, Queue.SOLE)
        if duplicates is Duplicates.STAY:
            order = (Queue.SOLE,)
        elif duplicates is Duplicates.LAST or (
            duplicates is Duplicates.IF_WANTED and not self._duplicates_are_too_many()
        ):
            order = (Queue.SOLE, Queue.DUPLICATE)
        # What is pinned in one queue goes after what is not pinned in the other.
        for spare_pinned in (True, False):
            for queue in order:
                node = self._pop_victim(queue, num_pages, spare_pinned=spare_pinned)
                if node is not None:
                    return node
        return None

    def _duplicates_are_too_many(self) -> bool:
        held = self.residency
        few = len(held.duplicates) * _DEVICE_RUNS_PER_DUPLICATE <= len(held.device)
        return not few and (self.history is None or self.history.room_is_wanted)

    def _admits(self, node: RadixNode, admission: Admission) -> bool:
        if self.history is None or admission is Admission.ALL or node.backed_or_in_flight:
            return True
        return self.history.admit(node, admission)

    def _pop_victim(
        self, queue: int, num_pages: int, *, spare_pinned: bool = False
    ) -> RadixNode | None:
        """Take the next victim out of a queue, cut to `num_pages` where runs are cut."""
        node = self.residency.pop(queue, spare_pinned=spare_pinned)
        if node is not None and self._cut_victims and node.num_pages > num_pages:
            # The lower half keeps the identity; the upper one is queued when its child goes.
            self._split(node, node.num_pages - num_pages)
        return node

    def reset(self) -> ResetResult:
        """Forget everything and say where each page goes.

        Pages read by copies in flight are `held`: they are free when all their tickets' copies have
        ended. Tickets of before publish nothing any more.

        Raises:
            HiCacheError: locks are held for requests; their pages would be given away.
        """
        held: list[HeldPages] = []
        device: list[IntArray] = []
        host: list[IntArray] = []
        num_holders = self.num_request_locks()
        if num_holders:
            raise HiCacheError(
                f"reset with {num_holders} request lock(s) held; finish or abort the requests first"
            )
        for node in self.nodes():
            if node.tickets:
                device_pages, host_pages = node.device_pages, node.host_pages
                held.append(
                    HeldPages(
                        node.tickets,
                        join_pages([] if device_pages is None else [device_pages]),
                        join_pages([] if host_pages is None else [host_pages]),
                    )
                )
                continue
            if node.device_pages is not None:
                device.append(node.device_pages)
            if node.host_pages is not None:
                host.append(node.host_pages)
        result = ResetResult(join_pages(device), join_pages(host), tuple(held))
        self.generation += 1
        self._clear()
        return result

    def forget_persisted(self) -> None:
        """Believe that storage holds nothing. O(nodes)."""
        for node in self.nodes():
            node.persisted = False

    def num_request_locks(self) -> int:
        """Return how many locks are held by somebody other than copies in flight. O(nodes)."""
        total = self.root.lock_ref - 1
        locked_children = 0
        for node in self.nodes():
            total += node.lock_ref
            locked_children += node.lock_ref > 0
        return total - locked_children - self._num_ticket_locks()

    def _num_ticket_locks(self) -> int:
        return sum(ticket.kind in (CopyKind.WRITE, CopyKind.LOAD) for ticket in self._ticketed)

    @property
    def evictable_size(self) -> int:
        """Device tokens that no lock protects."""
        pages = self.residency.num_device_pages - self.residency.num_locked_pages
        return pages * self.page_size

    @property
    def protected_size(self) -> int:
        """Device tokens that a lock protects."""
        return self.residency.num_locked_pages * self.page_size

    @property
    def host_size(self) -> int:
        """Tokens with a readable host copy."""
        return self.residency.num_host_pages * self.page_size
