"""The store as Prometheus reads it, and each of its tiers.

What is not known, or not there, has no family: a value that stands still looks like one that works.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from hicache.metrics.families import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from hicache.metrics.snapshot import StoreUse

__all__ = ["store_families"]

_STORE_STATES = ("detached", "attached", "detaching")
_CIRCUIT_CLOSED = "closed"


class _Figure(NamedTuple):
    """How a figure of a store is shown."""

    create: Callable[[str, str, str, dict[str, float]], Metric]
    name: str
    text: str


_FIGURES = {
    "used_bytes": _Figure(
        gauge,
        "storage_used_bytes",
        "Space that the store takes, index included, for all who share it.",
    ),
    "limit_bytes": _Figure(
        gauge,
        "storage_limit_bytes",
        "Space that the store may take: the least that any who share it allow.",
    ),
    "spare_bytes": _Figure(
        gauge,
        "storage_spare_bytes",
        "What the file system of the store has free above the floor that the store leaves free. "
        "Below zero the store shrinks.",
    ),
    "num_pages": _Figure(
        gauge,
        "storage_stored_pages",
        "Pages of this model that are stored.",
    ),
    "num_evicted_pages": _Figure(
        counter,
        "storage_evicted_pages",
        "Pages that made room in the store, for all who share it.",
    ),
    "num_index_rebuilds": _Figure(
        counter,
        "storage_index_rebuilds",
        "How often this process made the index of the store anew: it was missing, damaged, or the "
        "machine had gone down.",
    ),
    "num_direct_refusals": _Figure(
        counter,
        "storage_direct_io_refusals",
        "How often the file system refused direct I/O. After the first time all is buffered.",
    ),
}


def store_families(store: StoreUse) -> Iterator[Metric]:
    """Yield every metric of the store."""
    yield from _store(store)
    yield from _calls(store)
    yield from _retries(store)
    yield from _figures(store)
    if store.tiers:
        yield from _tiers(store)


def _store(store: StoreUse) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "hicache_storage_info",
        "1 for the store that is attached, or was and still has a call under way.",
        labels=["backend", "model_name"],
    )
    if store.backend is not None and store.model_name is not None:
        info.add_metric([store.backend, store.model_name], 1)
    yield info
    yield gauge(
        "storage_state",
        "1 for the state of L3. While it is detaching, a call to it hangs and nothing new begins.",
        "state",
        {state: state == store.state for state in _STORE_STATES},
    )
    healthy = GaugeMetricFamily(
        "hicache_storage_healthy",
        "1 while L3 does its work. At 0 its calls fail: hits are lost, requests are served.",
    )
    if store.healthy is not None:
        healthy.add_metric([], store.healthy)
    yield healthy
    yield gauge(
        "storage_circuit_open",
        "1 while calls of this kind do not reach L3, because too many failed in a row.",
        "call",
        {call: state != _CIRCUIT_CLOSED for call, state in store.circuits.items()},
    )
    yield GaugeMetricFamily(
        "hicache_storage_abandoned_calls",
        "Calls to L3 past their deadline that have not returned. Each keeps a thread and its "
        "memory.",
        value=store.num_abandoned_calls,
    )


def _calls(store: StoreUse) -> Iterator[Metric]:
    durations = HistogramMetricFamily(
        "hicache_storage_call_duration_seconds",
        "How long calls to L3 took, since it was attached.",
        labels=["call"],
    )
    pages = CounterMetricFamily(
        "hicache_storage_call_pages",
        "Pages that calls to L3 were asked for, by outcome, since it was attached.",
        labels=["call", "outcome"],
    )
    for call, use in store.calls.items():
        bounds = [*(repr(bound) for bound in use.duration_bounds_seconds), "+Inf"]
        buckets = list(zip(bounds, accumulate(use.durations), strict=True))
        durations.add_metric([call], buckets, sum_value=use.total_seconds)
        for outcome, count in use.pages.items():
            pages.add_metric([call, outcome], count)
    yield durations
    yield pages
    yield counter(
        "storage_call_bytes",
        "Bytes that calls to L3 moved, since it was attached.",
        "call",
        {call: use.num_bytes for call, use in store.calls.items()},
    )
    yield counter(
        "storage_broken_calls",
        "Calls to L3 that raised or answered with nonsense, since it was attached: its backend "
        "has a bug.",
        "call",
        {call: use.num_broken_calls for call, use in store.calls.items()},
    )


def _retries(store: StoreUse) -> Iterator[Metric]:
    for name, text, number in (
        (
            "retries",
            "Further calls to L3 for pages that had failed, since it was attached.",
            store.num_retries,
        ),
        (
            "recovered_pages",
            "Pages that had failed and were good after such a call, since it was attached.",
            store.num_recovered_pages,
        ),
    ):
        if number is not None:
            yield CounterMetricFamily(f"hicache_storage_{name}", text, value=number)


def _figures(store: StoreUse) -> Iterator[Metric]:
    """Yield what is known of the store itself, with an empty tier, and of each tier."""
    figures: dict[str, Mapping[str, float]] = {"": store.figures}
    figures |= {name: tier.figures for name, tier in store.tiers.items()}
    for key, figure in _FIGURES.items():
        known: dict[str, float] = {
            tier: values[key] for tier, values in figures.items() if key in values
        }
        if known:
            text = f"{figure.text} As of the newest call to it that moved or removed pages."
            yield figure.create(figure.name, text, "tier", known)


def _tiers(store: StoreUse) -> Iterator[Metric]:
    yield gauge(
        "storage_tier_healthy",
        "1 while the tier does its work. At 0 its calls fail, and others stand in where they can.",
        "tier",
        {name: tier.healthy for name, tier in store.tiers.items()},
    )
    pages = CounterMetricFamily(
        "hicache_storage_tier_call_pages",
        "Pages that calls to the tier were asked for, fills included, by outcome, since L3 was "
        "attached.",
        labels=["tier", "call", "outcome"],
    )
    moved = CounterMetricFamily(
        "hicache_storage_tier_call_bytes",
        "Bytes that calls to the tier moved, since L3 was attached.",
        labels=["tier", "call"],
    )
    broken = CounterMetricFamily(
        "hicache_storage_tier_broken_calls",
        "Calls to the tier that raised or answered with nonsense, since L3 was attached.",
        labels=["tier", "call"],
    )
    for name, tier in store.tiers.items():
        for call, use in tier.calls.items():
            moved.add_metric([name, call], use.num_bytes)
            broken.add_metric([name, call], use.num_broken_calls)
            for outcome, count in use.pages.items():
                pages.add_metric([name, call, outcome], count)
    yield pages
    yield moved
    yield broken
    yield counter(
        "storage_fill_pages",
        "Pages that tiers were given after a read of a slower one, by outcome, since L3 was "
        "attached.",
        "outcome",
        store.fill_pages,
    )
