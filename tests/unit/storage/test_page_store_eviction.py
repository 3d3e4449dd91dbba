"""A page store gives up pages in the order of a policy, which survives restarts and is per process.

Workloads are drawn from a seed; what is asserted is which of two policies finds more.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
from typing import TYPE_CHECKING, Any

import pytest
from page_store_tools import (
    MISS,
    OK,
    PAGE_BYTES,
    chain,
    namespace,
    num_stored,
    open_store,
    read,
    verify_index,
    write,
)
from page_store_writers import Nursery

from hicache.errors import ConfigError
from hicache.hashing import TOKEN_BYTES, hash_pages
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.page_store import rebuild_store
from hicache.storage.page_store.eviction_policies import (
    POLICY_NAMES,
    LruPolicy,
    Stage,
    create_policy,
)
from hicache.storage.page_store.options import PageStoreOptions
from hicache.storage.page_store.records import GroupState, PageEntry
from hicache.testing.page_buffer import PageBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from hicache.storage.page_store import PageStore
    from hicache.storage.page_store.reuse_history import ReuseHistory
    from hicache.types import PageHash

SMALL_PAGE = 4096
ROOM = 1_500_000
"""For some 150 small pages that are stored one at a time, each with a header."""

SEED = 20


class NewestFirst:
    """The opposite of FIFO, in octaves of age: a policy of one's own."""

    notes_uses = False

    def stages(self, history: ReuseHistory) -> Sequence[Stage]:
        """Return octaves of age, the youngest first."""
        return [Stage(youngest=1 << n >> 1, oldest=(1 << n) - 1) for n in range(history.now)]


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    with contextlib.closing(Nursery(tmp_path)) as nursery:
        yield nursery


def prompt(*turns: int) -> list[PageHash]:
    """Return the keys of a prompt with a page for each turn."""
    return hash_pages(b"".join(turn.to_bytes(TOKEN_BYTES, "little") for turn in turns), page_size=1)


def skewed(rng: random.Random, num: int) -> int:
    """Return one of so many, each as likely as its rank is low."""
    return int(num ** rng.random()) - 1


def static_skew(rng: random.Random) -> Iterator[list[PageHash]]:
    """The same few prompts of many are popular, for ever."""
    for _ in range(900):
        yield prompt(skewed(rng, 3000))


def scans(rng: random.Random) -> Iterator[list[PageHash]]:
    """Twenty prompts come again and again; in between others that come once."""
    for number in range(200):
        yield prompt(rng.randrange(20))
        yield from (prompt(1_000 + 4 * number + other) for other in range(4))


def sessions_with_scans(rng: random.Random) -> Iterator[list[PageHash]]:
    """Popular beginnings, sessions that go on, and prompts that come once."""
    sessions: list[list[int]] = []
    serial = itertools.count(10_000)
    for _ in range(800):
        kind = rng.random()
        if kind < 0.4:
            yield prompt(skewed(rng, 60), next(serial))
        elif kind < 0.7:
            yield prompt(next(serial), next(serial), next(serial))
        elif kind < 0.75 or not sessions:
            sessions.append([skewed(rng, 60), next(serial)])
            sessions = sessions[-30:]
            yield prompt(*sessions[-1])
        else:
            session = rng.choice(sessions)
            session.append(next(serial))
            yield prompt(*session)


@functools.cache
def _page() -> PageBuffer:
    return PageBuffer.holding(bytes(SMALL_PAGE))


def share_found(
    path: Path, policy: str, workload: Callable[[random.Random], Iterator[list[PageHash]]]
) -> float:
    """Return what share of all pages is found; each prompt is read as far as that, then stored."""
    storage = open_store(path, page_bytes=SMALL_PAGE, max_bytes=ROOM, eviction_policy=policy)
    page = _page().page
    num_found = num_pages = 0
    for keys in workload(random.Random(SEED)):
        found = storage.batch_exists(keys)
        parents = [b"", *keys[:-1]]
        outcomes = storage.batch_get(keys[:found], parents[:found], [page] * found, deadline=1e18)
        assert outcomes == [OK] * found
        rest = keys[found:]
        storage.batch_set(rest, parents[found:], [page] * len(rest), deadline=1e18)
        num_found += found
        num_pages += len(keys)
    storage.close()
    verify_index(path)
    return num_found / num_pages


@pytest.mark.parametrize(
    ("workload", "better", "worse"),
    [
        (static_skew, ["lfu", "adaptive"], "lru"),
        (static_skew, ["lru"], "fifo"),
        (scans, ["slru", "adaptive"], "lru"),
        (sessions_with_scans, ["adaptive"], "lru"),
    ],
)
def test_each_policy_finds_more_where_it_should(
    fast_path: Path,
    workload: Callable[[random.Random], Iterator[list[PageHash]]],
    better: list[str],
    worse: str,
) -> None:
    least = share_found(fast_path / worse, worse, workload)
    for policy in better:
        found = share_found(fast_path / policy, policy, workload)
        assert found > 1.05 * least, f"seed {SEED}: {policy} finds {found}, {worse} {least}"


def state_of(storage: PageStore, key: PageHash) -> GroupState:
    """Return what the index knows of a page's group, after it was told of all uses."""
    with storage._access.use() as access:
        store = access.store
        with store.index.write() as written:
            store.touches.write(written)
            entry = written.txn.get(access.prefix + key, b"", db=written.dbs.pages)
            group_id = PageEntry.decode(entry).group_id
            group_key = group_id.to_bytes(8, "big")
            return GroupState.decode(written.txn.get(group_key, b"", db=written.dbs.states))


def fill(storage: PageStore, first_name: int, num_chains: int) -> None:
    for name in range(first_name, first_name + num_chains):
        write(storage, chain(name, 1))


def test_uses_of_what_was_given_up_count_for_what_it_hung_below(fast_path: Path) -> None:
    """And for the page itself, once, when it is stored again."""
    storage = open_store(fast_path, max_bytes=1_000_000, eviction_policy="lru")
    stem = chain(1, 2)
    write(storage, stem)
    branch = chain(2, 1, stem[-1])
    write(storage, branch, parent=stem[-1])
    for _ in range(3):
        assert read(storage, [*stem, *branch]) == [OK] * 3
    assert (state_of(storage, stem[-1]).num_uses, state_of(storage, branch[0]).num_uses) == (1, 4)
    name = 100
    while num_stored(storage, branch):
        fill(storage, name, 1)
        name += 1
    assert num_stored(storage, stem) == 2
    assert state_of(storage, stem[-1]).num_uses == 4
    write(storage, branch, parent=stem[-1])
    assert state_of(storage, branch[0]).num_uses == 5
    while num_stored(storage, branch):
        fill(storage, name, 1)
        name += 1
    assert num_stored(storage, stem) < 2 or state_of(storage, stem[-1]).num_uses == 4
    verify_index(fast_path)
    storage.close()


def test_fifo_goes_by_when_pages_were_stored_and_lru_by_their_last_use(fast_path: Path) -> None:
    for policy, is_kept in (("fifo", False), ("lru", True)):
        path = fast_path / policy
        storage = open_store(path, max_bytes=1_000_000, eviction_policy=policy)
        fill(storage, 1, 3)
        for name in range(100, 250):
            read(storage, chain(1, 1))
            fill(storage, name, 1)
        assert num_stored(storage, chain(2, 1)) == 0
        assert num_stored(storage, chain(1, 1)) == is_kept
        storage.close()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_uses_outlive_the_process_and_pages_the_index(fast_path: Path, policy: str) -> None:
    """After a rebuild nothing is known of uses but that each page was stored."""
    options: dict[str, Any] = {"max_bytes": 1_000_000, "eviction_policy": policy}
    storage = open_store(fast_path, **options)
    keys = chain(1, 3)
    fill(storage, 100, 200)
    write(storage, keys)
    num_uses = 1 if policy == "fifo" else 4
    for _ in range(3):
        assert read(storage, keys) == [OK] * 3
    storage.close()
    storage = open_store(fast_path, **options)
    before = state_of(storage, keys[0])
    assert before.num_uses == num_uses
    storage.close()

    assert rebuild_store(str(fast_path)) > 3
    storage = open_store(fast_path, **options)
    verify_index(fast_path)
    assert read(storage, keys) == [OK] * 3
    assert state_of(storage, keys[0]).num_uses == min(num_uses, 2)
    fill(storage, 1000, 200)
    verify_index(fast_path)
    storage.close()


def test_an_index_of_the_earlier_version_is_made_again_unless_it_is_in_use(
    fast_path: Path, nursery: Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    """By name: its records are never read as those of this version."""
    storage = open_store(fast_path)
    keys = chain(1, 5)
    write(storage, keys)
    with storage._access.use() as access, access.store.index.write() as written:
        store_id, *_ = written.txn.get(b"store", b"", db=written.dbs.meta).split()
        written.txn.put(b"store", store_id, db=written.dbs.meta)
    with nursery.start("write_until_killed", fast_path, 1) as writer:
        assert writer.pipe.readline() == b""
    storage.close()
    with caplog.at_level(logging.WARNING):
        storage = open_store(fast_path)
    assert "another version; rebuilt it from the headers: 5 pages" in caplog.text
    assert read(storage, keys) == [OK] * 5
    verify_index(fast_path)
    storage.close()


def test_each_process_evicts_by_its_own_policy(fast_path: Path, nursery: Nursery) -> None:
    """What lies in the index is the same for all of them; killed ones leave it sound."""
    options: dict[str, Any] = {"max_bytes": 4_000_000}
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                nursery.start(
                    "write_until_killed", fast_path, seed, eviction_policy=policy, **options
                )
            )
            for seed, policy in enumerate(POLICY_NAMES)
        ]
        for writer in writers:
            writer.wait_until_started()
        storage = open_store(fast_path, eviction_policy="lru", **options)
        outcomes = [write(storage, chain(name, 2)) for name in range(100)]
        assert [OK] * 2 in outcomes
        for writer in writers:
            writer.kill()
    verify_index(fast_path)
    storage.close()


def test_instances_of_one_process_have_one_policy(fast_path: Path) -> None:
    storage = open_store(fast_path, eviction_policy="lru")
    with pytest.raises(ConfigError, match="'lru' and cannot open it with 'slru'"):
        open_store(fast_path, model="other", eviction_policy="slru")
    open_store(fast_path, model="other", eviction_policy="lru").close()
    storage.close()
    open_store(fast_path, eviction_policy="slru").close()


def test_a_policy_of_ones_own_is_found_by_its_path(fast_path: Path) -> None:
    policy = f"{__name__}:NewestFirst"
    storage = open_store(fast_path, max_bytes=1_000_000, eviction_policy=policy)
    fill(storage, 1, 200)
    assert read(storage, chain(1, 1)) == [OK]
    assert MISS in {read(storage, chain(name, 1))[0] for name in range(100, 190)}
    verify_index(fast_path)
    storage.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mru",
            "no eviction policy of page stores 'mru'; give one of adaptive, fifo, lfu, lru, slru",
        ),
        ("nowhere:Policy", "cannot be imported"),
        ("hicache.clock:ManualClock", "lacks stages or notes_uses"),
    ],
)
def test_what_is_no_policy_is_refused(fast_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(fast_path, eviction_policy=name)


@pytest.mark.parametrize(
    ("of_cache", "option", "expected"),
    [
        (None, None, "adaptive"),
        ("lfu", None, "lfu"),
        ("lfu", "fifo", "fifo"),
        ("mru", None, "adaptive"),
        ("my.module:Policy", None, "adaptive"),
    ],
)
def test_a_store_evicts_as_the_cache_does_unless_told_otherwise(
    of_cache: str | None, option: str | None, expected: str
) -> None:
    """Orders that only a tree has are none for a store."""
    extra_config = {"path": "store"} | ({} if option is None else {"eviction_policy": option})
    config = HiCacheStorageConfig(
        namespace=namespace(),
        page_bytes=PAGE_BYTES,
        extra_config=extra_config,
        eviction_policy=of_cache,
    )
    assert PageStoreOptions.from_config(config).eviction_policy == expected


def test_policies_are_made_anew_for_each_store() -> None:
    assert create_policy("adaptive") is not create_policy("adaptive")
    assert isinstance(create_policy("lru"), LruPolicy)
