"""A snapshot as Prometheus reads it; what its numbers mean, the acceptance cases test."""

from __future__ import annotations

import dataclasses
import re

import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from hicache.metrics import CacheSnapshot, CallUse, MovementUse, PoolUse, StoreUse, TierUse
from hicache.metrics.prometheus import HiCacheCollector, exposition
from hicache.storage import StorageFigures

CALLS = {
    "batch_get": CallUse(
        num_broken_calls=1,
        num_bytes=10,
        pages={"ok": 3},
        durations=(1, 2, 3),
        duration_bounds_seconds=(0.001, 0.01),
        total_seconds=4.0,
    )
}
FIGURES = {one.name: 7 for one in dataclasses.fields(StorageFigures)}
MOVED = MovementUse(
    num_in_flight=1,
    num_operations=2,
    num_tokens=64,
    num_bytes=4096,
    seconds=0.5,
    outcomes={"ok": 2, 'a "name"\n': 1},
)
SNAPSHOT = CacheSnapshot(
    page_size=16,
    device=PoolUse(num_tokens=160, num_free_tokens=32, num_cached_tokens=96),
    host=PoolUse(num_tokens=320, num_free_tokens=64, num_cached_tokens=240),
    num_evictable_tokens=64,
    num_protected_tokens=32,
    num_prompt_tokens=100,
    cached_tokens={"device": 1, "host": 2, "storage": 3},
    num_delayed_hit_tokens=2,
    movements=dict.fromkeys(("write", "load", "persist", "prefetch"), MOVED),
    events={"evicted_device_pages": 3, "unwritten_pages": 2, "something_new": 5},
    store=StoreUse(
        state="attached",
        backend="file",
        model_name="model",
        healthy=False,
        num_abandoned_calls=1,
        circuits={"batch_get": "open", "batch_set": "closed"},
        calls=CALLS,
        figures=FIGURES,
        num_retries=2,
        num_recovered_pages=1,
        fill_pages={"ok": 3},
        tiers={'0 ("fast")': TierUse(healthy=True, calls=CALLS, figures=FIGURES)},
    ),
)
SIZES = ("_tokens", "_bytes", "_seconds", "_pages")
COUNTS = ("_operations", "_calls", "_outcomes", "_events", "_retries", "_rebuilds", "_refusals")
STATES = {"hicache_storage_info", "hicache_storage_state", "hicache_storage_healthy"}
STATES |= {"hicache_storage_circuit_open", "hicache_storage_tier_healthy"}


def parse(snapshot: CacheSnapshot) -> dict[str, float]:
    text, _ = exposition(snapshot)
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in prometheus_client.parser.text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_names_have_a_prefix_and_a_unit_and_every_metric_is_explained() -> None:
    text, _ = exposition(SNAPSHOT)
    families = list(prometheus_client.parser.text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"hicache_[a-z_]+", family.name)
        assert family.name.endswith(SIZES + COUNTS) or family.name in STATES
        assert family.documentation.endswith(".")


def test_both_formats_parse_and_say_the_same() -> None:
    text, content_type = exposition(SNAPSHOT)
    assert content_type.startswith("text/plain; version=0.0.4")
    accept = "application/openmetrics-text; version=1.0.0"
    open_text, open_type = exposition(SNAPSHOT, accept)
    assert open_type.startswith(accept)
    plain = prometheus_client.parser.text_string_to_metric_families(text.decode())
    parse_open = prometheus_client.openmetrics.parser.text_string_to_metric_families
    opened = parse_open(open_text.decode())  # type: ignore[no-untyped-call]
    assert {one.name for one in plain} == {one.name for one in opened}


def test_pages_are_tokens_and_what_has_no_name_of_its_own_is_an_event() -> None:
    samples = parse(SNAPSHOT)
    assert samples["hicache_evicted_tokens_total['device']"] == 48
    assert samples["hicache_evicted_tokens_total['host']"] == 0
    assert samples["hicache_dropped_tokens_total['host_pressure']"] == 32
    assert samples["hicache_events_total['something_new']"] == 5
    assert not [name for name in samples if "_pages']" in name]


def test_pools_add_up() -> None:
    samples = parse(SNAPSHOT)
    parts = ("available", "evictable", "used")
    numbers = [samples[f"hicache_kv_{part}_tokens[]"] for part in parts]
    assert numbers == [32, 64, 64]
    assert sum(numbers) == samples["hicache_kv_total_tokens[]"]


def test_buckets_are_cumulative_and_calls_are_counted_with_them() -> None:
    samples = parse(SNAPSHOT)
    name = "hicache_storage_call_duration_seconds"
    assert samples[f"{name}_bucket['0.001', 'batch_get']"] == 1
    assert samples[f"{name}_bucket['0.01', 'batch_get']"] == 3
    assert samples[f"{name}_bucket['+Inf', 'batch_get']"] == 6
    assert samples[f"{name}_count['batch_get']"] == 6
    assert samples[f"{name}_sum['batch_get']"] == 4


def test_without_a_store_there_is_nothing_that_could_be_taken_for_a_broken_one() -> None:
    gone = StoreUse(
        state="detached",
        backend=None,
        model_name=None,
        healthy=None,
        num_abandoned_calls=0,
        circuits={},
        calls={},
    )
    samples = parse(dataclasses.replace(SNAPSHOT, store=gone))
    assert samples["hicache_storage_state['detached']"] == 1
    about = {name for name in samples if name.startswith("hicache_storage_")}
    assert {name.split("[")[0] for name in about} == {
        "hicache_storage_state",
        "hicache_storage_abandoned_calls",
    }


def test_a_registry_of_an_engine_reads_when_it_is_asked_and_not_before() -> None:
    reads: list[int] = []

    def snapshot() -> CacheSnapshot:
        reads.append(1)
        return SNAPSHOT

    registry = CollectorRegistry()
    registry.register(HiCacheCollector(snapshot))
    assert reads == []
    assert generate_latest(registry) == exposition(SNAPSHOT)[0]
    assert reads == [1]


def test_a_snapshot_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SNAPSHOT.page_size = 1  # type: ignore[misc]
