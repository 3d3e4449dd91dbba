"""Which tiers hold a node, who protects it, and what may be evicted because of that.

Every change of a node's tiers or locks goes through here, so the counters that make eviction flat
(children with device pages, children with host pages, queue membership, sizes) are kept in one
place and nothing ever scans children or leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.errors import OwnershipError
from hicache.radix.node import Queue
from hicache.radix.pinning_policy import PinningPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.radix.eviction import EvictionPolicy
    from hicache.radix.node import RadixNode
    from hicache.types import IntArray

__all__ = ["Residency"]


class Residency:
    """Residency, locks and eviction queues of one tree's nodes.

    Attributes:
        device: device-resident, unlocked nodes below which nothing is device-resident.
        duplicates: nodes whose host pages repeat device pages and may go; ordered by a policy of
            their own, as the device's copy is not lost with theirs.
        soles: nodes that only the host holds and that may go.
        num_device_pages: pages of all nodes with device pages.
        num_locked_pages: device pages of nodes with a lock.
        num_host_pages: pages of all nodes with host pages.
    """

    def __init__(
        self,
        create_policy: Callable[[], EvictionPolicy],
        create_duplicates: Callable[[], EvictionPolicy],
    ) -> None:
        self.device = create_policy()
        self.duplicates = create_duplicates()
        self.soles = create_policy()
        self.num_device_pages = 0
        self.num_locked_pages = 0
        self.num_host_pages = 0

    @property
    def queues(self) -> tuple[EvictionPolicy, ...]:
        """The eviction queues."""
        return self.device, self.duplicates, self.soles

    def pin_by(self, clock: Callable[[], float]) -> None:
        """Let pins protect nodes in every queue from now on; see `PinningPolicy` for the clock."""
        self.device, self.duplicates, self.soles = (
            _with_pins(queue, clock) for queue in self.queues
        )

    def gain_device(self, node: RadixNode, pages: IntArray) -> None:
        """Publish `pages` as the device pages of `node`, which has none."""
        parent = node.parent
        assert parent is not None
        assert node.device_pages is None
        node.device_pages = pages
        parent.device_children += 1
        self.num_device_pages += node.end - node.start
        if node.lock_ref:
            self.num_locked_pages += node.end - node.start
        self.refresh(node)
        if parent.queued & Queue.DEVICE:
            self.refresh(parent)

    def lose_device(self, node: RadixNode) -> IntArray:
        """Take the device pages from `node`, which is unlocked, and return them."""
        parent, pages = node.parent, node.device_pages
        assert parent is not None
        assert pages is not None
        assert not node.lock_ref
        node.device_pages = None
        parent.device_children -= 1
        self.num_device_pages -= len(pages)
        self.refresh(node)
        self.refresh(parent)
        return pages

    def expect_host(self, node: RadixNode) -> None:
        """Note that host pages for `node` are on their way."""
        parent = node.parent
        assert parent is not None
        parent.host_children += 1
        self.refresh(parent)

    def gain_host(self, node: RadixNode, pages: IntArray) -> None:
        """Publish `pages` as the host pages of `node`; they were expected."""
        assert node.host_pages is None
        node.host_pages = pages
        self.num_host_pages += len(pages)
        self.refresh(node)

    def lose_host(self, node: RadixNode) -> IntArray:
        """Take the host pages from `node` and return them."""
        pages = node.host_pages
        assert pages is not None
        node.host_pages = None
        self.num_host_pages -= len(pages)
        self.unexpect_host(node)
        return pages

    def unexpect_host(self, node: RadixNode) -> None:
        """Note that no host pages for `node` are there or on their way any more."""
        parent = node.parent
        assert parent is not None
        parent.host_children -= 1
        self.refresh(node)
        self.refresh(parent)

    def lock(self, node: RadixNode) -> None:
        """Protect the device pages of `node` and of its ancestors.

        Stops at the first ancestor that is locked already. A node without device pages may be
        locked: what is loaded into it later is protected from the first moment.
        """
        while node.device_pages is None and not node.lock_ref:
            node.lock_ref = 1
            self.refresh(node)
            node = node.parent  # type: ignore[assignment]  # the root is always locked
        end = node.end
        if not node.lock_ref:
            node.lock_ref = 1
            if node.queued:
                self.refresh(node)
            node = node.parent  # type: ignore[assignment]
            # Above a resident node nothing stands in the device queue: no refresh, a tight loop.
            while not node.lock_ref:
                node.lock_ref = 1
                node = node.parent  # type: ignore[assignment]  # the root is always locked
            self.num_locked_pages += end - node.end
        node.lock_ref += 1

    def unlock(self, node: RadixNode) -> None:
        """Give back one lock of `node`.

        Raises:
            OwnershipError: `node` is not locked; nothing is changed.
        """
        if node.lock_ref <= (node.parent is None):
            raise OwnershipError(f"{node} is not locked; a lock was given back twice")
        while node.device_pages is None and node.lock_ref == 1 and node.parent is not None:
            node.lock_ref = 0
            self.refresh(node)
            node = node.parent
        end = node.end
        if node.lock_ref == 1 and node.parent is not None:
            first = node
            while node.lock_ref == 1:
                node.lock_ref = 0
                node = node.parent
            self.num_locked_pages -= end - node.end
            self.refresh(first)
        node.lock_ref -= 1

    def host_lock(self, node: RadixNode) -> None:
        """Protect the host pages of `node`, and `node` itself, but not its ancestors."""
        node.host_lock_ref += 1
        self.refresh(node)

    def host_unlock(self, node: RadixNode) -> None:
        """Give back one host lock of `node`; an `OwnershipError` when there is none."""
        if not node.host_lock_ref:
            raise OwnershipError(f"{node} has no host lock; one was given back twice")
        node.host_lock_ref -= 1
        self.refresh(node)

    def touch(self, node: RadixNode) -> None:
        """Tell the queues that `node` was just used."""
        if node.queued & Queue.DEVICE:
            self.device.touch(node)
        if node.queued & Queue.DUPLICATE:
            self.duplicates.touch(node)
        elif node.queued & Queue.SOLE:
            self.soles.touch(node)

    def requeue(self, node: RadixNode) -> None:
        """Give `node` its place in its queues anew, as its pin has changed."""
        for bit, queue in zip(
            (Queue.DEVICE, Queue.DUPLICATE, Queue.SOLE), self.queues, strict=True
        ):
            if node.queued & bit:
                queue.discard(node)
                queue.add(node)

    def refresh(self, node: RadixNode) -> None:
        """Bring the queues in line with the state of `node`."""
        wanted = self.wanted_queues(node)
        changed = wanted ^ node.queued
        if not changed:
            return
        node.queued = wanted
        for bit, queue in (
            (Queue.DEVICE, self.device),
            (Queue.DUPLICATE, self.duplicates),
            (Queue.SOLE, self.soles),
        ):
            if changed & bit:
                if wanted & bit:
                    queue.add(node)
                else:
                    queue.discard(node)

    def pop(self, bit: int, *, spare_pinned: bool = False) -> RadixNode | None:
        """Take the next victim out of the queue named by a bit of `Queue`; None when it is empty.

        The caller changes the state of the node so that it does not belong into the queue. With
        `spare_pinned`, None also when all that is left is pinned.
        """
        if bit == Queue.DEVICE:
            queue = self.device
        else:
            queue = self.duplicates if bit == Queue.DUPLICATE else self.soles
        if spare_pinned and isinstance(queue, PinningPolicy):
            node = queue.pop_unpinned()
        else:
            node = queue.pop()
        if node is not None:
            node.queued &= ~bit
        return node

    @staticmethod
    def wanted_queues(node: RadixNode) -> int:
        """Return the bits of `Queue` that the state of `node` asks for."""
        if node.parent is None:
            return 0
        queues = 0
        resident = node.device_pages is not None
        # Evicting an unbacked node deletes it, which a host lock forbids.
        removable = node.host_pages is not None or not node.host_lock_ref
        if resident and not node.lock_ref and not node.device_children and removable:
            queues = Queue.DEVICE
        if node.host_pages is not None and not node.host_lock_ref and not node.host_children:
            if resident:
                queues |= Queue.DUPLICATE
            elif not node.lock_ref:
                queues |= Queue.SOLE
        return queues


def _with_pins(queue: EvictionPolicy, clock: Callable[[], float]) -> EvictionPolicy:
    return PinningPolicy(lambda: queue, clock=clock)
