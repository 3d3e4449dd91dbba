"""The parts of a simulated rank that fail on purpose: copies, free lists, stored pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.pools import CpPageAllocator, PageAllocator
from hicache.radix import CopyKind
from hicache.sim.coverage import Fault, Operation, State
from hicache.storage.memory import MemoryPages, StoredPage
from hicache.storage.page_memory import page_checksum
from hicache.transfer import TorchTransferEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.pools import CpLayout, DevicePool, HostKVPool
    from hicache.radix import RadixKey
    from hicache.sim.coverage import Coverage
    from hicache.sim.stamps import PoolBytes, Stamps
    from hicache.transfer import TransferPlan
    from hicache.types import IntArray, PageHash

__all__ = [
    "BreakableEngine",
    "InjectedCopyError",
    "SharedAllocator",
    "TightAllocator",
    "WatchedStore",
]


class InjectedCopyError(Exception):
    """What a broken copy raises: deliberately no error of hicache."""


class BreakableEngine(TorchTransferEngine):
    """Copies, unless the next layer of a direction is to break.

    Args:
        device_pool: one side.
        host_pool: the other side.
        number: of the pools among those that a page id names a page in.
        device_bytes: the pages of all; a load that breaks leaves garbage there.
        host_bytes: likewise for a write.
        breaking: directions whose next layer raises, each once; shared by the engines of a rank.
        coverage: is told of every copy that breaks.
    """

    def __init__(
        self,
        device_pool: DevicePool,
        host_pool: HostKVPool,
        *,
        number: int,
        device_bytes: PoolBytes,
        host_bytes: PoolBytes,
        breaking: set[CopyKind],
        coverage: Coverage,
    ) -> None:
        super().__init__(device_pool, host_pool, staging_bytes=1)
        self._number = number
        self._device_bytes = device_bytes
        self._host_bytes = host_bytes
        self._coverage = coverage
        self._breaking = breaking

    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        """See `TransferEngine.write_layer`."""
        if CopyKind.WRITE in self._breaking:
            self._host_bytes.scribble(plan.host_pages, layer, pool=self._number)
            self._break(CopyKind.WRITE, Operation.WRITE)
        super().write_layer(plan, layer)

    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        """See `TransferEngine.load_layer`."""
        if CopyKind.LOAD in self._breaking:
            self._device_bytes.scribble(plan.device_pages, layer, pool=self._number)
            self._break(CopyKind.LOAD, Operation.LOAD)
        super().load_layer(plan, layer)

    def _break(self, kind: CopyKind, operation: Operation) -> None:
        self._breaking.discard(kind)
        self._coverage.note(operation, State.RUNNING, Fault.RAISE)
        raise InjectedCopyError(f"a {kind.value} was broken")


class TightAllocator(PageAllocator):
    """A free list whose pages are poisoned when they come back.

    Args:
        num_pages: size of the pool.
        poison: makes the bytes of pages unlike any that belong somewhere.

    Attributes:
        num_withheld: free pages that nobody gets, as if another owner had taken them.
    """

    def __init__(self, num_pages: int, *, poison: Callable[[IntArray], None]) -> None:
        super().__init__(num_pages)
        self._poison = poison
        self.num_withheld = 0
        poison(self.free_pages())

    @property
    def num_available(self) -> int:
        """See `Allocator.num_available`."""
        return max(0, super().num_available - self.num_withheld)

    def alloc(self, count: int) -> IntArray | None:
        """See `Allocator.alloc`."""
        return super().alloc(count) if count <= self.num_available else None

    def free(self, pages: IntArray) -> None:
        """See `Allocator.free`."""
        super().free(pages)
        self._poison(pages)


class SharedAllocator(CpPageAllocator):
    """Likewise a free list of pages that ranks share.

    Args:
        layout: who has which page.
        poison: see `TightAllocator`.
        note_owners: called when pages are free, but not as many of each owner as are asked for.
    """

    def __init__(
        self,
        layout: CpLayout,
        *,
        poison: Callable[[IntArray], None],
        note_owners: Callable[[], None],
    ) -> None:
        super().__init__(layout)
        self._poison = poison
        self._note_owners = note_owners
        poison(self.free_pages())

    def alloc_pages_with_owners(self, owners: IntArray) -> IntArray | None:
        """See `KnowsOwners.alloc_pages_with_owners`."""
        pages = super().alloc_pages_with_owners(owners)
        if pages is None and len(owners) <= self.num_available:
            self._note_owners()
        return pages

    def free(self, pages: IntArray) -> None:
        """See `Allocator.free`."""
        super().free(pages)
        self._poison(pages)


class WatchedStore(MemoryPages):
    """Stored pages of which some get lost or damaged, and no wrong one comes in unnoticed.

    Args:
        stamps: what the pages have to be.

    Attributes:
        stamps: what was given.
        reach_points: called whenever a call looks for a page; one for each rank that has the store.
        namespace_digest: of the backend that was opened last.
        violations: pages that were stored with other bytes than their own, one sentence each.
    """

    def __init__(self, stamps: Stamps) -> None:
        super().__init__()
        self.namespace_digest = b""
        self.stamps = stamps
        self.reach_points: list[Callable[[], None]] = []
        self.violations: list[str] = []

    def find(self, namespace_digest: bytes, key: PageHash) -> StoredPage | None:
        """See `MemoryPages.find`."""
        for reach_point in self.reach_points:
            reach_point()
        return super().find(namespace_digest, key)

    def put(
        self, namespace_digest: bytes, key: PageHash, page: StoredPage, *, max_bytes: int | None
    ) -> bool:
        """See `MemoryPages.put`."""
        if page.payload != self.stamps.stored_bytes(key):
            self.violations.append(f"page {key.hex()[:8]} was stored with other bytes")
        return super().put(namespace_digest, key, page, max_bytes=max_bytes)

    def fill(self, key: RadixKey) -> None:
        """Store the pages of `key`, as another process might have done."""
        self.stamps.rows(key)
        for page_hash in self.stamps.hashes(key):
            payload = self.stamps.stored_bytes(page_hash)
            assert payload is not None
            page = StoredPage(payload, page_checksum([payload]))
            super().put(self.namespace_digest, page_hash, page, max_bytes=None)

    @property
    def keys(self) -> list[PageHash]:
        """The key of every page."""
        return [key for _, key in self._pages]

    def lose(self, key: PageHash) -> None:
        """Let a page vanish."""
        self.remove(self.namespace_digest, key, self._pages[self.namespace_digest, key])

    def damage(self, key: PageHash, *, truncate: bool) -> None:
        """Cut a page off, or flip a bit of it; what was said of its bytes stays as it is."""
        payload, checksum = self._pages[self.namespace_digest, key]
        payload = payload[:-1] if truncate else bytes([payload[0] ^ 1]) + payload[1:]
        damaged = StoredPage(payload, checksum)
        super().put(self.namespace_digest, key, damaged, max_bytes=None)
