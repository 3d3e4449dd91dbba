"""A snapshot as Prometheus reads it.

Names are SGLang's where SGLang has one, with `hicache_` in place of `sglang:`; units are tokens,
bytes, seconds, pages or calls and stand in the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hicache.metrics.families import counter, gauge
from hicache.metrics.store_families import store_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from hicache.metrics.snapshot import CacheSnapshot

__all__ = ["HiCacheCollector", "exposition"]


class _Moved(NamedTuple):
    """How SGLang calls a movement, and what it is."""

    name: str
    what: str


_MOVED = {
    "write": _Moved("backup", "from L1 (device) to L2 (host)"),
    "load": _Moved("load_back", "from L2 (host) to L1 (device)"),
    "persist": _Moved("backuped", "from L2 (host) to L3 (storage)"),
    "prefetch": _Moved("prefetched", "from L3 (storage) to L2 (host)"),
}

_EVICTED = {"evicted_device_pages": "device", "evicted_host_pages": "host"}
_DROPPED = {"unwritten_pages": "host_pressure"}
"""Events that are counted in pages, with the label under which their tokens are reported."""


class HiCacheCollector(Collector):
    """Reports a cache to a registry of `prometheus_client`.

    Args:
        read: returns a snapshot. It is called in the thread that collects, and the cache belongs to
            another one: hand over a snapshot that was made there.
    """

    def __init__(self, read: Callable[[], CacheSnapshot]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Name no metric, so that to register the collector reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        snapshot = self._read()
        yield from _pools(snapshot)
        yield from _prompts(snapshot)
        yield from _movements(snapshot)
        yield from _events(snapshot)
        yield from store_families(snapshot.store)


def exposition(snapshot: CacheSnapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the text of all metrics and its content type.

    Args:
        snapshot: what to report.
        accept: the `Accept` header of whoever asks.
    """
    registry = CollectorRegistry()
    registry.register(HiCacheCollector(lambda: snapshot))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _pools(snapshot: CacheSnapshot) -> Iterator[Metric]:
    device, host = snapshot.device, snapshot.host
    for name, text, number in (
        ("kv_total_tokens", "Size of L1, the device pool.", device.num_tokens),
        (
            "kv_available_tokens",
            "Free tokens of L1. With those that are evictable: what new requests can have.",
            device.num_free_tokens,
        ),
        (
            "kv_evictable_tokens",
            "Cached tokens in L1 that no request uses, and that make room when room is needed.",
            snapshot.num_evictable_tokens,
        ),
        (
            "kv_used_tokens",
            "Tokens of L1 that requests or copies under way use: neither free nor evictable.",
            device.num_tokens - device.num_free_tokens - snapshot.num_evictable_tokens,
        ),
        (
            "kv_protected_tokens",
            "Cached tokens in L1 that are locked. Above zero without a request: a lock has leaked.",
            snapshot.num_protected_tokens,
        ),
        ("host_total_tokens", "Size of L2, the host pool.", host.num_tokens),
        (
            "host_used_tokens",
            "Tokens of L2 that are not free. Full is normal: the oldest make room for new ones.",
            host.num_tokens - host.num_free_tokens,
        ),
        (
            "host_cached_tokens",
            "Tokens of L2 that a look-up can find; the rest of those used is being copied.",
            host.num_cached_tokens,
        ),
    ):
        yield GaugeMetricFamily(f"hicache_{name}", text, value=number)


def _prompts(snapshot: CacheSnapshot) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "hicache_prompt_tokens",
        "Tokens of prompts that were admitted. The hit rate over any window is the increase of "
        "hicache_cached_tokens_total divided by the increase of this.",
        value=snapshot.num_prompt_tokens,
    )
    yield counter(
        "cached_tokens",
        "Of the prompt tokens, those that were not computed, by the tier that had them.",
        "cache_source",
        dict(snapshot.cached_tokens),
    )
    yield CounterMetricFamily(
        "hicache_delayed_hit_tokens",
        "Of the cached tokens, those that no memory had when their prompt came, and that another "
        "request fetched or computed while it waited for them. The scheduler counts them.",
        value=snapshot.num_delayed_hit_tokens,
    )


def _movements(snapshot: CacheSnapshot) -> Iterator[Metric]:
    for kind, use in snapshot.movements.items():
        name, what = _MOVED[kind]
        yield CounterMetricFamily(
            f"hicache_{name}_tokens", f"Tokens that arrived {what}.", value=use.num_tokens
        )
        yield CounterMetricFamily(
            f"hicache_{name}_bytes", f"Bytes that arrived {what}.", value=use.num_bytes
        )
        yield CounterMetricFamily(
            f"hicache_{name}_duration_seconds",
            f"Time that moving {what} took, summed over what runs side by side. Bytes divided by "
            "it are the bandwidth of one copy or call.",
            value=use.seconds,
        )
    yield gauge(
        "in_flight_operations",
        "Movements that have not ended, queued ones included. One that stays high is a tier that "
        "is too slow for the load.",
        "movement",
        {kind: use.num_in_flight for kind, use in snapshot.movements.items()},
    )
    outcomes = CounterMetricFamily(
        "hicache_movement_outcomes",
        "How movements ended: jobs for write and load, pages for persist and prefetch. Everything "
        "but ok and present is a copy or a page that is computed again.",
        labels=["movement", "outcome"],
    )
    for kind, use in snapshot.movements.items():
        for outcome, count in use.outcomes.items():
            outcomes.add_metric([kind, outcome], count)
    yield outcomes


def _events(snapshot: CacheSnapshot) -> Iterator[Metric]:
    events = dict(snapshot.events)

    def tokens_of(labels: dict[str, str]) -> dict[str, float]:
        pages = {label: events.pop(name, 0) for name, label in labels.items()}
        return {label: count * snapshot.page_size for label, count in pages.items()}

    yield counter(
        "evicted_tokens", "Tokens that made room for others.", "tier", tokens_of(_EVICTED)
    )
    yield counter(
        "dropped_tokens",
        "Tokens that were to be copied to L2 and were not, because nothing there could make room.",
        "reason",
        tokens_of(_DROPPED),
    )
    yield counter(
        "events",
        "What else has happened, by name: requests to storage that were not made and why "
        "(prefetch_*, no_host_anchor, persist_queue_full) or made again (persist_retries, "
        "persist_refreshes), loads without room (load_back_no_memory), pages of writes that nobody "
        "wanted any more (abandoned_write_pages).",
        "event",
        {name: float(count) for name, count in events.items()},
    )
