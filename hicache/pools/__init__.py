"""Pages and the memory behind them, as two kinds of objects.

A `PageAllocator` owns page ids and knows nothing of bytes; device pools (`DeviceKVPool`,
`DeviceMlaPool`, `DeviceRowPool`) and `HostKVPool` own the bytes and know nothing of who uses them.
The two may live in different processes. An engine that has its own allocator and device pool offers
them as an `Allocator` and a `DevicePool`.
"""

from __future__ import annotations

from hicache.pools.allocator import PageAllocator
from hicache.pools.base import Allocator, DevicePool, LayerCounter, ReportsLayerEnds
from hicache.pools.cp_allocator import CpPageAllocator, KnowsOwners, alloc_like
from hicache.pools.cp_layout import CpLayout, CpLayouts, CpSharedKVLayout
from hicache.pools.device import DeviceKVPool
from hicache.pools.host import HostKVPool, create_host_pool, host_pool_pages
from hicache.pools.indices import SlotTable, expand_pages, pages_of_slots
from hicache.pools.mla import DeviceMlaPool
from hicache.pools.rows import DeviceRowPool

__all__ = [
    "Allocator",
    "CpLayout",
    "CpLayouts",
    "CpPageAllocator",
    "CpSharedKVLayout",
    "DeviceKVPool",
    "DeviceMlaPool",
    "DevicePool",
    "DeviceRowPool",
    "HostKVPool",
    "KnowsOwners",
    "LayerCounter",
    "PageAllocator",
    "ReportsLayerEnds",
    "SlotTable",
    "alloc_like",
    "create_host_pool",
    "expand_pages",
    "host_pool_pages",
    "pages_of_slots",
]
