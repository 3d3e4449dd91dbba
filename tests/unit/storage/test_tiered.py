"""Several backends are as one that holds what they hold together."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from storage_fakes import (
    CHAIN,
    CORRUPT,
    FAILED,
    KEYS,
    LATER,
    MISS,
    NO_SPACE,
    OK,
    PAGE_BYTES,
    PAGES,
    PRESENT,
    SKIPPED,
    TIMEOUT,
    FlakyStorage,
    make_config,
    pages_in,
    payload,
    sources,
)

from hicache.clock import ManualClock
from hicache.errors import ClosedError, StorageError
from hicache.storage import StorageCapabilities
from hicache.storage.tiered import BackendTier, TieredStorage
from hicache.testing.faulty_storage import Fault, FaultyStorage, Verb
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage import HiCacheStorage
    from hicache.types import PageHash, PageOutcome


class Rig:
    """Tiers in memory; by default all are written and the last one is required."""

    def __init__(
        self,
        *tiers: FlakyStorage,
        required: set[int] | None = None,
        written: int = 9,
        max_fill_pages: int = 128,
        around: dict[int, HiCacheStorage] | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.tiers = tiers
        last = min(len(tiers), written) - 1
        self.storage = TieredStorage(
            [
                BackendTier(
                    name=f"t{index}",
                    storage=(around or {}).get(index, tier),
                    written=index < written,
                    required=index in ({last} if required is None else required),
                )
                for index, tier in enumerate(tiers)
            ],
            config=make_config(self.clock),
            max_fill_pages=max_fill_pages,
        )

    def get(self, part: slice = slice(8), *, deadline: float = LATER) -> list[PageOutcome]:
        self.targets = [PageBuffer(PAGE_BYTES) for _ in KEYS[part]]
        pages = pages_in(self.targets)
        outcomes = self.storage.batch_get(KEYS[part], CHAIN[part], pages, deadline=deadline)
        for outcome, key, target in zip(outcomes, KEYS[part], self.targets, strict=True):
            assert outcome is not OK or target.read() == payload(key)
        return outcomes

    def set(self, *, deadline: float = LATER) -> list[PageOutcome]:
        return self.storage.batch_set(KEYS, CHAIN, PAGES, deadline=deadline)


def holding(*keys: PageHash) -> FlakyStorage:
    storage = FlakyStorage()
    storage.hold(keys)
    return storage


# -- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_a_prefix_is_what_the_tiers_hold_together(seed: int) -> None:
    rng = random.Random(seed)
    each = [rng.sample(KEYS, rng.randint(0, 8)) for _ in range(rng.randint(1, 4))]
    rig = Rig(*[holding(*keys) for keys in each])
    union = {key for keys in each for key in keys}
    length = next((index for index, key in enumerate(KEYS) if key not in union), 8)
    assert rig.storage.batch_exists(KEYS) == length
    expected = [*[OK] * length, MISS, *[SKIPPED] * 8][:8]
    assert rig.get() == expected


def test_what_a_fast_tier_has_is_not_read_from_a_slow_one() -> None:
    rig = Rig(holding(*KEYS[:3], *KEYS[5:]), holding(*KEYS[:5]), holding(*KEYS))
    assert rig.storage.batch_exists(KEYS) == 8
    assert rig.get() == [OK] * 8
    calls = [[keys for verb, keys in tier.calls if verb == "get"] for tier in rig.tiers]
    assert calls == [[KEYS, KEYS[5:]], [KEYS[3:]], []]


@pytest.mark.parametrize("seed", range(30))
def test_a_lookup_asks_each_tier_no_more_than_once_for_every_page(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(*[holding(*rng.sample(KEYS, 4)) for _ in range(3)])
    num_found = rig.storage.batch_exists(KEYS)
    calls = [keys for tier in rig.tiers for _, keys in tier.calls]
    assert len(calls) <= 3 * (num_found + 1)
    assert all(calls)


def test_a_damaged_page_is_read_from_the_next_tier_and_repaired() -> None:
    fast, large = holding(*KEYS), holding(*KEYS)
    rig = Rig(fast, large)
    fast.damage(KEYS[2])
    assert rig.get() == [OK] * 8
    large.calls.clear()
    assert rig.get() == [OK] * 8
    assert large.calls == []


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.SHORT, Fault.LONG, Fault.WRONG_TYPE])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_tier_that_is_broken_costs_only_what_no_other_has(fault: Fault, broken: int) -> None:
    tiers = [holding(*KEYS[:2]), holding(*KEYS[:4]), holding(*KEYS[:6])]
    faulty = FaultyStorage(
        tiers[broken], faults={verb: [fault] * 9 for verb in (Verb.EXISTS, Verb.GET)}
    )
    rig = Rig(*tiers, around={broken: faulty}, max_fill_pages=0)
    length = 4 if broken == 2 else 6
    found = rig.storage.batch_exists(KEYS)
    # One page fewer found is a right answer for somebody who asked for more than there is.
    assert found in ({length, length + 1} if fault is Fault.SHORT else {length})
    if fault is not Fault.SHORT:
        assert f"t{broken}" in str(rig.storage.stats().last_error)
    assert rig.get() == [*[OK] * length, FAILED, *[SKIPPED] * (7 - length)]
    assert f"t{broken}" in str(rig.storage.stats().last_error)


def test_a_hole_in_the_middle_of_an_answer_is_read_from_the_next_tier() -> None:
    tiers = [holding(*KEYS), holding(*KEYS)]
    faulty = FaultyStorage(tiers[0], faults={Verb.GET: [Fault.HOLE]})
    rig = Rig(*tiers, around={0: faulty})
    assert rig.get() == [OK] * 8


def test_a_page_that_no_tier_has_is_missing_for_the_fastest_reason_that_is_not_a_miss() -> None:
    rig = Rig(holding(), holding(KEYS[0]), holding(KEYS[0]))
    rig.tiers[1].reads = {KEYS[0]: [CORRUPT]}
    rig.tiers[2].reads = {KEYS[0]: [FAILED]}
    assert rig.get() == [CORRUPT, *[SKIPPED] * 7]
    assert rig.get(slice(1, 8)) == [MISS, *[SKIPPED] * 6]


def test_no_tier_is_asked_at_or_after_the_deadline() -> None:
    clock = ManualClock()
    fast, large = holding(*KEYS[:2]), holding(*KEYS)
    slow = FaultyStorage(
        fast, faults={Verb.GET: [Fault.DELAY]}, delay_seconds=5.0, sleep=clock.advance
    )
    rig = Rig(fast, large, around={0: slow}, clock=clock)
    assert rig.get(deadline=5.0) == [*[OK] * 2, *[TIMEOUT] * 6]
    assert rig.get(deadline=5.0) == [TIMEOUT] * 8
    assert large.calls == []
    assert rig.get(deadline=5.1) == [OK] * 8


def test_a_call_raises_only_when_every_tier_that_it_concerns_did() -> None:
    fast, large = holding(*KEYS), holding(*KEYS)
    rig = Rig(fast, large, written=1)
    fast.error = OSError("first")
    with pytest.raises(OSError, match="first"):
        rig.set()
    assert rig.get() == [OK] * 8
    assert rig.storage.batch_exists(KEYS) == 8
    large.error = OSError("second")
    for call in (rig.get, lambda: rig.storage.batch_exists(KEYS)):
        with pytest.raises(OSError, match="first"):
            call()


# -- filling ---------------------------------------------------------------------------------


def test_what_was_read_is_in_every_faster_tier_afterwards_and_in_no_other() -> None:
    tiers = [holding(*KEYS[:2]), holding(), holding(*KEYS[2:6]), holding(KEYS[6])]
    rig = Rig(*tiers, written=2)
    assert rig.get() == [*[OK] * 7, MISS]
    held = [tier.held for tier in tiers]
    assert held == [set(KEYS[:7]), set(KEYS[2:7]), set(KEYS[2:7]), {KEYS[6]}]
    assert rig.storage.fill_outcomes() == {OK: 4 + 4 + 3}
    assert rig.get() == [*[OK] * 7, MISS]
    assert rig.storage.fill_outcomes() == {OK: 11}


def test_a_filled_page_is_behind_the_page_before_it() -> None:
    """So that a page is not there without those before it when one of them has no room."""
    fast = holding()
    rig = Rig(fast, holding(*KEYS))
    fast.writes = {KEYS[3]: [NO_SPACE]}
    assert rig.get() == [OK] * 8
    assert fast.held == set(KEYS[:3])
    assert rig.storage.fill_outcomes() == {OK: 3, NO_SPACE: 1, SKIPPED: 4}


@pytest.mark.parametrize("seed", range(30))
def test_tiers_are_told_what_each_page_was_chained_from(seed: int) -> None:
    """Whatever that is: ranks that share a prefix do not ask for the page before one."""
    rng = random.Random(seed)
    rig = Rig(*[holding(*rng.sample(KEYS, 4)) for _ in range(3)], holding(*KEYS))
    parents = [rng.randbytes(32) for _ in KEYS]
    targets = sources(KEYS)
    assert rig.storage.batch_get(KEYS, parents, pages_in(targets), deadline=LATER) == [OK] * 8
    asked_or_given = set.union(*(tier.chained for tier in rig.tiers))
    assert asked_or_given == set(zip(KEYS, parents, strict=True))
    assert rig.tiers[0].held == set(KEYS)


@pytest.mark.parametrize("bound", range(8))
def test_no_more_pages_are_filled_than_may_be(bound: int) -> None:
    had = [KEYS[2], KEYS[5]]
    others = [key for key in KEYS if key not in had]
    fast, large = holding(*had), holding(*others)
    assert Rig(fast, large, max_fill_pages=bound).get() == [OK] * 8
    assert fast.held == {*had, *others[:bound]}


@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.SHORT, Fault.WRONG_TYPE])
def test_a_failed_fill_is_counted_and_no_error(fault: Fault) -> None:
    fast = holding()
    faulty = FaultyStorage(fast, faults={Verb.SET: [fault]})
    rig = Rig(fast, holding(*KEYS), around={0: faulty})
    assert rig.get() == [OK] * 8
    assert rig.storage.fill_outcomes() == {FAILED: 8}


def test_a_tier_that_could_not_be_read_is_not_filled_in_the_same_call() -> None:
    fast = holding()
    fast.error = OSError("gone")
    rig = Rig(fast, holding(*KEYS))
    assert rig.get() == [OK] * 8
    assert [verb for verb, _ in fast.calls] == ["get"]


def test_a_fill_takes_no_time_from_the_read() -> None:
    fast, large = holding(*KEYS[:2]), holding(*KEYS)
    rig = Rig(fast, large)
    rig.get()
    assert [verb for verb, _ in fast.calls] == ["get", "set"]
    assert [verb for verb, _ in large.calls] == ["get"]


# -- writing ---------------------------------------------------------------------------------


def test_a_page_is_written_to_as_many_tiers_as_are_to_be() -> None:
    for written in (1, 2, 3):
        tiers = [holding(), holding(), holding()]
        assert Rig(*tiers, written=written).set() == [OK] * 8
        assert [len(tier.held) for tier in tiers] == [8] * written + [0] * (3 - written)


@pytest.mark.parametrize("seed", range(60))
def test_a_page_is_good_exactly_when_every_required_tier_has_it_and_its_parent(seed: int) -> None:
    rng = random.Random(seed)
    tiers = [FlakyStorage() for _ in range(3)]
    for tier in tiers:
        tier.hold(rng.sample(KEYS, 2))
        others = [key for key in KEYS if key not in tier.held]
        tier.writes = {key: [rng.choice([FAILED, NO_SPACE])] for key in rng.sample(others, 2)}
    had = [tier.held for tier in tiers]
    required = set(rng.sample(range(3), rng.randint(1, 3)))
    rig = Rig(*tiers, required=required)
    outcomes = rig.set()
    lost = set()
    for index, (key, outcome) in enumerate(zip(KEYS, outcomes, strict=True)):
        # The answers of one tier say nothing of a page whose parent another tier lacks.
        everywhere = all(key in tiers[number].held for number in required)
        behind = index > 0 and KEYS[index - 1] in lost
        assert outcome.good == (everywhere and not behind)
        if outcome.good:
            assert (outcome is PRESENT) == all(key in had[number] for number in required)
        else:
            lost.add(key)
            assert (outcome is SKIPPED) == behind
    assert rig.storage.stats().written_bytes == outcomes.count(OK) * PAGE_BYTES


def test_a_tier_that_is_not_required_may_fail_in_any_way() -> None:
    for fault in (Fault.RAISE, Fault.SHORT, Fault.LONG, Fault.WRONG_TYPE, Fault.HOLE):
        fast, large = holding(), holding()
        faulty = FaultyStorage(fast, faults={Verb.SET: [fault]})
        rig = Rig(fast, large, around={0: faulty})
        assert rig.set() == [OK] * 8
        assert large.held == set(KEYS)
        assert str(rig.storage.stats().last_error).startswith("StorageError: tier t0: ")


def test_a_required_tier_that_is_broken_fails_the_write_and_the_others_keep_it() -> None:
    fast, large = holding(), holding()
    large.error = OSError("gone")
    rig = Rig(fast, large)
    assert rig.set() == [FAILED, *[SKIPPED] * 7]
    assert fast.held == set(KEYS)
    assert rig.storage.stats().last_error == "StorageError: tier t1: OSError: gone"
    large.error = None
    assert rig.set() == [OK] * 8


# -- all the rest ----------------------------------------------------------------------------


def test_clear_clears_what_it_can_and_names_every_tier_that_it_could_not() -> None:
    tiers = [holding(*KEYS[:2]), holding(*KEYS[:5]), holding(*KEYS)]
    rig = Rig(*tiers)
    tiers[0].error = tiers[2].error = OSError("gone")
    with pytest.raises(StorageError, match=r"cleared \(t0: OSError: gone; t2: OSError: gone\)"):
        rig.storage.clear()
    assert [len(tier.held) for tier in tiers] == [2, 0, 8]
    tiers[0].error = tiers[2].error = None
    assert rig.storage.clear() == 8


def test_close_closes_what_it_can_and_names_every_tier_that_it_could_not() -> None:
    tiers = [holding(), holding()]
    rig = Rig(*tiers)
    tiers[0].error = OSError("gone")
    with pytest.raises(StorageError, match=r"closed \(t0: OSError: gone\)"):
        rig.storage.close()
    with pytest.raises(ClosedError):
        tiers[1].batch_exists([])
    with pytest.raises(ClosedError):
        rig.storage.batch_exists([])
    tiers[0].error = None
    rig.storage.close()


class PinningStorage(FlakyStorage):
    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        super().register_memory(regions)
        self.pinned = list(regions)


def test_memory_is_registered_with_every_tier() -> None:
    tiers = [PinningStorage(), PinningStorage()]
    rig = Rig(*tiers)
    rig.storage.register_memory([(4096, 100)])
    assert [tier.pinned for tier in tiers] == [[(4096, 100)]] * 2


class DurableStorage(FlakyStorage):
    @property
    def capabilities(self) -> StorageCapabilities:
        return StorageCapabilities(durable=True, shared_between_processes=True)


def test_what_one_required_tier_can_do_all_can() -> None:
    yes = DurableStorage().capabilities
    no = FlakyStorage().capabilities
    tiers = FlakyStorage(), DurableStorage()
    assert Rig(*tiers, required={1}).storage.capabilities == yes
    assert Rig(*tiers, required={0, 1}).storage.capabilities == yes
    assert Rig(*tiers, required={0}).storage.capabilities == no


class SlowToBeginStorage(FlakyStorage):
    @property
    def capabilities(self) -> StorageCapabilities:
        return StorageCapabilities(durable=False, shared_between_processes=False, call_bytes=7)


def test_calls_are_as_large_as_any_required_tier_wants_them() -> None:
    usual = FlakyStorage().capabilities.call_bytes
    tiers = SlowToBeginStorage(), FlakyStorage()
    assert Rig(*tiers, required={0}).storage.capabilities.call_bytes == 7
    assert Rig(*tiers, required={0, 1}).storage.capabilities.call_bytes == usual > 7
