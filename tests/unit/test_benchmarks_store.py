"""Laws of the benchmark of stores: a byte that is wrong is no figure, on any side."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import shutil
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import benchmarks.store
from benchmarks.harness import CheckFailed
from benchmarks.page_set import PageSet, Turn
from benchmarks.peers.store_process import PeerStores
from benchmarks.scheduler import CacheSizes, open_cache
from benchmarks.store_calls import CallSizes
from benchmarks.store_disk import file_system, huge_page_choices
from benchmarks.store_load import LoadRows
from benchmarks.store_sides import open_file_store
from benchmarks.store_transfers import TransferRows, TransferSizes, bars_of
from hicache.errors import ConfigError
from hicache.layout import KVGeometry
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.harness import Result
    from hicache.storage import HiCacheStorage

    Batch = Callable[..., list[PageOutcome]]

KIB = 1 << 10
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16", page_size=4)
SIZES = benchmarks.store.Sizes(
    transfers=TransferSizes(
        warm_page_bytes=(4 * KIB, 8 * KIB),
        small_page_bytes=(4 * KIB,),
        cold_page_bytes=(4 * KIB,),
        batch_pages=4,
        set_bytes=96 * KIB,
        read_bytes=32 * KIB,
        write_bytes=32 * KIB,
        cold_write_bytes=32 * KIB,
        turns=3,
    ),
    calls=CallSizes(look_pages=24, large_pages=40, batch_pages=4, samples=20, opens=2),
    load=LoadRows(
        cache=CacheSizes(geometry=GEOMETRY, device_pages=300, host_pages=600),
        num_prompts=16,
        prompt_pages=80,
        seconds=0.5,
    ),
)
CONDITIONS = [
    "page_bytes", "threads", "order", "file_system", "huge_pages", "layout", "direct",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def run(label: str, peers: frozenset[str] = frozenset(), **options: Any) -> list[Result]:
    parts = benchmarks.store.steps(quick=True, peers=peers, sizes=SIZES, **options)
    (step,) = [step for step in parts if step.label == label]
    return list(step.run())


def rows_of(results: list[Result]) -> list[tuple[object, ...]]:
    return [(one.name, one.params["threads"], one.peer) for one in results]


# -- rows -----------------------------------------------------------------------------------------


def test_pages_are_read_and_written_beside_memcpy_and_one_system_call() -> None:
    results = run("4 KiB pages, warm")
    assert rows_of(results) == [
        (name, threads, peer)
        for name, calls in (("read_warm", ("preadv", "preadv_xxh3")), ("write_warm", ("pwritev",)))
        for threads in (1, 2)
        for peer in ("memcpy", *calls)
    ]
    assert {(one.unit, one.better, one.samples) for one in results} == {("GB/s", "higher", 3)}
    assert all(one.ratio is not None and one.ratio > 0 for one in results)
    assert all(list(one.params) == [*CONDITIONS, "batch_pages"] for one in results)
    assert {(one.params["page_bytes"], one.params["batch_pages"]) for one in results} == {(4096, 4)}


def test_memory_without_huge_pages_has_rows_of_its_own_and_a_bar() -> None:
    rows = TransferRows(SIZES.transfers, open_file_store, PeerStores(frozenset()))
    results = rows.warm_on_small_pages(4 * KIB)
    assert rows_of(results) == [
        ("read_warm", threads, peer) for threads in (1, 2) for peer in ("preadv", "preadv_xxh3")
    ]
    assert {one.params["huge_pages"] for one in results} == {False}
    assert [bar.limit for one in results for bar in one.bars] == [0.85, 0.85]


def test_memory_is_measured_with_and_without_huge_pages_where_there_is_a_choice() -> None:
    labels = [step.label for step in benchmarks.store.steps(quick=True, sizes=SIZES)]
    both = huge_page_choices() == (True, False)
    assert [label for label in labels if "KiB" in label] == [
        "4 KiB pages, warm",
        "8 KiB pages, warm",
        *["4 KiB pages, without huge pages"] * both,
    ]


def test_cold_rows_stand_beside_the_disk_or_are_left_out_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = run("pages past the page cache")
    if not results:
        # Some file systems cannot do without their page cache.
        assert "left out read_cold and write_cold: " in capsys.readouterr().err
        return
    said = capsys.readouterr().err
    tools = [
        name for name in ("dd", "fio") if shutil.which(name) and f"skipped {name}," not in said
    ]
    peers = ["disk", *tools]
    assert rows_of(results) == [
        (name, threads, peer)
        for name in ("read_cold", "write_cold")
        for threads in (1, 2)
        for peer in peers
    ]
    assert all(one.params["direct"] for one in results)
    assert {one.params["cache_dropped_by"] for one in results} == {"posix_fadvise"}


def refusing_direct(folder: Path, *, page_bytes: int, direct: bool = False) -> HiCacheStorage:
    if direct:
        raise ConfigError("no option direct_io")
    return open_file_store(folder, page_bytes=page_bytes)


def test_a_backend_that_refuses_to_go_past_the_page_cache_has_no_cold_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("pages past the page cache", open_store=refusing_direct) == []
    assert capsys.readouterr().err.count("left out read_cold and write_cold") == 1


def test_looks_are_timed_in_a_small_and_a_large_store_and_opening_of_the_large_one() -> None:
    (small,) = run("looks")
    large, opened = run("a large store")
    assert [one.name for one in (small, large, opened)] == ["exists_4", "exists_4", "open"]
    assert [one.params["pages"] for one in (small, large, opened)] == [24, 40, 40]
    assert [[bar.limit for bar in one.bars] for one in (small, large, opened)] == [[50], [], []]
    assert all(list(one.params) == [*CONDITIONS, "pages"] for one in (small, large, opened))


def test_a_step_under_load_stands_beside_a_loop_and_what_storage_moved_meanwhile() -> None:
    results = run("the scheduler's thread under load")
    assert [(one.name, one.params["background"]) for one in results] == [
        ("check_hicache_events", "storage"), ("step_cpu", "storage"), ("wake", "storage"),
        ("wake", "none"), ("loop", "storage"), ("loop", "none"),
        ("storage_busy", "storage"), ("moved", "storage"), ("moved", "storage"),
    ]  # fmt: skip
    assert [one.params.get("movement") for one in results[7:]] == ["persist", "prefetch"]
    assert all(one.median > 0 for one in results)
    bars = [(bar.limit, bar.statistic) for bar in results[0].bars]
    assert bars == [(100, "median"), (500, "p99")]


def test_a_bar_belongs_to_a_page_size_a_system_and_huge_pages() -> None:
    found = {
        (name, peer, size, huge_pages): bars_of(name, peer, size * KIB, huge_pages)[0].limit
        for name in ("read_warm", "write_warm", "read_cold", "write_cold")
        for peer in (
            "memcpy",
            "preadv",
            "disk",
            "dd",
            "fio",
            "sglang-1-file",
            "lmcache-1-fs_native",
        )
        for size in (16, 128, 1024, 3072)
        for huge_pages in (True, False)
        if bars_of(name, peer, size * KIB, huge_pages)
    }
    assert {key: limit for key, limit in found.items() if key[1] != "disk" and key[3]} == {
        ("read_warm", "memcpy", 128, True): 0.75,
        ("read_warm", "memcpy", 1024, True): 0.75,
        ("read_warm", "preadv", 16, True): 0.6,
        ("read_warm", "sglang-1-file", 128, True): 4,
        ("read_warm", "sglang-1-file", 1024, True): 3,
        ("read_warm", "lmcache-1-fs_native", 128, True): 1,
        ("read_warm", "lmcache-1-fs_native", 3072, True): 0.8,
    }
    assert {limit for key, limit in found.items() if key[1] == "disk"} == {0.9}
    assert {key[1] for key in found if not key[3]} == {"disk", "preadv"}


@pytest.mark.parametrize("threads", [1, 2])
def test_every_thread_moves_as_many_batches_and_nobody_one_twice(threads: int) -> None:
    rows = TransferRows(SIZES.transfers, open_file_store, PeerStores(frozenset()))
    pages = PageSet(page_bytes=4 * KIB, num_batches=7, batch_pages=4)
    for turn in itertools.islice(rows.draw("read", pages, threads), 20):
        assert {len(batches) for batches in turn.batches} == {2 // threads}
        moved = [batch for batches in turn.batches for batch in batches]
        assert len(set(moved)) == len(moved)


# -- wrong work -----------------------------------------------------------------------------------


class Wrong:
    """A store in a file system that answers one call not as it should."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self.storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)


class FlipsABit(Wrong):
    def batch_get(
        self, keys: Any, parent_keys: Any, pages: Any, *, deadline: float
    ) -> list[PageOutcome]:
        outcomes = self.storage.batch_get(keys, parent_keys, pages, deadline=deadline)
        address, num_bytes = pages[-1][-1]
        ctypes.c_ubyte.from_address(address + num_bytes - 1).value ^= 1
        return outcomes


class SwapsPages(Wrong):
    def batch_get(
        self, keys: Any, parent_keys: Any, pages: Any, *, deadline: float
    ) -> list[PageOutcome]:
        return self.storage.batch_get(keys, parent_keys, pages[::-1], deadline=deadline)


class ReadsNothing(Wrong):
    def batch_get(
        self, keys: Any, parent_keys: Any, pages: Any, *, deadline: float
    ) -> list[PageOutcome]:
        return [PageOutcome.OK] * len(keys)


class MissesTheLast(Wrong):
    def batch_get(
        self, keys: Any, parent_keys: Any, pages: Any, *, deadline: float
    ) -> list[PageOutcome]:
        outcomes = self.storage.batch_get(keys, parent_keys, pages, deadline=deadline)
        return [*outcomes[:-1], PageOutcome.MISS]


class WritesAnotherPage(Wrong):
    def batch_set(
        self, keys: Any, parent_keys: Any, pages: Any, *, deadline: float
    ) -> list[PageOutcome]:
        pages = [pages[0], *pages[:-1]]
        return self.storage.batch_set(keys, parent_keys, pages, deadline=deadline)


class WritesNothing(Wrong):
    def batch_set(
        self, keys: Any, parent_keys: Any, pages: Any, *, deadline: float
    ) -> list[PageOutcome]:
        return [PageOutcome.OK] * len(keys)


class HasAllPages(Wrong):
    def batch_exists(self, keys: Any) -> int:
        return len(keys)


class HasNoLastPage(Wrong):
    def batch_exists(self, keys: Any) -> int:
        return min(self.storage.batch_exists(keys), len(keys) - 1)


def opening(wrong: type[Wrong]) -> Callable[..., Any]:
    return lambda folder, *, page_bytes, direct=False: wrong(
        open_file_store(folder, page_bytes=page_bytes)
    )


@pytest.mark.parametrize(
    ("label", "wrong", "complaint"),
    [
        ("4 KiB pages, warm", FlipsABit, "batch_get gives other bytes than page"),
        ("4 KiB pages, warm", SwapsPages, "batch_get gives other bytes than page"),
        ("4 KiB pages, warm", ReadsNothing, "batch_get gives other bytes than page"),
        ("4 KiB pages, warm", MissesTheLast, r"batch_get answers \['miss', 'ok'\]"),
        ("4 KiB pages, warm", WritesAnotherPage, "batch_get gives other bytes than page"),
        ("4 KiB pages, warm", WritesNothing, r"batch_get answers \['miss', 'skipped'\]"),
        ("looks", HasAllPages, "finds 4 pages in front of a hole at 0"),
        ("looks", HasNoLastPage, "finds 3 of 4 pages"),
        ("a large store", HasAllPages, "in front of a hole"),
    ],
)
def test_a_store_that_is_wrong_gives_no_figure(
    label: str, wrong: type[Wrong], complaint: str
) -> None:
    with pytest.raises(CheckFailed, match=complaint):
        run(label, open_store=opening(wrong))


def test_a_store_that_has_lost_its_pages_when_it_is_opened_again_gives_no_figure() -> None:
    opened: set[Path] = set()

    def open_once(folder: Path, *, page_bytes: int, direct: bool = False) -> HiCacheStorage:
        again = folder in opened
        opened.add(folder)
        return open_file_store(
            folder.with_name("empty") if again else folder, page_bytes=page_bytes
        )

    with pytest.raises(CheckFailed, match="0 of 4 pages are there after opening"):
        run("a large store", open_store=open_once)


@contextmanager
def losing_a_page(sizes: Any, storage: Any) -> Iterator[Any]:
    with open_cache(sizes, storage) as served:
        yield served
        served.allocator.alloc(1)


def test_a_cache_that_has_lost_a_page_under_load_gives_no_figure() -> None:
    load = dataclasses.replace(SIZES.load, open_cache=losing_a_page)
    with pytest.raises(CheckFailed, match=r"1 device page\(s\) have no owner"):
        load()


# -- pages ----------------------------------------------------------------------------------------


def test_a_page_is_right_only_where_it_is_dealt_to_and_with_every_bit() -> None:
    pages = PageSet(page_bytes=64, num_batches=3, batch_pages=2)
    memory = np.zeros((6, 64), dtype=np.uint8)
    shares = pages.deal(Turn([[2], [0]], seed=5))
    pages.fill(memory, shares)
    assert pages.first_wrong(memory, shares) is None
    used = [row for share in shares for part in share for row in part.rows]
    assert len(set(used)) == 4
    assert not memory[[row for row in range(6) if row not in used]].any()
    assert len({memory[row].tobytes() for row in used}) == 4
    for row in used:
        for bit in (0, 64 * 8 - 1):
            memory[row, bit // 8] ^= 1 << bit % 8
            assert pages.first_wrong(memory, shares) is not None
            memory[row, bit // 8] ^= 1 << bit % 8
    pages.spoil(memory, shares)
    assert pages.first_wrong(memory, shares) == 4


def test_every_page_has_a_key_of_its_own_and_both_sides_make_the_same() -> None:
    one, other = (PageSet(page_bytes=64, num_batches=3, batch_pages=2) for _ in range(2))
    keys = one.keys(range(one.num_pages))
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {32}
    assert other.keys(range(6)) == keys
    assert other.deal(Turn([[1, 2]], seed=9)) == one.deal(Turn([[1, 2]], seed=9))


def test_a_path_is_on_the_file_system_that_is_mounted_nearest(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    folder = tmp_path / "a b"
    folder.mkdir()
    spaced = str(folder).replace(" ", r"\040")
    mounts.write_text(f"disk / ext4 rw 0 0\nnone {spaced} tmpfs rw 0 0\n", encoding="utf-8")
    assert file_system(folder / "file", mounts) == "tmpfs"
    assert file_system(tmp_path, mounts) == "ext4"


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("[always] madvise never", (True,)),
        ("always [madvise] never", (True, False)),
        ("always madvise [never]", (False,)),
        (None, (False,)),
    ],
)
def test_huge_pages_can_be_had_as_the_kernel_is_set(
    text: str | None, choices: tuple[bool, ...], tmp_path: Path
) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text, encoding="utf-8")
    assert huge_page_choices(setting) == choices
