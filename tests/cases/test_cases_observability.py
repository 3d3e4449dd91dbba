"""Acceptance cases: every number that is shown moves, and by what has happened."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, tokens
from http_rig import STORAGE, HttpRig
from prometheus_client.parser import text_string_to_metric_families
from scripted_parts import Barrier, injected

from hicache.errors import HiCacheError, StorageTimeout
from hicache.hiradix_cache import snapshot_of
from hicache.metrics.prometheus import exposition
from hicache.radix import RadixKey
from hicache.storage.circuit_breaker import CircuitBreakerStorage
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import Fault, FaultyStorage, Gate, Verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.storage import HiCacheStorageConfig

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(11, 12, 13))
MISSING = RadixKey(tokens(31, 32))
CONSTANT = {"hicache_kv_total_tokens", "hicache_host_total_tokens"}
MOVEMENTS = ("backup", "load_back", "backuped", "prefetched")


def read(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of each metric by name and labels; buckets of histograms are left out."""
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        values = samples.setdefault(family.name, {})
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                values[(sample.name, *sample.labels.values())] = sample.value
    return samples


class Watched(Rig):
    """A rig whose store can be held, broken and cut off; `seen` is every value of every metric."""

    def __init__(self) -> None:
        self.store = MemoryPages()
        self.barriers = {verb: Barrier() for verb in Verb}
        self.failing: list[Fault | None] = []
        self.seen: defaultdict[str, set[float]] = defaultdict(set)

        def create(config: HiCacheStorageConfig) -> CircuitBreakerStorage:
            faulty = FaultyStorage(
                MemoryStorage(config, store=self.store),
                faults={Verb.SET: self._faults()},
                gates=self.barriers,
            )
            return CircuitBreakerStorage(
                faulty, max_failures=1, cooldown_seconds=5.0, clock=self.clock
            )

        super().__init__(config_for(8, storage=injected(num_workers=2)), create_storage=create)
        self.gates += self.barriers.values()

    def _faults(self) -> Iterator[Fault | None]:
        while True:
            yield self.failing.pop() if self.failing else None

    def look(self) -> dict[str, dict[tuple[str, ...], float]]:
        text, _ = exposition(snapshot_of(self.cache))
        samples = read(text.decode())
        for name, values in samples.items():
            self.seen[name] |= {sum(values.values()), *values.values()}
        return samples

    def slowly(self, begin: Callable[[], object], *gates: Gate) -> None:
        """Let a second pass wherever what is begun stands still, one gate after the other."""
        begin()
        for gate in gates:
            self.step_until(gate.entered.is_set)
            self.look()
            self.clock.advance(1.0)
            gate.open()
        self.settle()
        self.look()

    def value(self, name: str, *labels: str) -> float:
        values = self.look()[name]
        return sum(value for key, value in values.items() if key[1:] == labels)


def test_every_metric_moves_by_what_has_happened() -> None:
    """C126: backup, eviction, load_back, persist, prefetch, abort and failure."""
    with Watched() as rig:
        rig.look()
        write = rig.engine.write_gates[0] = rig.gate()
        rig.barriers[Verb.SET].shut()
        rig.slowly(lambda: rig.insert(KEY), write, rig.barriers[Verb.SET])
        assert (rig.value("hicache_backup_tokens"), rig.value("hicache_backuped_tokens")) == (
            len(KEY),
            len(KEY),
        )
        assert rig.value("hicache_movement_outcomes", "persist", "ok") == 4

        rig.evict_device()
        assert rig.value("hicache_evicted_tokens", "device") == len(KEY)
        load = rig.engine.load_gates[0] = rig.gate()
        rig.begin_load(KEY)
        rig.slowly(rig.cache.ready_to_load_host_cache, load)
        assert rig.value("hicache_load_back_tokens") == len(KEY)

        locked = rig.match(KEY).last_device_node
        rig.cache.inc_lock_ref(locked)
        assert rig.value("hicache_kv_protected_tokens") == len(KEY)
        rig.cache.dec_lock_ref(locked)
        rig.drop_memory()
        assert rig.value("hicache_evicted_tokens", "host") == len(KEY)

        rig.barriers[Verb.GET].shut()
        rig.slowly(lambda: rig.begin_prefetch(KEY), rig.barriers[Verb.GET])
        assert rig.cache.pop_prefetch_loaded_tokens("p") == len(KEY)
        assert rig.value("hicache_prefetched_tokens") == len(KEY)
        assert rig.prefetch(MISSING) == 0
        assert rig.value("hicache_events", "prefetch_revoked") == 1
        rig.cache.prompt_tokens.count(20, device=4, host=0, storage=12, delayed=8)
        assert rig.value("hicache_delayed_hit_tokens") == 8
        assert rig.value("hicache_cached_tokens", "storage") == 12
        assert rig.value("hicache_prompt_tokens") == 20

        # Bytes are pages times page bytes, whatever was moved.
        for name in MOVEMENTS:
            num_pages = rig.value(f"hicache_{name}_tokens") / PAGE
            assert rig.value(f"hicache_{name}_bytes") == num_pages * GEOMETRY.page_bytes

        fail_to_persist(rig)
        abort_what_hangs(rig)
        not_moved = {name for name, values in rig.seen.items() if len(values) < 2}
        assert not_moved == CONSTANT


def fail_to_persist(rig: Watched) -> None:
    """Let a persist fail, and the host be too full for a write."""
    rig.failing.append(Fault.RAISE)
    rig.insert(OTHER)
    rig.settle()
    assert rig.value("hicache_movement_outcomes", "persist", "failed") == 3
    assert rig.value("hicache_storage_circuit_open", "batch_set") == 1
    assert rig.value("hicache_storage_healthy") == 0
    assert rig.value("hicache_storage_broken_calls", "batch_set") == 1
    # The host has 8 pages, 7 of them taken and protected: a write of 2 is given up.
    rig.barriers[Verb.SET].shut()
    rig.clock.advance(6.0)
    rig.insert(OTHER)
    rig.step_until(rig.barriers[Verb.SET].entered.is_set)
    before = rig.value("hicache_dropped_tokens", "host_pressure")
    node = rig.match(KEY).last_host_node
    ticket = rig.cache.tree.begin_load(node)
    assert ticket is not None
    rig.insert(RadixKey(tokens(21, 22)))
    assert rig.value("hicache_dropped_tokens", "host_pressure") == before + 2 * PAGE
    rig.cache.tree.commit_load(ticket, rig.alloc_device(0), 0)
    rig.barriers[Verb.SET].open()
    rig.settle()
    assert rig.value("hicache_storage_healthy") == 1


def abort_what_hangs(rig: Watched) -> None:
    """Let a read hang and its request go; then let the store go."""
    rig.drop_memory()
    rig.barriers[Verb.GET].shut()
    rig.begin_prefetch(KEY)
    rig.step_until(rig.barriers[Verb.GET].entered.is_set)
    rig.cache.release_aborted_request("p")
    rig.clock.advance(100.0)
    rig.step_until(lambda: rig.cache.controller.num_spent == 1)
    assert rig.value("hicache_storage_abandoned_calls") == 1
    with pytest.raises(StorageTimeout):
        rig.cache.detach_storage_backend(0.01)
    assert rig.value("hicache_storage_state", "detaching") == 1
    assert not rig.begin_prefetch(KEY, request_id="q")
    assert rig.value("hicache_events", "prefetch_store_detaching") == 1
    rig.barriers[Verb.GET].open()
    rig.settle()
    rig.cache.detach_storage_backend()
    assert rig.value("hicache_storage_state", "detached") == 1
    with pytest.raises(HiCacheError):
        rig.cache.clear_storage_backend()
    rig.cache.attach_storage_backend(injected(num_workers=2))
    rig.cache.clear_storage_backend()
    rig.look()


def test_the_hit_rate_can_be_had_over_any_window() -> None:
    """C125: of ten requests with full hits, of one without, and of all."""

    def scrape(rig: HttpRig) -> tuple[float, float]:
        samples = read(rig.call("GET", "/metrics").body.decode())
        cached = sum(samples["hicache_cached_tokens"].values())
        return cached, sum(samples["hicache_prompt_tokens"].values())

    with HttpRig() as rig:
        rig.call("PUT", STORAGE, {"hicache_storage_backend": "memory"})
        rig.run(0, num_tokens=97)
        scrapes = [scrape(rig)]
        for _ in range(10):
            rig.run(0, num_tokens=97)
        scrapes.append(scrape(rig))
        rig.run(5, num_tokens=97)
        scrapes.append(scrape(rig))

    def rate(first: int, last: int) -> float:
        cached, asked = (b - a for a, b in zip(scrapes[first], scrapes[last], strict=True))
        return cached / asked

    # The last token of a prompt is computed always.
    assert rate(0, 1) == 96 / 97
    assert rate(1, 2) == 0
    assert rate(0, 2) == (10 * 96) / (11 * 97)


def test_what_is_shown_over_http_is_what_the_cache_counts() -> None:
    with HttpRig() as rig:
        rig.call("PUT", STORAGE, {"hicache_storage_backend": "memory"})
        for seed in (1, 2, 1, 3):
            rig.run(seed)
        rig.drop_memory()
        rig.run(1)
        answer = rig.call("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        shown = read(answer.body.decode())
        counted = {
            f"{kind.value}_{outcome}": count
            for kind, stats in rig.cache.controller.stats.items()
            for outcome, count in stats.outcomes.items()
        }
        assert counted["prefetch_ok"] > 0
        assert {
            f"{kind}_{outcome}": value
            for (_, kind, outcome), value in shown["hicache_movement_outcomes"].items()
        } == counted
        evicted = rig.cache.counters["evicted_device_pages"] * 16
        assert shown["hicache_evicted_tokens"]["hicache_evicted_tokens_total", "device"] == evicted
        assert shown["hicache_storage_info"] == {("hicache_storage_info", "memory", "tiny"): 1}
