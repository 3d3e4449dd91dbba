"""`hicache storage`: what an operator sees of a store, and what is repaired."""

from __future__ import annotations

import ctypes
import json
from typing import TYPE_CHECKING, Any

import pytest

from hicache.cli import main
from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace, hash_pages
from hicache.storage.base import HiCacheStorageConfig, Piece
from hicache.storage.page_store import PageStore
from hicache.tools.location import store_directory
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from pathlib import Path

PAGE_BYTES = 5000
KEYS = hash_pages(bytes(4 * 6), page_size=1)


def open_store(path: Path, *, model: str = "model") -> PageStore:
    namespace = StorageNamespace(
        model=model,
        weights_revision="1",
        dtype="float32",
        layout="page_first",
        page_size=1,
        kv_shape="bytes",
    )
    return PageStore(
        HiCacheStorageConfig(
            namespace=namespace, page_bytes=PAGE_BYTES, extra_config={"path": str(path)}
        )
    )


def fill(path: Path, *, model: str = "model", num_pages: int = len(KEYS)) -> None:
    """Store pages of equal bytes, each of its own."""
    store = open_store(path, model=model)
    memory = ctypes.create_string_buffer(
        b"".join(bytes([65 + page]) * PAGE_BYTES for page in range(num_pages))
    )
    address = ctypes.addressof(memory)
    pages = [(Piece(address + page * PAGE_BYTES, PAGE_BYTES),) for page in range(num_pages)]
    keys = KEYS[:num_pages]
    outcomes = store.batch_set(keys, [b"", *keys[:-1]], pages, deadline=float("inf"))
    assert outcomes == [PageOutcome.OK] * num_pages
    store.close()


def run(tmp_path: Path, action: str, location: str, *options: str) -> tuple[int, Any]:
    """Run the command; return its status and what it wrote as JSON."""
    answer = tmp_path / "answer.json"
    status = main(["storage", action, location, "--json", str(answer), *options])
    return status, json.loads(answer.read_text())


def flip_a_byte(page: dict[str, Any]) -> None:
    with open(page["file"], "r+b") as segment:
        segment.seek(page["offset"] + 100)
        byte = segment.read(1)
        segment.seek(page["offset"] + 100)
        segment.write(bytes([byte[0] ^ 1]))


def test_ls_names_each_namespace_with_its_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    fill(path)
    fill(path, model="other", num_pages=2)
    status, found = run(tmp_path, "ls", f"file:{path}")
    assert status == 0
    assert {one["description"]["model"]: one["num_pages"] for one in found} == {
        "model": 6,
        "other": 2,
    }
    assert "other" in capsys.readouterr().out


def test_ls_lists_pages_where_their_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(path)
    _, (namespace,) = run(tmp_path, "ls", str(path))
    _, pages = run(tmp_path, "ls", str(path), "--pages", "--namespace", namespace["digest"][:8])
    assert sorted(page["key"] for page in pages) == sorted(key.hex() for key in KEYS)
    for page in pages:
        with open(page["file"], "rb") as segment:
            segment.seek(page["offset"])
            content = segment.read(PAGE_BYTES)
        index = [key.hex() for key in KEYS].index(page["key"])
        assert content == bytes([65 + index]) * PAGE_BYTES
    _, none = run(tmp_path, "ls", str(path), "--pages", "--namespace", "no such digest")
    assert none == []


def test_stat_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store"
    fill(path)
    status, facts = run(tmp_path, "stat", str(path))
    assert status == 0
    assert facts["num_pages"] == 6
    assert facts["payload_bytes"] == 6 * PAGE_BYTES
    assert facts["free_bytes"] + facts["payload_bytes"] <= facts["segment_bytes"]
    assert "payload_bytes" in capsys.readouterr().out


def test_verify_finds_a_flipped_bit_and_repair_lets_the_next_write_mend_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    fill(path)
    assert run(tmp_path, "verify", str(path))[0] == 0
    _, pages = run(tmp_path, "ls", str(path), "--pages")
    flip_a_byte(pages[-1])
    status, found = run(tmp_path, "verify", str(path))
    assert status == 1
    assert [page["key"] for page in found["damaged"]] == [pages[-1]["key"]]
    assert "corrupt" in capsys.readouterr().out
    assert run(tmp_path, "verify", str(path), "--repair")[0] == 1
    assert run(tmp_path, "verify", str(path))[0] == 0
    store = open_store(path)
    assert store.batch_exists(KEYS) == len(KEYS) - 1
    store.close()


def test_verify_rebuilds_an_index_that_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(path)
    for file in (path / "index").iterdir():
        file.unlink()
    status, found = run(tmp_path, "verify", str(path), "--rebuild")
    assert status == 0
    assert found["outcomes"] == {"ok": 6}
    store = open_store(path)
    assert store.batch_exists(KEYS) == len(KEYS)
    store.close()


def test_gc_gives_the_space_of_removed_pages_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(path)
    store = open_store(path)
    assert store.clear() == 6
    store.close()
    status, report = run(tmp_path, "gc", str(path))
    assert status == 0
    assert report["released_bytes"] > 0
    assert run(tmp_path, "stat", str(path))[1]["free_bytes"] == 0


def test_bench_measures_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "store"
    fill(path)
    status, figures = run(
        tmp_path, "bench", str(path), "--total-bytes", "2000000", "--page-bytes", "8192"
    )
    assert status == 0
    assert all(value > 0 for value in figures.values())
    _, (namespace,) = run(tmp_path, "ls", str(path))
    assert namespace["num_pages"] == 6


def test_a_place_without_a_store_ends_with_2_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for location in (str(tmp_path / "nothing"), str(tmp_path)):
        for action in ("ls", "stat", "verify", "gc"):
            assert main(["storage", action, location]) == 2
            assert "no hicache page store" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    assert main(["storage", "bench", str(tmp_path / "x"), "--total-bytes", "1"]) == 2
    assert "measure nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("location", "directory"),
    [
        ("/data/kv", "/data/kv"),
        ("kv", "kv"),
        ("file:/data/kv", "/data/kv"),
        ("file:///data/kv", "/data/kv"),
        ("./odd:name", "./odd:name"),
    ],
)
def test_locations_are_directories_with_or_without_a_scheme(location: str, directory: str) -> None:
    assert store_directory(location) == directory


@pytest.mark.parametrize("location", ["redis:host", "file:", "s3://bucket"])
def test_other_kinds_of_stores_are_refused(location: str) -> None:
    with pytest.raises(ConfigError, match="is not a page store"):
        store_directory(location)
