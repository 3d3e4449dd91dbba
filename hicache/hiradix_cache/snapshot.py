"""Collects what is counted all over a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.metrics import CacheSnapshot, CallUse, MovementUse, PoolUse, StoreUse, TierUse
from hicache.storage.instrumented import HealthState
from hicache.storage.latency import LATENCY_BOUNDS_SECONDS

if TYPE_CHECKING:
    from hicache.controller import StorageStatus
    from hicache.hiradix_cache.cache import HiRadixCache
    from hicache.pools import Allocator
    from hicache.storage.instrumented import StorageSnapshot, VerbSnapshot

__all__ = ["snapshot_of"]


def snapshot_of(cache: HiRadixCache) -> CacheSnapshot:
    """Return all numbers of `cache` as they are now; on the thread that owns it."""
    controller, tree = cache.controller, cache.tree
    device_size = tree.evictable_size + tree.protected_size
    in_flight = controller.in_flight
    return CacheSnapshot(
        page_size=tree.page_size,
        device=_pool(controller.device_allocator, tree.page_size, device_size),
        host=_pool(controller.host_allocator, tree.page_size, tree.host_size),
        num_evictable_tokens=tree.evictable_size,
        num_protected_tokens=tree.protected_size,
        num_prompt_tokens=cache.prompt_tokens.total,
        num_delayed_hit_tokens=cache.prompt_tokens.delayed,
        cached_tokens={tier.value: count for tier, count in cache.prompt_tokens.cached.items()},
        movements={
            kind.value: MovementUse(
                num_in_flight=in_flight[kind],
                num_operations=stats.num_operations,
                num_tokens=stats.num_pages * tree.page_size,
                num_bytes=stats.num_bytes,
                seconds=stats.seconds,
                outcomes=dict(stats.outcomes),
            )
            for kind, stats in controller.stats.items()
        },
        events=dict(cache.counters)
        | {f"prefetch_cost_{one.value}": n for one, n in controller.costs.verdicts.items()},
        store=_store(cache.storage_status),
    )


def _pool(allocator: Allocator, page_size: int, num_cached_tokens: int) -> PoolUse:
    return PoolUse(
        num_tokens=allocator.num_pages * page_size,
        num_free_tokens=allocator.num_available * page_size,
        num_cached_tokens=num_cached_tokens,
    )


def _store(status: StorageStatus) -> StoreUse:
    report = status.report
    snapshot, retries = report.snapshot, report.retries
    whole = None if snapshot is None else _tier(snapshot)
    return StoreUse(
        state=status.state.value,
        backend=status.backend,
        model_name=status.model_name,
        healthy=None if whole is None else whole.healthy,
        num_abandoned_calls=report.num_abandoned_calls,
        circuits={verb.value: circuit.value for verb, circuit in report.circuits.items()},
        calls={} if whole is None else whole.calls,
        figures={} if whole is None else whole.figures,
        num_retries=None if retries is None else retries.num_attempts,
        num_recovered_pages=None if retries is None else retries.num_recovered_pages,
        fill_pages={outcome.value: count for outcome, count in report.fill_outcomes.items()},
        tiers={name: _tier(one) for name, one in report.tiers.items()},
    )


def _tier(snapshot: StorageSnapshot) -> TierUse:
    return TierUse(
        healthy=snapshot.health.state is HealthState.GREEN,
        calls={verb.value: _calls(one) for verb, one in snapshot.verbs.items()},
        figures=snapshot.figures.known(),
    )


def _calls(verb: VerbSnapshot) -> CallUse:
    return CallUse(
        num_broken_calls=verb.num_broken_calls,
        num_bytes=verb.num_bytes,
        pages={outcome.value: count for outcome, count in verb.pages.items()},
        durations=verb.latency.counts,
        duration_bounds_seconds=LATENCY_BOUNDS_SECONDS,
        total_seconds=verb.latency.total_seconds,
    )
