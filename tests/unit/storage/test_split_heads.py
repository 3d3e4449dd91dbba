"""A page in groups of heads is there when every group of it is, each with its own bytes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
)

from hicache.clock import ManualClock
from hicache.errors import ClosedError, ConfigError, StorageError
from hicache.storage.memory import MemoryPages
from hicache.storage.split_heads import SplitHeadsStorage
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.types import PageHash, PageOutcome

NUM_GROUPS = 2


class Rig:
    """Two groups over one pool."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        whole = make_config(clock)
        part = dataclasses.replace(whole, page_bytes=PAGE_BYTES // NUM_GROUPS)
        self.groups = [FlakyStorage(part) for _ in range(NUM_GROUPS)]
        self.storage = SplitHeadsStorage(self.groups, config=whole, pool_bytes=[PAGE_BYTES])

    def get(self, *, deadline: float = LATER) -> list[PageOutcome]:
        targets = [PageBuffer(PAGE_BYTES) for _ in KEYS]
        outcomes = self.storage.batch_get(KEYS, CHAIN, pages_in(targets), deadline=deadline)
        for outcome, key, target in zip(outcomes, KEYS, targets, strict=True):
            assert outcome is not OK or target.read() == payload(key)
        return outcomes

    def set(self, *, deadline: float = LATER) -> list[PageOutcome]:
        return self.storage.batch_set(KEYS, CHAIN, PAGES, deadline=deadline)

    def calls(self, group: int) -> list[tuple[str, int]]:
        """Verb and number of keys of each call to a group, since the last look."""
        found = [(verb, len(keys)) for verb, keys in self.groups[group].calls]
        self.groups[group].calls.clear()
        return found


@given(data=st.data())
def test_each_group_gets_its_part_of_every_pool_however_the_page_is_cut(
    data: st.DataObject,
) -> None:
    num_groups = data.draw(st.integers(1, 4))
    widths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    pool_bytes = [num_groups * width for width in widths]
    num_bytes = sum(pool_bytes)
    page = bytes(range(num_bytes))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_bytes - 1)))) if num_bytes > 1 else []
    sizes = [end - start for start, end in itertools.pairwise([0, *cuts, num_bytes])]

    expected: list[bytes] = []
    for group in range(num_groups):
        part, pool_start = b"", 0
        for width, whole in zip(widths, pool_bytes, strict=True):
            pool = page[pool_start : pool_start + whole]
            part += pool[group * width : (group + 1) * width]
            pool_start += whole
        expected.append(part)

    whole_config = dataclasses.replace(make_config(), page_bytes=num_bytes)
    part_config = dataclasses.replace(whole_config, page_bytes=sum(widths))
    groups = [FlakyStorage(part_config) for _ in range(num_groups)]
    storage = SplitHeadsStorage(groups, config=whole_config, pool_bytes=pool_bytes)
    source = PageBuffer.holding(page, *sizes)
    assert storage.batch_set(KEYS[:1], [b""], [source.page], deadline=LATER) == [OK]
    for backend, part in zip(groups, expected, strict=True):
        target = PageBuffer(len(part))
        assert backend.batch_get(KEYS[:1], CHAIN[:1], [target.page], deadline=LATER) == [OK]
        assert target.read() == part
    target = PageBuffer(*sizes[::-1])
    assert storage.batch_get(KEYS[:1], CHAIN[:1], [target.page], deadline=LATER) == [OK]
    assert target.read() == page


@given(held=st.tuples(*[st.sets(st.sampled_from(KEYS))] * NUM_GROUPS))
def test_a_prefix_is_as_long_as_in_the_group_that_has_least_of_it(
    held: tuple[set[PageHash], ...],
) -> None:
    rig = Rig()
    for group, keys in enumerate(held):
        for key in keys:
            part = payload(key)[group * 50 : group * 50 + 50]
            source = PageBuffer.holding(part)
            rig.groups[group].batch_set([key], [b""], [source.page], deadline=LATER)
    leading = [
        next((index for index, key in enumerate(KEYS) if key not in keys), len(KEYS))
        for keys in held
    ]
    shortest = min(leading)
    assert rig.storage.batch_exists(KEYS) == shortest
    outcomes = rig.get()
    assert outcomes[:shortest] == [OK] * shortest
    assert outcomes[shortest:] == [MISS, *[SKIPPED] * len(KEYS)][: len(KEYS) - shortest]


def test_no_group_is_asked_for_what_a_group_before_it_does_not_have() -> None:
    rig = Rig()
    rig.set()
    rig.groups[0].reads[KEYS[2]] = [MISS]
    rig.calls(1)
    assert rig.get() == [OK, OK, MISS, *[SKIPPED] * 5]
    assert rig.calls(1) == [("get", 2)]


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_page_of_which_a_part_did_not_fit_is_absent_and_the_next_write_brings_that_part(
    group: int,
) -> None:
    rig = Rig()
    rig.groups[group].writes[KEYS[3]] = [NO_SPACE]
    assert rig.set() == [OK, OK, OK, NO_SPACE, *[SKIPPED] * 4]
    assert rig.storage.batch_exists(KEYS) == 3
    assert rig.set() == [PRESENT, PRESENT, PRESENT, *[OK] * 5]
    assert rig.get() == [OK] * 8


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_damaged_part_ends_the_read_and_is_repaired_by_the_next_write(group: int) -> None:
    rig = Rig()
    rig.set()
    rig.groups[group].damage(KEYS[2])
    assert rig.get() == [OK, OK, CORRUPT, *[SKIPPED] * 5]
    assert rig.storage.batch_exists(KEYS) == 2
    assert rig.set() == [PRESENT, PRESENT, OK, *[PRESENT] * 5]
    assert rig.get() == [OK] * 8


def test_of_two_reasons_the_one_of_the_earlier_page_counts() -> None:
    rig = Rig()
    rig.set()
    rig.groups[0].reads[KEYS[5]] = [FAILED]
    rig.groups[1].reads[KEYS[1]] = [MISS]
    assert rig.get() == [OK, MISS, *[SKIPPED] * 6]


def test_a_deadline_that_passes_between_two_groups_is_a_timeout_of_all() -> None:
    clock = ManualClock()

    class Slow(FlakyStorage):
        def batch_get(self, *args: object, **kwargs: object) -> list[PageOutcome]:
            answer = super().batch_get(*args, **kwargs)  # type: ignore[arg-type]
            clock.advance(2.0)
            return answer

    rig = Rig(clock)
    rig.set()
    rig.groups[0].__class__ = Slow
    assert rig.get(deadline=1.0) == [TIMEOUT] * 8


def test_damage_to_several_parts_of_a_page_is_found_by_one_read() -> None:
    rig = Rig()
    rig.set()
    for group in rig.groups:
        group.damage(KEYS[2])
    assert rig.get() == [OK, OK, CORRUPT, *[SKIPPED] * 5]
    rig.set()
    assert rig.get() == [OK] * 8


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_group_that_raises_is_a_call_that_raises(group: int) -> None:
    rig = Rig()
    rig.set()
    rig.groups[group].error = OSError("no route")
    with pytest.raises(OSError, match="no route"):
        rig.get()
    with pytest.raises(OSError, match="no route"):
        rig.set()
    with pytest.raises(OSError, match="no route"):
        rig.storage.batch_exists(KEYS)


@pytest.mark.parametrize("answer", [None, [], [OK] * 7, ["ok"] * 8, 9])
@pytest.mark.parametrize("verb", ["batch_exists", "batch_get", "batch_set"])
def test_a_group_whose_answer_is_none_is_a_call_that_raises(
    verb: str, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.set()
    monkeypatch.setattr(rig.groups[1], verb, lambda *args, **kwargs: answer)
    calls: dict[str, Callable[[], object]] = {
        "batch_exists": lambda: rig.storage.batch_exists(KEYS),
        "batch_get": rig.get,
        "batch_set": rig.set,
    }
    with pytest.raises(StorageError, match="group 1 of heads: the answer has a wrong shape"):
        calls[verb]()


def test_pages_and_bytes_are_counted_whole() -> None:
    rig = Rig()
    rig.groups[1].writes[KEYS[7]] = [FAILED]
    rig.set()
    rig.get()
    stats = rig.storage.stats()
    assert stats.set_outcomes == {OK: 7, FAILED: 1}
    assert stats.get_outcomes == {OK: 7, MISS: 1}
    assert (stats.written_bytes, stats.read_bytes) == (7 * PAGE_BYTES, 7 * PAGE_BYTES)
    assert "group 1 of heads" in (stats.last_error or "")


def test_clear_reaches_every_group_and_counts_those_of_the_fullest() -> None:
    rig = Rig()
    rig.set()
    rig.groups[0].damage(KEYS[4])
    rig.get()
    assert rig.storage.clear() == 8
    assert [group.held for group in rig.groups] == [set(), set()]
    assert rig.storage.clear() == 0


@pytest.mark.parametrize("verb", ["clear", "close"])
def test_clear_and_close_reach_the_other_groups_when_one_raises(verb: str) -> None:
    rig = Rig()
    rig.groups[0].error = OSError("gone")
    with pytest.raises(StorageError, match=r"not every group .*group 0: OSError: gone"):
        getattr(rig.storage, verb)()
    assert (verb, 0) in rig.calls(1)


def test_nothing_is_asked_of_any_group_behind_close() -> None:
    rig = Rig()
    rig.storage.close()
    with pytest.raises(ClosedError):
        rig.storage.batch_exists(KEYS)
    assert [rig.calls(group) for group in range(NUM_GROUPS)] == [[("close", 0)]] * NUM_GROUPS


@pytest.mark.parametrize("pool_bytes", [[PAGE_BYTES - 1], [PAGE_BYTES, 2], [51, 49], []])
def test_pools_that_do_not_make_whole_groups_of_the_page_are_refused(
    pool_bytes: Sequence[int],
) -> None:
    with pytest.raises(ConfigError, match="cannot be split into 2 groups"):
        SplitHeadsStorage(
            [FlakyStorage(), FlakyStorage()], config=make_config(), pool_bytes=pool_bytes
        )


def test_groups_of_one_store_are_told_apart_by_their_namespaces() -> None:
    store = MemoryPages()
    whole = make_config()
    names = [dataclasses.replace(whole.namespace, shard=f"heads={group}") for group in range(2)]
    groups = [
        FlakyStorage(dataclasses.replace(whole, namespace=name, page_bytes=50)) for name in names
    ]
    for group in groups:
        group._store = store
    storage = SplitHeadsStorage(groups, config=whole, pool_bytes=[PAGE_BYTES])
    assert storage.batch_set(KEYS, CHAIN, PAGES, deadline=LATER) == [OK] * 8
    assert store.clear(names[0].digest) == store.clear(names[1].digest) == 8
