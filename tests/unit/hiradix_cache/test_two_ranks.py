"""Two ranks whose copies and stores differ: after every step their trees and free pages agree."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pytest
from builders import GUARD_SECONDS, PAGE, Rig, config_for, store_with, tokens
from scripted_parts import faulty_storage, injected

from hicache.config import PrefetchConfig
from hicache.errors import RanksLostError
from hicache.hiradix_cache import LoadStatus
from hicache.hiradix_cache.followed_tree import FollowedTree
from hicache.radix import RadixKey
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Fault, Gate, Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    """See `RankGroup`; `is_lost` is set by a script, on both ranks at the same place."""

    size = 2

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank
        self.num_calls = 0
        self.is_lost = False

    def agree(self, values: Sequence[int]) -> list[int]:
        if self.is_lost:
            raise RanksLostError("a third rank has died")
        self.num_calls += 1
        return self.meeting.agree(self.rank, values)


class Rank:
    """One rank in a thread of its own; `digests` is what its tree was after each step."""

    def __init__(self, ranks: OneOfTwo, create: CreateStorage, setup: Setup) -> None:
        self.number = ranks.rank
        self.ranks = ranks
        config = config_for(
            setup.host_pages[self.number],
            storage=injected(batch_pages=2),
            **{"prefetch_policy": PrefetchPolicy.WAIT_COMPLETE, **setup.options},
        )
        device_pages = setup.device_pages[self.number]
        self.rig = Rig(config, device_pages=device_pages, create_storage=create, ranks=ranks)
        self.digests: list[Digest] = []

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.rig.step()
            self.note()
            time.sleep(0.001)

    def settle(self) -> None:
        """Step until nothing is in flight, which is so on both ranks at once."""
        while self.rig.cache.num_in_flight:
            self.step()

    def note(self) -> None:
        """Note what the tree and the free lists are now."""
        rig = self.rig
        assert isinstance(rig.cache.tree, FollowedTree)
        nodes = sorted(
            (
                (node.start, node.key, node.device_pages is None, node.host_pages is None),
                (node.lock_ref, node.host_lock_ref, node.hit_count, node.persisted),
            )
            for node in rig.cache.tree.nodes()
        )
        self.digests.append(
            (
                nodes,
                rig.cache.tree.digest,
                rig.cache.num_in_flight,
                rig.device_pages.num_available,
                rig.host_pages.num_available,
            )
        )


class Setup(NamedTuple):
    """What ranks are built with; `options` as in `HiCacheConfig`."""

    device_pages: tuple[int, int]
    host_pages: tuple[int, int]
    options: Mapping[str, object]


CreateStorage: TypeAlias = "Callable[[HiCacheStorageConfig], HiCacheStorage]"


def run_both(
    script: Callable[[Rank], object],
    *create: CreateStorage,
    device_pages: tuple[int, int] = (8, 8),
    host_pages: tuple[int, int] = (16, 16),
    **options: object,
) -> list[object]:
    """Run `script` on both ranks at once; return its answers.

    What the script does to the cache must be the same on both, as it is for schedulers in step.
    `options` are as in `HiCacheConfig`.
    """
    setup = Setup(device_pages, host_pages, options)
    meeting = Meeting()
    groups = [OneOfTwo(meeting, rank) for rank in range(2)]

    def run(rank: int) -> tuple[object, list[Digest]]:
        try:
            one = Rank(groups[rank], create[rank], setup)
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


def stores(*keys: RadixKey) -> list[MemoryPages]:
    return [store_with(*keys) if keys else MemoryPages() for _ in range(2)]


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
    answers = run_both(script, *create, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    assert answers == [expected, expected]


@pytest.mark.parametrize("verb", Verb)
def test_a_close_that_one_rank_cannot_complete_ends_alike_on_both(verb: Verb) -> None:
    gates = [Gate(), Gate()]

    def script(rank: Rank) -> object:
        rig, gate = rank.rig, gates[rank.number]
        rig.gates.append(gate)
        if rank.number == 0:
            gate.open()
        rig.insert(RadixKey(tokens(11, 12)))
        rig.begin_prefetch(KEY)
        rank.step(30)
        assert rig.cache.num_in_flight == 1
        assert rig.cache.close(0.05) == (rank.number == 0)
        rank.note()
        gate.open()
        assert rig.cache.close(GUARD_SECONDS)
        rank.note()
        assert "ranks_diverged" not in rig.cache.counters
        return dict(rig.cache.counters)

    create = [
        faulty_storage(store, gates={verb: gate})
        for store, gate in zip(stores(KEY), gates, strict=True)
    ]
    first, second = run_both(script, *create)
    assert first == second


def test_a_deadline_is_over_when_it_is_on_the_rank_whose_clock_is_slowest() -> None:
    """Of a prefetch that is read, and of one for which there is no room; 1 s each."""
    gates = [Gate(), Gate()]

    def script(rank: Rank) -> object:
        rig = rank.rig
        rig.gates.append(gates[rank.number])
        rank.step()
        rig.begin_prefetch(KEY)
        rank.step(20)
        assert not rig.begin_prefetch(OTHER, request_id="q")
        rank.step()
        answers = []
        for advance_seconds in ((100.0, 0.5), (0.0, 0.6)):
            rig.clock.advance(advance_seconds[rank.number])
            rank.step(20)
            answers += [rig.cache.check_prefetch_progress(request) for request in ("p", "q")]
        return answers

    create = [
        faulty_storage(store, gates={Verb.GET: gate})
        for store, gate in zip(stores(KEY), gates, strict=True)
    ]
    budget = PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=4)
    answers = run_both(script, *create, prefetch_policy=PrefetchPolicy.TIMEOUT, prefetch=budget)
    assert answers == [[False, False, True, True]] * 2


def test_a_hit_that_one_rank_reads_slowly_is_computed_on_both() -> None:
    def script(rank: Rank) -> object:
        cache = rank.rig.cache
        cache.note_prefill(1000, 1.0)
        cache.controller.costs.note_read(1000, 10.0 if rank.number else 0.1)
        rank.step()
        rank.rig.begin_prefetch(KEY)
        rank.step(50)
        verdicts = {verdict.value: n for verdict, n in cache.controller.costs.verdicts.items()}
        return cache.pop_prefetch_loaded_tokens("p"), verdicts

    expected = (0, {"not_worth": 1})
    assert run_both(script, *map(faulty_storage, stores(KEY))) == [expected, expected]
