"""The fault injector does what it says, and nothing when it is told nothing."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import pytest

from hicache.clock import ManualClock
from hicache.hashing import StorageNamespace
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.memory import MemoryStorage
from hicache.testing.faulty_storage import (
    Fault,
    FaultyStorage,
    Gate,
    InjectedFault,
    Verb,
    seeded_faults,
)
from hicache.testing.page_buffer import PageBuffer
from hicache.testing.storage_contract import StorageContract
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from hicache.storage.base import HiCacheStorage

LATER = 1e9
OK, MISS, FAILED = PageOutcome.OK, PageOutcome.MISS, PageOutcome.FAILED
KEYS = [PageHash(bytes([index]) * 32) for index in range(5)]
CHAIN = [b"", *KEYS[:-1]]
BUFFERS = [PageBuffer.holding(bytes([index]) * 100) for index in range(5)]
PAGES = [buffer.page for buffer in BUFFERS]


def make_inner() -> MemoryStorage:
    namespace = StorageNamespace(
        model="model",
        weights_revision="1",
        dtype="float16",
        layout="page_first",
        page_size=16,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )
    return MemoryStorage(
        HiCacheStorageConfig(namespace=namespace, page_bytes=100, clock=ManualClock())
    )


def make_filled(verb: Verb, *script: Fault | None) -> FaultyStorage:
    inner = make_inner()
    inner.batch_set(KEYS, CHAIN, PAGES, deadline=LATER)
    return FaultyStorage(inner, faults={verb: script})


class TestFaultyStorageWithoutFaults(StorageContract):
    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return FaultyStorage(MemoryStorage(config))


def test_the_nth_call_of_a_verb_meets_the_nth_fault_of_its_script() -> None:
    storage = make_filled(Verb.EXISTS, None, Fault.RAISE, Fault.SHORT)
    assert storage.batch_exists(KEYS) == 5
    assert storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER) == [PageOutcome.PRESENT] * 5
    with pytest.raises(InjectedFault, match="batch_exists"):
        storage.batch_exists(KEYS)
    assert storage.batch_exists(KEYS) == 4
    assert storage.batch_exists(KEYS) == 5


def test_a_call_that_raises_has_done_nothing() -> None:
    inner = make_inner()
    storage = FaultyStorage(inner, faults={Verb.SET: [Fault.RAISE]})
    with pytest.raises(InjectedFault):
        storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER)
    assert inner.batch_exists(KEYS) == 0


@pytest.mark.parametrize(("fault", "num_outcomes"), [(Fault.SHORT, 4), (Fault.LONG, 6)])
def test_an_answer_has_a_wrong_length(fault: Fault, num_outcomes: int) -> None:
    storage = make_filled(Verb.GET, fault)
    assert storage.batch_get(KEYS, CHAIN, PAGES, deadline=LATER) == [OK] * num_outcomes


def test_more_pages_are_found_than_were_asked_for() -> None:
    assert make_filled(Verb.EXISTS, Fault.LONG).batch_exists(KEYS) == 6


def test_an_answer_has_a_wrong_type() -> None:
    answers: list[object] = [
        make_filled(Verb.EXISTS, Fault.WRONG_TYPE).batch_exists(KEYS),
        make_filled(Verb.GET, Fault.WRONG_TYPE).batch_get(KEYS, CHAIN, PAGES, deadline=LATER),
        make_filled(Verb.SET, Fault.WRONG_TYPE).batch_set(KEYS, CHAIN, PAGES, deadline=LATER),
    ]
    assert all(isinstance(answer, str) for answer in answers)


def test_a_hole_in_a_read_is_a_hole_in_memory_too() -> None:
    storage = make_filled(Verb.GET, Fault.HOLE)
    targets = [PageBuffer(100) for _ in KEYS]
    outcomes = storage.batch_get(KEYS, CHAIN, [target.page for target in targets], deadline=LATER)
    assert outcomes == [OK, OK, MISS, OK, OK]
    payloads = [target.read() for target in targets]
    assert payloads.pop(2) != BUFFERS[2].read()
    assert payloads == [BUFFERS[index].read() for index in (0, 1, 3, 4)]


def test_a_hole_in_a_write_is_a_hole_in_the_store() -> None:
    inner = make_inner()
    storage = FaultyStorage(inner, faults={Verb.SET: [Fault.HOLE]})
    outcomes = storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER)
    assert outcomes == [OK, OK, FAILED, OK, OK]
    assert inner.batch_exists(KEYS) == 2
    assert inner.batch_exists(KEYS[3:]) == 2


def test_a_delay_passes_time_and_is_right_then() -> None:
    slept: list[float] = []
    storage = FaultyStorage(
        make_inner(), faults={Verb.GET: [Fault.DELAY]}, delay_seconds=2.5, sleep=slept.append
    )
    assert storage.batch_get(KEYS[:1], CHAIN[:1], PAGES[:1], deadline=LATER) == [MISS]
    assert slept == [2.5]


def test_a_gate_holds_a_call_at_its_entry_until_it_is_opened() -> None:
    inner, gate = make_inner(), Gate()
    storage = FaultyStorage(inner, gates={Verb.SET: gate})
    thread = threading.Thread(
        target=storage.batch_set, args=(KEYS, CHAIN, PAGES), kwargs={"deadline": LATER}
    )
    thread.start()
    assert gate.entered.wait(timeout=60)
    assert storage.batch_exists(KEYS) == 0
    gate.open()
    thread.join(timeout=60)
    assert storage.batch_exists(KEYS) == 5


def test_a_seed_decides_all_faults() -> None:
    first, second, other = (
        list(itertools.islice(seeded_faults(seed, rate=0.5), 200)) for seed in (7, 7, 8)
    )
    assert first == second != other
    assert set(first) == {None, *Fault}
    assert not any(itertools.islice(seeded_faults(7, rate=0.0), 200))
    one_kind = itertools.islice(seeded_faults(7, rate=1.0, faults=[Fault.SHORT]), 200)
    assert set(one_kind) == {Fault.SHORT}
