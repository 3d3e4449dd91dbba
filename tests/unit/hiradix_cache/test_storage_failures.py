"""A store that raises, lies, rots or hangs costs hits, never bytes, pages or workers."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
from builders import GEOMETRY, PAGE, Rig, config_for, store_with, tokens
from scripted_parts import GateAt, faulty_storage, injected, memory_storage
from storage_damage import flip

from hicache.config import StorageConfig
from hicache.hiradix_cache import persisting
from hicache.radix import CopyKind, RadixKey
from hicache.storage.memory import MemoryPages
from hicache.storage.page_store import list_pages, verify_pages
from hicache.testing.faulty_storage import Fault, Gate, Verb
from hicache.types import PageOutcome, PrefetchPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.radix import RadixNode

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(11, 12))
BREAKING = [Fault.RAISE, Fault.SHORT, Fault.LONG, Fault.WRONG_TYPE, Fault.HOLE]
WAIT = PrefetchPolicy.WAIT_COMPLETE


def file_storage(path: Path) -> StorageConfig:
    return StorageConfig(
        backend="file",
        extra_config={"path": str(path)},
        model_name="model",
        weights_revision="1",
    )


def is_persisted(node: RadixNode) -> bool:
    """Whether storage is believed to hold `node`; asked anew each time."""
    return node.persisted


@pytest.mark.parametrize("fault", BREAKING)
def test_a_persist_that_fails_is_not_believed_and_the_next_one_works(fault: Fault) -> None:
    """C022."""
    store = MemoryPages()
    create = faulty_storage(store, faults={Verb.SET: [fault]})
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        a = rig.insert(KEY).node
        rig.settle()
        assert not is_persisted(a)
        stats = rig.cache.controller.stats[CopyKind.PERSIST]
        assert stats.outcomes["failed"] == (1 if fault is Fault.HOLE else 4)
        b = rig.insert(OTHER).node
        rig.settle()
        assert is_persisted(b)
        rig.insert(KEY)
        rig.settle()
        assert is_persisted(a)
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.prefetch(OTHER) == len(OTHER)


@pytest.mark.parametrize("verb", [Verb.EXISTS, Verb.GET])
@pytest.mark.parametrize("fault", BREAKING)
def test_a_prefetch_that_fails_is_a_shorter_hit_and_the_next_one_works(
    verb: Verb, fault: Fault
) -> None:
    """C022."""
    create = faulty_storage(store_with(KEY), faults={verb: [fault]})
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.prefetch(KEY)
        # A query may rightly find fewer pages; everything else fails as a whole.
        expected = {
            (Verb.EXISTS, Fault.SHORT): 3,
            (Verb.EXISTS, Fault.HOLE): 2,
            (Verb.GET, Fault.HOLE): 2,
        }.get((verb, fault), 0)
        assert rig.hit(KEY) == (0, expected)
        assert rig.host_pages.num_available == 16 - expected
        assert rig.prefetch(KEY) == (4 - expected) * PAGE
        assert rig.hit(KEY) == (0, 4)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_page_that_rots_in_storage_ends_the_hit_and_is_repaired(
    tmp_path: Path, damage: str
) -> None:
    """C061, C062: never wrong bytes, and the next persist replaces the page."""
    config = config_for(storage=file_storage(tmp_path))
    with Rig(config) as rig:
        rig.insert(KEY)
        rig.settle()
        _, hashes = (
            rig.cache.tree.prior_hash(rig.match(KEY).last_host_node),
            (rig.cache.tree.page_hashes(rig.match(KEY).last_host_node)),
        )
        (page,) = (page for page in list_pages(str(tmp_path)) if page.key == hashes[2])
        if damage == "cut":
            os.truncate(page.file, page.offset + page.num_bytes - 1)
        else:
            flip(page, -1)
        rig.drop_memory()
        assert rig.prefetch(KEY) == 2 * PAGE
        assert rig.hit(KEY) == (0, 2)
        rig.insert(KEY)
        rig.settle()
        assert all(page.outcome is PageOutcome.OK for page in verify_pages(str(tmp_path)))
        rig.drop_memory()
        assert rig.prefetch(KEY) == len(KEY)


def test_a_store_that_is_full_fails_the_persist_and_nothing_else() -> None:
    """C080: two pages fit."""
    storage = injected(extra_config={"max_bytes": 2 * GEOMETRY.page_bytes})
    with Rig(config_for(storage=storage)) as rig:
        rig.insert(KEY)
        rig.settle()
        stats = rig.cache.controller.stats[CopyKind.PERSIST]
        assert stats.outcomes == {"ok": 2, "no_space": 1, "skipped": 1}
        rig.drop_memory()
        assert rig.prefetch(KEY) == 2 * PAGE


def test_what_storage_lacks_of_a_host_prefix_is_written_at_the_next_use() -> None:
    """C030: the host has 6 pages, storage the first 2."""
    key = RadixKey(tokens(1, 2, 3, 4, 5, 6))
    store = store_with(key.prefix(2 * PAGE))
    create = faulty_storage(store, faults={Verb.SET: [Fault.RAISE]})
    with Rig(config_for(storage=injected()), create_storage=create) as rig:
        rig.insert(key)
        rig.settle()
        rig.insert(key)
        rig.settle()
        stats = rig.cache.controller.stats[CopyKind.PERSIST]
        assert stats.outcomes == {"failed": 6, "present": 2, "ok": 4}


def num_live_objects() -> int:
    """Return how many objects of the package are alive."""
    gc.collect()
    return sum(str(type(one).__module__).startswith("hicache") for one in gc.get_objects())


def test_persists_beyond_the_bound_are_left_out_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C015: 10,000 pages, of which no more is remembered than is meant to be."""
    monkeypatch.setattr(persisting, "_MAX_LEFT_OUT", 32)
    gate = Gate()
    storage = injected(max_inflight_persist_operations=3)
    create = faulty_storage(MemoryPages(), gates={Verb.SET: gate})
    keys = [RadixKey(tokens(*range(first, first + 4))) for first in range(0, 10_000, 4)]
    num_live: list[int] = []
    with Rig(config_for(storage=storage), create_storage=create) as rig:
        rig.gates.append(gate)
        for number, key in enumerate(keys):
            while rig.device_pages.num_available < 4:
                rig.cache.evict(4)
                rig.cache.check_hicache_events()
            rig.insert(key)
            rig.cache.check_hicache_events()
            assert rig.cache.num_in_flight <= 3 + 8
            if number in (300, len(keys) - 1):
                rig.step_until(lambda: rig.cache.num_in_flight == 3)
                num_live.append(num_live_objects())
        assert num_live[1] <= num_live[0] + 20, num_live
        assert rig.cache.counters["persist_queue_full"] > 100
        gate.open()
        rig.settle()
        node = rig.insert(keys[-1]).node
        rig.settle()
        assert is_persisted(node)


def test_a_persist_keeps_its_host_pages_until_storage_has_let_go() -> None:
    """C045 (b): meanwhile the request ends, and others fill both memories."""
    gate = Gate()
    store = MemoryPages()
    create = faulty_storage(store, gates={Verb.SET: gate})
    with Rig(config_for(8, storage=injected()), create_storage=create) as rig:
        rig.gates.append(gate)
        rig.insert(KEY)
        rig.step_until(gate.entered.is_set)
        for number in range(20):
            rig.insert(RadixKey(tokens(100 + number, 200 + number)))
            rig.step(3)
        gate.open()
        rig.settle()
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store)) as rig:
        assert rig.prefetch(KEY) == len(KEY)
        assert rig.hit(KEY) == (0, 4)


def test_a_read_that_hangs_frees_the_request_at_its_deadline_and_the_pages_at_its_return() -> None:
    """C048: another prefetch runs to its end meanwhile."""
    gate, third = GateAt(0), RadixKey(tokens(21, 22))
    create = faulty_storage(store_with(KEY, OTHER, third), gates={Verb.GET: gate})
    config = config_for(storage=injected(call_timeout_seconds=5.0), prefetch_policy=WAIT)
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.begin_prefetch(KEY)
        rig.step_until(gate.entered.is_set)
        assert not rig.cache.check_prefetch_progress("p")
        assert rig.begin_prefetch(OTHER, request_id="q")
        rig.step_until(lambda: rig.cache.check_prefetch_progress("q"))
        assert rig.cache.pop_prefetch_loaded_tokens("q") == len(OTHER)
        assert rig.hit(OTHER) == (0, 2)
        assert not rig.cache.check_prefetch_progress("p")
        rig.clock.advance(8.0)
        rig.step(2)
        assert rig.cache.check_prefetch_progress("p")
        assert rig.cache.pop_prefetch_loaded_tokens("p") == 0
        assert rig.tier.num_abandoned_calls == 1
        assert rig.host_pages.num_available == 16 - 4 - 2
        gate.open()
        rig.settle()
        assert rig.hit(KEY) == (0, 0)
        assert rig.host_pages.num_available == 16 - 2
        assert rig.prefetch(third) == len(third)


def test_the_late_answer_of_a_query_that_was_given_up_changes_nothing() -> None:
    """Its first batch is answered, its second hangs; then the same pages are prefetched anew."""
    query, read = GateAt(1), GateAt(1)
    create = faulty_storage(store_with(KEY), gates={Verb.EXISTS: query, Verb.GET: read})
    config = config_for(storage=injected(batch_pages=2), prefetch_policy=WAIT)
    with Rig(config, create_storage=create) as rig:
        rig.gates += [query, read]
        rig.begin_prefetch(KEY)
        rig.step_until(query.entered.is_set)
        rig.clock.advance(1000.0)
        rig.step_until(lambda: rig.cache.check_prefetch_progress("p"))
        assert rig.hit(KEY) == (0, 0)
        rig.begin_prefetch(KEY)
        rig.step_until(read.entered.is_set)
        query.open()
        rig.step_until(lambda: rig.tier.num_abandoned_calls == 0)
        rig.step(3)
        assert not rig.cache.check_prefetch_progress("p")
        assert rig.host_pages.num_available == 12
        read.open()
        rig.settle()
        assert rig.hit(KEY) == (0, 4)


def test_a_persist_that_hangs_holds_up_no_other() -> None:
    gate = GateAt(0)
    create = faulty_storage(MemoryPages(), gates={Verb.SET: gate})
    with Rig(config_for(storage=injected(num_workers=1)), create_storage=create) as rig:
        rig.gates.append(gate)
        hung = rig.insert(KEY).node
        rig.step_until(gate.entered.is_set)
        other = rig.insert(OTHER).node
        rig.clock.advance(1000.0)
        rig.step_until(lambda: other.persisted)
        assert not is_persisted(hung)
        assert rig.cache.num_in_flight == 1
        gate.open()
        rig.settle()
        assert not is_persisted(hung)
        rig.insert(KEY)
        rig.settle()
        assert is_persisted(hung)


def test_a_busy_event_loop_does_not_starve_the_storage_threads() -> None:
    """C103."""
    keys = [RadixKey(tokens(page)) for page in range(200)]
    with Rig(config_for(256, storage=injected()), device_pages=256) as rig:
        for key in keys:
            rig.insert(key)
        while rig.cache.num_in_flight:
            rig.cache.check_hicache_events()
        assert rig.cache.controller.stats[CopyKind.PERSIST].outcomes == {"ok": 200}
