"""What storage did not take is tried again, by itself, ever less often while it fails."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from builders import Rig, config_for, tokens
from scripted_parts import faulty_storage, injected

from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Fault, Gate, Verb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.radix import RadixNode

KEYS = [RadixKey(tokens(page, page + 100)) for page in range(4)]
FIRST_PAUSE = 64


def rig_with(*faults: Fault | None, endless: Fault | None = None) -> Rig:
    """A cache whose store fails as told, then works, or fails on and on."""
    plan: Iterable[Fault | None] = faults
    if endless is not None:
        plan = itertools.chain(faults, itertools.repeat(endless))
    create = faulty_storage(MemoryPages(), faults={Verb.SET: plan})
    return Rig(config_for(storage=injected()), create_storage=create)


def is_persisted(node: RadixNode) -> bool:
    """Looked up anew each time, which a type checker does not expect of an attribute."""
    return node.persisted


def num_retries(rig: Rig) -> int:
    return rig.cache.counters["persist_retries"]


def step(rig: Rig, count: int) -> None:
    """Take so many scheduler steps, and let what they begin come to its end in each."""
    for _ in range(count):
        rig.cache.check_hicache_events()


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.HOLE, Fault.SHORT])
def test_a_failed_persist_is_tried_again_without_another_use(fault: Fault) -> None:
    with rig_with(fault) as rig:
        node = rig.insert(KEYS[0]).node
        rig.settle()
        assert not is_persisted(node)
        step(rig, FIRST_PAUSE)
        rig.settle()
        assert is_persisted(node)
        assert num_retries(rig) == 1
        rig.drop_memory()
        assert rig.prefetch(KEYS[0]) == len(KEYS[0])


def test_while_storage_fails_the_pauses_double() -> None:
    with rig_with(endless=Fault.RAISE) as rig:
        rig.insert(KEYS[0])
        rig.settle()
        seen = []
        for _ in range(4):
            before, steps = num_retries(rig), 0
            while num_retries(rig) == before:
                step(rig, 1)
                steps += 1
            rig.settle()
            seen.append(steps)
        assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(seen)), seen


def test_when_storage_takes_something_all_that_was_left_out_follows_at_once() -> None:
    outage = [Fault.RAISE] * (len(KEYS) + 2)
    with rig_with(*outage) as rig:
        nodes = []
        for key in KEYS:
            rig.evict_device()
            nodes.append(rig.insert(key).node)
            rig.settle()
        assert not any(node.persisted for node in nodes)
        step(rig, 8 * FIRST_PAUSE)
        rig.settle()
        step(rig, 8)
        rig.settle()
        assert all(node.persisted for node in nodes)


def test_a_run_that_is_gone_is_not_tried_again() -> None:
    with rig_with(Fault.RAISE) as rig:
        rig.insert(KEYS[0])
        rig.settle()
        rig.drop_memory()
        step(rig, 4 * FIRST_PAUSE)
        assert num_retries(rig) == 0
        assert rig.cache.num_in_flight == 0


def test_a_reset_and_a_detach_forget_what_was_left_out() -> None:
    for forget in ("reset", "detach"):
        with rig_with(Fault.RAISE) as rig:
            rig.insert(KEYS[0])
            rig.settle()
            if forget == "reset":
                rig.cache.reset()
            else:
                rig.cache.detach_storage_backend()
            step(rig, 4 * FIRST_PAUSE)
            assert num_retries(rig) == 0


def test_what_found_the_queue_full_is_persisted_when_there_is_room() -> None:
    gate = Gate()
    create = faulty_storage(MemoryPages(), gates={Verb.SET: gate})
    config = config_for(storage=injected(max_inflight_persist_operations=1))
    with Rig(config, create_storage=create) as rig:
        rig.gates.append(gate)
        nodes = []
        for key in KEYS[:3]:
            nodes.append(rig.insert(key).node)
            rig.step_until(lambda: not rig.cache.controller.writes)
        assert rig.cache.counters["persist_queue_full"] == 2
        gate.open()
        rig.settle()
        for _ in range(4):
            step(rig, FIRST_PAUSE)
            rig.settle()
        assert all(node.persisted for node in nodes)
