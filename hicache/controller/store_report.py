"""What is told of a store from what the layers around it and within it have noted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache.controller.records import StorageReport
from hicache.storage.circuit_breaker import CircuitBreakerStorage
from hicache.storage.retrying import RetryingStorage
from hicache.storage.split_heads import SplitHeadsStorage
from hicache.storage.tiered import TieredStorage
from hicache.storage.wrapper import storage_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.storage import HiCacheStorage
    from hicache.storage.instrumented import InstrumentedStorage, StorageSnapshot
    from hicache.types import PageOutcome

__all__ = ["report_on"]


def report_on(backend: InstrumentedStorage, *, num_abandoned_calls: int) -> StorageReport:
    """Return how a store does; reads memory of hicache's own layers only, and so never hangs.

    A tier of a tier, and one of a group of heads, is named with what it is part of, as in
    `group 0/1 (file)`. Fills are those of all tiered storages in it.
    """
    layers = list(storage_layers(backend))
    circuits = [one.states() for one in layers if isinstance(one, CircuitBreakerStorage)]
    retries = [one.counts() for one in layers if isinstance(one, RetryingStorage)]
    fill_outcomes: Counter[PageOutcome] = Counter()
    tiers: dict[str, StorageSnapshot] = {}
    for path, tiered in _tiered_in(backend, ""):
        fill_outcomes.update(tiered.fill_outcomes())
        tiers |= {f"{path}{name}": one for name, one in tiered.tier_snapshots().items()}
    return StorageReport(
        num_abandoned_calls=num_abandoned_calls,
        snapshot=backend.snapshot(),
        circuits=circuits[0] if circuits else {},
        retries=retries[0] if retries else None,
        fill_outcomes=dict(fill_outcomes),
        tiers=tiers,
    )


def _tiered_in(storage: HiCacheStorage, path: str) -> Iterator[tuple[str, TieredStorage]]:
    """Yield every tiered storage, outer ones first, and the path of its tiers' names."""
    *_, innermost = storage_layers(storage)
    if isinstance(innermost, SplitHeadsStorage):
        for index, group in enumerate(innermost.groups):
            yield from _tiered_in(group, f"{path}group {index}/")
    elif isinstance(innermost, TieredStorage):
        yield path, innermost
        for tier in innermost.tiers:
            yield from _tiered_in(tier.storage, f"{path}{tier.name}/")
