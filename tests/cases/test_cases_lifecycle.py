"""Acceptance cases: pre-emption, and what is found after an orderly end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from builders import PAGE, Rig, config_for, tokens
from scripted_parts import faulty_storage, injected, memory_storage
from test_two_ranks import Rank, run_both

from hicache.hashing import hash_pages
from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Fault, Gate, Verb
from hicache.types import PrefetchPolicy, WritePolicy

LAZY = [
    WritePolicy.WRITE_BACK,
    WritePolicy.WRITE_BEHIND,
    WritePolicy.WRITE_THROUGH_SELECTIVE,
]
WRITE_BACK = WritePolicy.WRITE_BACK
PROMPTS = [RadixKey(tokens(1, 2, 10 + tail)) for tail in range(5)]
"""A shared head and different tails."""


def test_a_request_comes_back_while_its_own_pages_are_being_written() -> None:
    """C074: its hit is on the device, where the write reads; a load of others runs beside it."""
    own, other = RadixKey(tokens(1, 2, 3, 4)), RadixKey(tokens(21, 22))
    with Rig() as rig:
        rig.insert(other)
        rig.settle()
        rig.evict_device()
        write = rig.engine.write_gates[0] = rig.gate()
        rig.insert(own, request_id="a", chunked=True)
        rig.cache.release_aborted_request("a")
        assert write.entered.wait(10)
        assert rig.cache.evict(8).num_freed == 0

        found = rig.match(own)
        rig.cache.inc_lock_ref(found.last_device_node)
        assert rig.cache.init_load_back(found).status is LoadStatus.NOTHING
        assert rig.hit(own) == (4, 0)
        load = rig.begin_load(other)
        rig.await_load(other, load, 0, rig.cache.ready_to_load_host_cache())
        write.open()
        rig.settle()
        rig.insert(own.extend(tokens(5)), request_id="a")
        rig.cache.dec_lock_ref(found.last_device_node)
        rig.settle()
        assert (rig.hit(own), rig.hit(other)) == ((4, 0), (2, 0))
        assert rig.cache.protected_size == 0


@pytest.mark.parametrize("host_pages", [16, 4])
@pytest.mark.parametrize("policy", LAZY)
def test_a_flush_and_a_close_leave_whole_prefixes_in_storage(
    policy: WritePolicy, host_pages: int
) -> None:
    """C109: some tails were evicted, the head never; also with a host below the device."""
    store = MemoryPages()
    config = config_for(host_pages, write_policy=policy, write_watermark=0, storage=injected())
    with Rig(config, device_pages=7, create_storage=memory_storage(store)) as rig:
        for key in PROMPTS[:2]:
            rig.insert(key)
        rig.cache.evict(1)
        rig.settle()
        for key in PROMPTS[2:]:
            rig.insert(key)
        assert rig.cache.flush() == 0
        rig.check()
        assert rig.cache.flush() == 0
    assert len(store._pages) >= 2 + 4
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store)) as rig:
        stored = [key for key in PROMPTS if rig.prefetch(key) and rig.hit(key) == (0, 3)]
    # Under write_through_selective what was used once is dropped when it is evicted.
    assert len(stored) == (4 if policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 5)


def test_without_a_flush_every_tail_in_storage_has_its_head_there() -> None:
    """C109: a close alone leaves no page that costs space and can never be hit."""
    store = MemoryPages()
    config = config_for(write_policy=WRITE_BACK, storage=injected())
    with Rig(config, device_pages=7, create_storage=memory_storage(store)) as rig:
        for key in PROMPTS:
            rig.insert(key)
        rig.cache.evict(2)
        rig.settle()
        assert rig.cache.close()
    num_stored = len(store._pages)
    assert num_stored > 0
    with Rig(config_for(storage=injected()), create_storage=memory_storage(store)) as rig:
        for key in PROMPTS:
            rig.prefetch(key)
        assert rig.cache.tree.host_size == num_stored * PAGE


def test_a_flush_ends_when_storage_takes_nothing_or_does_not_answer() -> None:
    """C109: it says how much is left."""
    gate = Gate()
    create = faulty_storage(
        MemoryPages(), faults={Verb.SET: [Fault.RAISE] * 2}, gates={Verb.SET: gate}
    )
    config = config_for(write_policy=WRITE_BACK, storage=injected())
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        rig.insert(PROMPTS[0])
        assert rig.cache.flush(timeout_seconds=0.02) == 3
        gate.open()
        rig.settle()
        assert rig.cache.flush() == 3
        rig.settle()
        assert rig.cache.flush() == 0


def test_a_flush_takes_as_many_steps_on_every_rank() -> None:
    """C109: what one of two ranks could not store is left on both, until the next flush."""

    def script(rank: Rank) -> object:
        rank.rig.insert(PROMPTS[0])
        return [rank.rig.cache.flush() for _ in range(2)]

    create = [
        faulty_storage(MemoryPages()),
        faulty_storage(MemoryPages(), faults={Verb.SET: [Fault.HOLE]}),
    ]
    assert run_both(script, *create) == [[3, 0], [3, 0]]


def test_without_a_store_a_flush_does_nothing() -> None:
    """C109."""
    with Rig(config_for(write_policy=WRITE_BACK)) as rig:
        rig.insert(PROMPTS[0])
        assert rig.cache.flush() == 0
        assert rig.host_pages.num_available == 16


def test_storage_is_asked_once_and_a_later_question_finds_what_was_on_its_way() -> None:
    """C083: instance 1 is still writing when instance 2 asks."""
    key = PROMPTS[0]
    store, write = MemoryPages(), Gate()
    config = config_for(storage=injected(), prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
    # Not one `with` inside the other: a rig that ends checks that no thread of any cache is left.
    writer = Rig(config, create_storage=faulty_storage(store, gates={Verb.SET: write}))
    reader = Rig(config, create_storage=memory_storage(store))
    writer.gates.append(write)
    writer.insert(key)
    writer.step_until(write.entered.is_set)
    assert reader.begin_prefetch(key, request_id="waiting")
    reader.settle()
    assert reader.cache.check_prefetch_progress("waiting")
    write.open()
    writer.settle()
    assert reader.prefetch(key, request_id="waiting") == len(key)
    assert reader.hit(key) == (0, 3)
    assert reader.cache.controller.num_prefetch_pages == 0
    assert writer.cache.close()
    with reader:
        reader.check()


HASH_PROGRAM = """
import sys
from hicache.hashing import hash_pages
from hicache.radix import RadixKey

for adapter in sys.argv[1].split(","):
    for salt in (None, "", "a"):
        key = RadixKey(range(64), extra_key=adapter or None, cache_salt=salt)
        print(adapter, salt, hash_pages(key.data, 16, key.namespace)[-1].hex())
"""


def lines_of_a_fresh_process(adapters: str, hash_seed: str | None) -> set[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    command = [sys.executable, "-c", HASH_PROGRAM, adapters]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_page_keys_depend_neither_on_the_process_nor_on_the_order_of_adapters() -> None:
    """C110, C113: and other weights, which have another name, give other keys."""
    runs = [
        lines_of_a_fresh_process(",x@1,y@1", None),
        lines_of_a_fresh_process("y@1,x@1,", "0"),
        lines_of_a_fresh_process("x@1,y@1,", "1"),
    ]
    assert runs[0] == runs[1] == runs[2]
    keys = {line.split()[-1] for line in runs[0]}
    assert len(keys) == 9
    newer = RadixKey(range(64), extra_key="x@2")
    assert hash_pages(newer.data, 16, newer.namespace)[-1].hex() not in keys


def test_page_keys_are_those_of_stored_pages() -> None:
    """C110: a change of the golden values means that nothing stored is found any more."""
    golden = {
        None: "2ed4d42143a6fc757f387ac0e0fcf0de99f5d71d1642f3aa73456d8d27c31506",
        "a": "e89d09d2c6fcebbb95c0d6281a33db202564fbca15af5e15edd7044206db37f0",
    }
    for salt, expected in golden.items():
        key = RadixKey(range(64), cache_salt=salt)
        assert hash_pages(key.data, 16, key.namespace)[-1].hex() == expected
