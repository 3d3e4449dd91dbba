"""A simulated rank in the hands of a test."""

from __future__ import annotations

import dataclasses
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache.layout import HostLayout
from hicache.radix import RadixKey
from hicache.sim.coverage import Coverage
from hicache.sim.options import GEOMETRY, SystemOptions
from hicache.sim.ranks import Ranks
from hicache.sim.scheduler import Scheduler
from hicache.sim.system import System
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOMY = SystemOptions(
    write_policy=WritePolicy.WRITE_THROUGH,
    write_by_layer=True,
    write_watermark=0.0,
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
    load_cost_estimate=True,
    prefetch_cost_estimate=True,
    layout=HostLayout.PAGE_FIRST,
    side_pools=(),
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


@contextmanager
def group(num_ranks: int, **options: object) -> Iterator[Ranks]:
    """Ranks with room for all, but for `options`, and without faults."""
    coverage = Coverage(num_ranks)
    ranks = Ranks(
        dataclasses.replace(ROOMY, **options),  # type: ignore[arg-type]
        num_ranks=num_ranks,
        coverage=coverage,
        habits=random.Random(5),
    )
    for one in ranks.all:
        one.system.let_go()
    ranks.take_results()
    yield ranks
    for one in ranks.all:
        one.system.abandon()
    ranks.close()


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
