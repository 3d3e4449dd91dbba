"""The numbers of a cache at one moment: plain frozen records without references into it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CacheSnapshot", "CallUse", "MovementUse", "PoolUse", "StoreUse", "TierUse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolUse:
    """The pages of one pool, in tokens; those neither free nor the tree's belong to requests.

    Attributes:
        num_tokens: of the pool.
        num_free_tokens: that nobody owns.
        num_cached_tokens: that a look-up can find there.
    """

    num_tokens: int
    num_free_tokens: int
    num_cached_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovementUse:
    """One kind of movement so far; only `num_in_flight` ever decreases.

    Attributes:
        num_in_flight: operations that have not ended, queued ones included.
        num_operations: that ended.
        num_tokens, num_bytes: that arrived.
        seconds: that its copies or storage calls took, summed over those that run side by side.
        outcomes: by name, jobs for copies and pages for what storage takes part in.
    """

    num_in_flight: int
    num_operations: int
    num_tokens: int
    num_bytes: int
    seconds: float
    outcomes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallUse:
    """The calls of one verb to a store since it was attached; no number ever decreases.

    Attributes:
        num_broken_calls: that raised or answered with nonsense.
        num_bytes: that moved.
        pages: that were asked for, by outcome.
        durations: calls in each bucket of `duration_bounds_seconds`, then those beyond the last.
        duration_bounds_seconds: upper bounds, inclusive and rising.
        total_seconds: of all calls together.
    """

    num_broken_calls: int
    num_bytes: int
    pages: Mapping[str, int]
    durations: Sequence[int]
    duration_bounds_seconds: Sequence[float]
    total_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierUse:
    """One tier of a store that has several.

    Attributes:
        healthy: whether it does its work.
        calls: by verb, fills included.
        figures: see `StoreUse`.
    """

    healthy: bool
    calls: Mapping[str, CallUse]
    figures: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreUse:
    """The store.

    Attributes:
        state: `detached`, `attached` or `detaching`.
        backend, model_name: None without one.
        healthy: whether it does its work; None without one.
        num_abandoned_calls: past their deadline and not returned.
        circuits: `closed`, `open` or `half_open`, by verb.
        calls: by verb.
        figures: of the store itself by name, those that its backend knows, as of its newest call.
        num_retries: further calls after one whose pages had failed; None where nothing retries.
        num_recovered_pages: that were good after one; likewise.
        fill_pages: that tiers were given after a read of a slower one, by outcome.
        tiers: by name; empty where the store is one.
    """

    state: str
    backend: str | None
    model_name: str | None
    healthy: bool | None
    num_abandoned_calls: int
    circuits: Mapping[str, str]
    calls: Mapping[str, CallUse]
    figures: Mapping[str, int] = dataclasses.field(default_factory=dict)
    num_retries: int | None = None
    num_recovered_pages: int | None = None
    fill_pages: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tiers: Mapping[str, TierUse] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSnapshot:
    """All numbers of one cache.

    Attributes:
        page_size: tokens in a page.
        device, host: the pools.
        num_evictable_tokens, num_protected_tokens: of the tree on the device, without a lock and
            with one.
        num_prompt_tokens: of requests whose hits were counted.
        cached_tokens: of these, those found, by the tier that had them.
        num_delayed_hit_tokens: of those, what came while the request waited for another's.
        movements: `write`, `load`, `persist`, `prefetch`.
        events: everything else that is counted, by name.
        store: see `StoreUse`.
    """

    page_size: int
    device: PoolUse
    host: PoolUse
    num_evictable_tokens: int
    num_protected_tokens: int
    num_prompt_tokens: int
    cached_tokens: Mapping[str, int]
    num_delayed_hit_tokens: int
    movements: Mapping[str, MovementUse]
    events: Mapping[str, int]
    store: StoreUse
