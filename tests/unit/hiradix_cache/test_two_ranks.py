"""Two ranks whose copies and stores differ: after every step their trees and free pages agree."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

from builders import GUARD_SECONDS, PAGE, Rig, config_for, store_with, tokens
from scripted_parts import faulty_storage, injected

from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey
from hicache.storage.memory import PageStore
from hicache.testing.faulty_storage import Fault, Gate, Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.storage import HiCacheStorage, HiCacheStorageConfig

KEY = RadixKey(tokens(1, 2, 3, 4))
OTHER = RadixKey(tokens(1, 2, 7, 8))

Digest: TypeAlias = tuple[object, ...]


class Meeting:
    """Where two threads meet once per step to take the minimum of their vectors."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=GUARD_SECONDS)
        self.vectors: list[Sequence[int]] = [(), ()]

    def agree(self, rank: int, values: Sequence[int]) -> list[int]:
        self.vectors[rank] = values
        self.barrier.wait()
        agreed = [min(pair) for pair in zip(*self.vectors, strict=True)]
        self.barrier.wait()
        return agreed


class OneOfTwo:
    """See `RankGroup`."""

    size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.num_calls = 0

    def agree(self, values: Sequence[int]) -> list[int]:
        self.num_calls += 1
        return self.meeting.agree(self.rank, values)


class Rank:
    """One rank in a thread of its own; `digests` is what its tree was after each step."""

    def __init__(self, ranks: OneOfTwo, create: CreateStorage, prefetch: PrefetchPolicy) -> None:
        self.number = ranks.rank
        config = config_for(prefetch_policy=prefetch, storage=injected(batch_pages=2))
        self.rig = Rig(config, create_storage=create, ranks=ranks)
        self.digests: list[Digest] = []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.rig.step()
            nodes = sorted(
                (node.start, node.key, node.device_pages is None, node.host_pages is None)
                for node in self.rig.cache.tree.nodes()
            )
            self.digests.append(
                (
                    nodes,
                    self.rig.cache.num_in_flight,
                    self.rig.device_pages.num_available,
                    self.rig.host_pages.num_available,
                )
            )
            time.sleep(0.001)


CreateStorage: TypeAlias = "Callable[[HiCacheStorageConfig], HiCacheStorage]"


def run_both(
    script: Callable[[Rank], object],
    *create: CreateStorage,
    prefetch: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
) -> list[object]:
    """Run `script` on both ranks at once; return its answers.

    What the script does to the cache must be the same on both, as it is for schedulers in step.
    """
    meeting = Meeting()
    groups = [OneOfTwo(meeting, rank) for rank in range(2)]

    def run(rank: int) -> tuple[object, list[Digest]]:
        try:
            one = Rank(groups[rank], create[rank], prefetch)
            with one.rig:
                answer = script(one)
        except BaseException:
            meeting.barrier.abort()
            raise
        return answer, one.digests

    with ThreadPoolExecutor(2) as threads:
        answers, digests = zip(*threads.map(run, range(2)), strict=True)
    assert digests[0] == digests[1]
    assert groups[0].num_calls == groups[1].num_calls
    return list(answers)


def stores(*keys: RadixKey) -> list[PageStore]:
    return [store_with(*keys) if keys else PageStore() for _ in range(2)]


def test_a_copy_that_is_slower_on_one_rank_is_published_on_both_at_once() -> None:
    """C066."""

    def script(rank: Rank) -> object:
        gate = rank.rig.gate()
        if rank.number == 1:
            rank.rig.engine.write_gates[1] = gate
        rank.rig.insert(KEY)
        rank.step(10)
        gate.open()
        rank.step(50)
        return rank.rig.cache.tree.host_size

    assert run_both(script, *map(faulty_storage, stores())) == [len(KEY), len(KEY)]


def test_a_copy_that_fails_on_one_rank_has_failed_on_both() -> None:
    def script(rank: Rank) -> object:
        rig = rank.rig
        if rank.number == 0:
            rig.engine.broken_writes.add(0)
        rig.insert(KEY)
        rank.step(30)
        rig.insert(OTHER)
        rank.step(30)
        rig.cache.evict(8)
        if rank.number == 1:
            rig.engine.broken_loads.add(1)
        assert rig.begin_load(OTHER).status is LoadStatus.QUEUED
        rig.cache.ready_to_load_host_cache()
        rank.step(30)
        return rig.hit(KEY), rig.hit(OTHER)

    expected = ((0, 2), (0, 4))
    assert run_both(script, *map(faulty_storage, stores())) == [expected, expected]


def test_a_hit_is_what_both_stores_hold() -> None:
    """C069: one store lacks the last pages."""

    def script(rank: Rank) -> object:
        rank.rig.begin_prefetch(KEY)
        rank.step(50)
        assert rank.rig.cache.check_prefetch_progress("p")
        return rank.rig.cache.pop_prefetch_loaded_tokens("p"), rank.rig.hit(KEY)

    full, short = store_with(KEY), store_with(KEY.prefix(2 * PAGE))
    expected = (2 * PAGE, (0, 2))
    assert run_both(script, *map(faulty_storage, (full, short))) == [expected, expected]


def test_a_read_that_fails_on_one_rank_ends_there_on_both() -> None:
    def script(rank: Rank) -> object:
        rank.rig.begin_prefetch(KEY)
        rank.step(50)
        return rank.rig.cache.pop_prefetch_loaded_tokens("p"), rank.rig.hit(KEY)

    sound, broken = stores(KEY)
    faults = {Verb.GET: [None, Fault.RAISE]}
    expected = (2 * PAGE, (0, 2))
    create = faulty_storage(sound), faulty_storage(broken, faults=faults)
    assert run_both(script, *create) == [expected, expected]


def test_memory_of_a_prefetch_that_was_ended_comes_back_on_both_ranks_at_once() -> None:
    """Between the end and the return of the slow read, an allocation must not differ by rank."""
    gate = Gate()

    def script(rank: Rank) -> object:
        rig = rank.rig
        rig.gates.append(gate)
        rig.begin_prefetch(KEY)
        rank.step(20)
        assert not rig.cache.check_prefetch_progress("p")
        rank.step(20)
        assert rig.cache.check_prefetch_progress("p")
        rig.insert(OTHER)
        rank.step(20)
        if rank.number == 1:
            gate.open()
        rank.step(50)
        return rig.cache.pop_prefetch_loaded_tokens("p"), rig.hit(OTHER)

    fast, slow = stores(KEY)
    create = faulty_storage(fast), faulty_storage(slow, gates={Verb.GET: gate})
    expected = (0, (4, 0))
    answers = run_both(script, *create, prefetch=PrefetchPolicy.BEST_EFFORT)
    assert answers == [expected, expected]
