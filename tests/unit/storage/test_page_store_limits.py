"""Of the processes that have a page store open, the strictest limits count, whoever writes."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from typing import TYPE_CHECKING

import pytest
from page_store_tools import (
    OK,
    chain,
    disk_bytes,
    num_stored,
    open_store,
    read,
    verify_index,
    watched,
    write,
)
from page_store_writers import Nursery

from hicache.errors import ConfigError
from hicache.storage.page_store import Limits, index, summarize
from hicache.storage.page_store.allocator import Allocator
from hicache.storage.page_store.refill import Refill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STRICT = 1_000_000


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("pipes"))
    yield nursery
    nursery.close()


@pytest.mark.parametrize("how", ["dies", "closes"])
def test_the_limit_of_a_process_that_never_writes_counts_until_it_ends(
    nursery: Nursery, fast_path: Path, how: str
) -> None:
    """C080, C114: and when it has ended, nothing is given up for it."""
    storage = open_store(fast_path)
    write(storage, chain(1, 150))
    assert disk_bytes(fast_path) > STRICT
    with nursery.start("keep_open", fast_path, max_bytes=STRICT) as reader:
        reader.wait_until_started()
        # So small a limit asks for smaller groups, of which the next commit tells.
        write(storage, chain(2, 1))
        for name in range(3, 30):
            keys = chain(name, random.Random(name).choice([1, 7, 30, 60]))
            assert write(storage, keys) == [OK] * len(keys)
            assert disk_bytes(fast_path) <= STRICT
            assert read(storage, keys) == [OK] * len(keys)
        if how == "dies":
            reader.kill()
        else:
            fast_path.with_suffix(".stop").touch()
            reader.wait()
    before = chain(29, 1)
    write(storage, before)
    keys = chain(100, 400)
    assert write(storage, keys) == [OK] * 400
    assert num_stored(storage, before) == 1
    assert disk_bytes(fast_path) > STRICT
    verify_index(fast_path)
    storage.close()


@pytest.mark.parametrize("max_bytes", [2 * STRICT, 3 * STRICT, 4 * STRICT])
def test_nothing_is_given_up_for_the_limit_of_a_process_that_has_died(
    nursery: Nursery, fast_path: Path, max_bytes: int
) -> None:
    storage = open_store(fast_path)
    with nursery.start("keep_open", fast_path, max_bytes=max_bytes) as reader:
        reader.wait_until_started()
        reader.kill()
    chains = [chain(name, 10) for name in range(80)]
    for keys in chains:
        assert write(storage, keys) == [OK] * 10
    assert disk_bytes(fast_path) > max_bytes
    assert sum(num_stored(storage, keys) for keys in chains) == 800
    storage.close()


@pytest.mark.parametrize("max_bytes", [(2 * STRICT, 3 * STRICT, 1 << 40), (STRICT,) * 3])
@pytest.mark.parametrize("same_pages", [False, True])
def test_processes_that_write_at_once_keep_the_strictest_limit_whoever_has_it(
    nursery: Nursery, fast_path: Path, max_bytes: tuple[int, ...], same_pages: bool
) -> None:
    """C080: one that never writes, or all of them."""
    strict = open_store(fast_path, max_bytes=STRICT)
    with watched(fast_path, STRICT), contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                nursery.start(
                    "write_chains", fast_path, 60, max_bytes=most, first=0 if same_pages else first
                )
            )
            for first, most in zip((0, 60, 120), max_bytes, strict=True)
        ]
        reports = [writer.wait().split()[1:] for writer in writers]
    # Others may make room by the head of a prompt again and again; what hangs below is not stored.
    outcomes = {b"ok", b"present", b"skipped"} if same_pages else {b"ok"}
    for report in reports:
        assert {*report[::2]} <= outcomes
        assert {*report[1::2]} <= {b"ok", b"miss", b"skipped"}
    assert disk_bytes(fast_path) > STRICT // 2
    verify_index(fast_path)
    strict.close()


def test_limits_that_an_instance_brings_later_count_as_long_as_it_is_open(
    nursery: Nursery, fast_path: Path
) -> None:
    generous = open_store(fast_path, max_bytes=4 * STRICT)
    strict = open_store(fast_path, model="other", max_bytes=STRICT)
    with watched(fast_path, STRICT), nursery.start("write_chains", fast_path, 60) as writer:
        writer.wait()
    assert summarize(str(fast_path)).limits == Limits(STRICT, 0)
    strict.close()
    assert summarize(str(fast_path)).limits == Limits(4 * STRICT, 0)
    with nursery.start("write_chains", fast_path, 60) as writer:
        writer.wait()
    assert disk_bytes(fast_path) > STRICT
    generous.close()
    assert summarize(str(fast_path)).limits is None


def test_the_index_does_not_grow_by_readers_of_other_processes(
    nursery: Nursery, fast_path: Path
) -> None:
    """C080: LMDB uses no space again that was given up since a reader came; commits wait for it."""
    storage = open_store(fast_path, max_bytes=STRICT)
    write(storage, chain(1, 1))
    with nursery.start("read_slowly", fast_path, 10) as reader:
        reader.wait_until_started()
        for name in range(2, 60):
            assert write(storage, chain(name, 3)) == [OK] * 3
        assert summarize(str(fast_path)).index_bytes < STRICT // 4
    storage.close()


def test_a_reader_that_stays_holds_up_one_commit_for_a_short_time(
    nursery: Nursery, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that was stopped: else each commit of all others would wait for it."""
    num_waits = 0
    sleep = time.sleep

    def counted(seconds: float) -> None:
        nonlocal num_waits
        num_waits += seconds == index._LOOK_SECONDS
        sleep(seconds)

    storage = open_store(fast_path)
    with nursery.start("read_slowly", fast_path, 600_000) as reader:
        reader.wait_until_started()
        reader.pipe.readline()
        monkeypatch.setattr(index, "_LOOK_SECONDS", 0.0123)
        monkeypatch.setattr(time, "sleep", counted)
        for name in range(20):
            assert write(storage, chain(name, 3)) == [OK] * 3
    assert 0 < num_waits <= 5
    storage.close()


def test_limits_of_an_instance_that_could_not_be_opened_do_not_count(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_store(fast_path)
    write(storage, chain(1, 20))

    with monkeypatch.context() as patch:
        patch.setattr(Allocator, "make_room", no_space)
        with pytest.raises(ConfigError, match="No space left"):
            open_store(fast_path, model="other", max_bytes=STRICT)
    write(storage, chain(2, 200))
    assert summarize(str(fast_path)).limits == Limits()
    assert disk_bytes(fast_path) > STRICT
    storage.close()


@pytest.mark.parametrize("num_pages", [0, 300])
def test_a_store_is_opened_and_read_where_limits_cannot_be_told(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    """They are told as soon as there is room, after a write or many reads."""
    chains = [chain(name, 1) for name in range(300)]
    storage = open_store(fast_path)
    for keys in chains:
        write(storage, keys)
    storage.close()
    with monkeypatch.context() as patch:
        patch.setattr(Refill, "register", no_space)
        storage = open_store(fast_path, max_bytes=8 * STRICT)
        assert read(storage, chains[0]) == [OK]
    assert summarize(str(fast_path)).limits is None
    if num_pages:
        for keys in chains[:num_pages]:
            read(storage, keys)
    else:
        write(storage, chain(1000, 1))
    assert summarize(str(fast_path)).limits == Limits(8 * STRICT, 0)
    storage.close()
