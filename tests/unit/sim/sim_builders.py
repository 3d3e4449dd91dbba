"""A simulated rank in the hands of a test."""

from __future__ import annotations

import dataclasses

from hicache.layout import HostLayout
from hicache.radix import RadixKey
from hicache.sim.coverage import Coverage
from hicache.sim.scheduler import Scheduler
from hicache.sim.system import GEOMETRY, System, SystemOptions
from hicache.types import PrefetchPolicy, WritePolicy

ROOMY = SystemOptions(
    write_policy=WritePolicy.WRITE_THROUGH,
    write_by_layer=True,
    write_watermark=0.0,
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    layout=HostLayout.PAGE_FIRST,
    num_device_pages=12,
    num_host_pages=12,
    num_load_slots=5,
    load_back_threshold_pages=1,
    prefetch_threshold_pages=1,
    max_inflight_prefetch_pages=None,
    max_inflight_persist_operations=64,
    batch_pages=2,
    num_workers=1,
    max_abandoned=8,
    max_store_pages=None,
)


def rank(**options: object) -> tuple[System, Scheduler]:
    """A rank with room for all, but for `options`."""
    coverage = Coverage()
    system = System(dataclasses.replace(ROOMY, **options), coverage)  # type: ignore[arg-type]
    return system, Scheduler(system, coverage)


def key_of(*pages: int, cache_salt: str | None = None) -> RadixKey:
    size = GEOMETRY.page_size
    tokens = [page * size + offset for page in pages for offset in range(size)]
    return RadixKey(tokens, cache_salt=cache_salt)


def serve(scheduler: Scheduler, key: RadixKey, request_id: str = "r") -> None:
    """Compute a request to its end; nothing moves meanwhile."""
    scheduler.submit(request_id, key, prefetch=False)
    request = scheduler.requests[-1]
    scheduler.admit(request, mem_quota=None)
    scheduler.compute(request, request.num_pages)
    assert request not in scheduler.requests
