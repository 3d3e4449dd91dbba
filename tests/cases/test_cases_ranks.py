"""Acceptance cases: ranks that must agree, with real processes or threads as ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from builders import PAGE, store_with, tokens
from rank_processes import PerRank, RankProcesses
from scripted_parts import faulty_storage
from test_two_ranks import Rank, run_both, stores

from hicache.errors import RanksDivergedError
from hicache.hiradix_cache import LoadStatus
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Gate, Verb
from hicache.types import PrefetchPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = RadixKey(tokens(1, 2, 3, 4))
IDLE_PUMPS = 10_000
WATCHDOG_SECONDS = 20.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(2, tmp_path_factory.mktemp("ranks")) as processes:
        yield processes


def test_a_slow_peer_holds_the_others_back_and_nothing_piles_up(ranks: RankProcesses) -> None:
    """C012: 10,000 idle pumps; the slow rank pauses ten times, and the other waits for it."""
    answers = ranks.run(
        "rank_scenarios:idle_pumps", count=IDLE_PUMPS, pause_seconds=PerRank((0.0, 0.05))
    )
    for agreements, grown_bytes, seconds in answers:
        assert agreements == IDLE_PUMPS
        assert grown_bytes < 4 << 20
        assert seconds >= 10 * 0.05


@pytest.mark.parametrize("policy", PrefetchPolicy)
def test_every_rank_meets_the_others_once_in_every_step(policy: PrefetchPolicy) -> None:
    """C065: rank 1 has one device page less; five prefetches wait through 50 steps."""
    keys = [RadixKey(tokens(first, first + 1)) for first in range(10, 20, 2)]
    gate = Gate()

    def script(rank: Rank) -> object:
        rank.rig.gates.append(gate)
        for number, key in enumerate(keys):
            assert rank.rig.begin_prefetch(key, request_id=f"p{number}")
        began, before = time.monotonic(), rank.ranks.num_calls
        for number in range(50):
            if number == 30:
                gate.open()
            # Asking is the scheduler's affair; that only some have ended must not matter.
            answers = [rank.rig.cache.check_prefetch_progress(f"p{n}") for n in range(len(keys))]
            rank.step()
            assert rank.ranks.num_calls == before + number + 1
        assert time.monotonic() - began < WATCHDOG_SECONDS
        rank.settle()
        return answers

    create = [faulty_storage(store_with(*keys), gates={Verb.GET: gate}) for _ in range(2)]
    first, second = run_both(script, *create, device_pages=(8, 7), prefetch_policy=policy)
    assert first == second


def test_a_slower_copy_makes_no_rank_return_before_the_agreement(ranks: RankProcesses) -> None:
    """C066: real ranks under random faults; each has taken part in equally many agreements."""
    trails = ranks.run("rank_scenarios:random_calls", seed=66, steps=60)
    assert trails[0].num_agreements == trails[1].num_agreements
    assert trails[0].digests == trails[1].digests


def test_a_page_less_on_one_rank_splits_no_tree(ranks: RankProcesses) -> None:
    """C067: backups and loads near the limit, H=16 beside H=15 and a device page less."""
    trails = ranks.run(
        "rank_scenarios:near_the_limit",
        host_pages=PerRank((16, 15)),
        device_pages=PerRank((7, 8)),
    )
    assert trails[0].digests == trails[1].digests
    assert trails[0].answer == trails[1].answer


def test_a_page_that_one_rank_holds_is_missing_on_both_and_comes_back() -> None:
    """C067: a load is had by both ranks or by none, and a failed one keeps nothing."""

    def script(rank: Rank) -> object:
        rig = rank.rig
        rig.insert(KEY)
        rank.settle()
        rig.evict_device()
        if rank.number == 1:
            rig.request_pages.append(rig.alloc_device(5))
        rank.step()
        assert rig.device_pages.num_available == 3
        statuses = [rig.begin_load(KEY).status]
        rank.step(5)
        assert rig.device_pages.num_available == 3
        if rank.number == 1:
            rig.device_pages.free(rig.request_pages.pop())
        rank.step()
        statuses.append(rig.begin_load(KEY).status)
        rig.cache.ready_to_load_host_cache()
        rank.settle()
        assert rig.hit(KEY) == (4, 0)
        return statuses

    expected = [LoadStatus.NO_MEMORY, LoadStatus.QUEUED]
    assert run_both(script, *map(faulty_storage, stores())) == [expected, expected]


def test_token_lists_of_unequal_length_are_a_clean_error_on_both() -> None:
    """C068: the vector has one length whatever the request's, and the trees are found to differ."""

    def script(rank: Rank) -> object:
        key = KEY if rank.number else KEY.prefix(2 * PAGE)
        assert rank.rig.begin_prefetch(key)
        with pytest.raises(RanksDivergedError, match="what their trees hold"):
            rank.step()
        rank.rig.check()
        return rank.rig.cache.num_in_flight

    assert run_both(script, *map(faulty_storage, stores(KEY))) == [0, 0]


def test_what_was_promised_to_both_ranks_is_not_evicted_on_one(ranks: RankProcesses) -> None:
    """C069: one rank's store lacks page 2 and what follows; the hit ends before it on both."""
    trails = ranks.run("rank_scenarios:hit", missing_pages=PerRank((0, 2)))
    assert [trail.answer for trail in trails] == [(2 * PAGE, (0, 2))] * 2
    assert trails[0].digests == trails[1].digests
