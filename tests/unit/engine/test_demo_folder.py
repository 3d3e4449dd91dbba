"""Laws of a demo's folder: who has it, what the next one finds there, and that nothing piles up."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from page_store_tools import PAGE_BYTES, chain, open_store, write

from hicache.cli import main
from hicache.engine.demo_folder import DemoFolder

if TYPE_CHECKING:
    from pathlib import Path

PAGES = 5


def store_pages(folder: DemoFolder, num_pages: int = PAGES) -> None:
    store = open_store(folder.storage)
    write(store, chain(1, num_pages))
    store.close()


def leave(root: Path, name: str) -> Path:
    """Return the folder of a run of that name that has stored pages and did not end well."""
    folder = DemoFolder(root, name=name)
    store_pages(folder)
    (folder.path / "history.json").write_text("{}")
    assert folder.close()
    return folder.path


def test_a_run_finds_the_pages_of_one_of_its_name_that_did_not_end_and_nothing_else(
    tmp_path: Path,
) -> None:
    path = leave(tmp_path, "a")
    with contextlib.closing(DemoFolder(tmp_path, name="a")) as folder:
        assert folder.path == path
        assert (folder.num_pages, folder.num_bytes) == (PAGES, PAGES * PAGE_BYTES)
        assert list(path.iterdir()) == [folder.storage]


def test_a_run_of_another_name_finds_nothing_and_removes_what_is_left(tmp_path: Path) -> None:
    left = [leave(tmp_path, "a"), leave(tmp_path, "ab")]
    with contextlib.closing(DemoFolder(tmp_path, name="b")) as folder:
        assert folder.num_pages == 0
        assert list(tmp_path.iterdir()) == [folder.path]
        assert folder.path not in left


def test_of_several_that_are_left_one_is_used_and_the_others_go(tmp_path: Path) -> None:
    first, second = DemoFolder(tmp_path, name="a"), DemoFolder(tmp_path, name="a")
    for folder in (first, second):
        store_pages(folder)
    assert first.close()
    assert second.close()
    with contextlib.closing(DemoFolder(tmp_path, name="a")) as folder:
        assert folder.num_pages == PAGES
        assert list(tmp_path.iterdir()) == [folder.path]


@pytest.mark.parametrize("name", ["a", "b"])
def test_what_a_living_run_has_is_neither_used_nor_removed(tmp_path: Path, name: str) -> None:
    living = DemoFolder(tmp_path, name="a")
    store_pages(living)
    with contextlib.closing(DemoFolder(tmp_path, name=name)) as other:
        assert other.path != living.path
        assert other.num_pages == 0
        other.remove()
    assert living.close()
    assert list(tmp_path.iterdir()) == [living.path]


def test_the_lock_of_a_killed_process_is_gone_with_it(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys\n"
        "from hicache.engine.demo_folder import DemoFolder\n"
        "folder = DemoFolder(pathlib.Path(sys.argv[1]), name='a')\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    with contextlib.closing(DemoFolder(tmp_path, name="a")) as folder:
        assert str(folder.path) == killed.stdout.strip()


def test_neither_a_run_that_came_to_its_end_nor_one_without_pages_leaves_anything(
    tmp_path: Path,
) -> None:
    ended = DemoFolder(tmp_path, name="a")
    store_pages(ended)
    ended.remove()
    assert not ended.close()
    assert not DemoFolder(tmp_path, name="a").close()
    opened = DemoFolder(tmp_path, name="a")
    open_store(opened.storage).close()
    assert not opened.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["another version", "no store"])
def test_a_store_that_cannot_be_used_is_removed_and_the_run_begins_without(
    tmp_path: Path, damage: str
) -> None:
    storage = leave(tmp_path, "a") / "storage"
    if damage == "another version":
        text = (storage / "FORMAT").read_text()
        (storage / "FORMAT").write_text(text.replace('"version": ', '"version": 9'))
    else:
        (storage / "FORMAT").unlink()
        shutil.rmtree(storage / "index")
    with contextlib.closing(DemoFolder(tmp_path, name="a")) as folder:
        assert folder.num_pages == 0
        store_pages(folder)


def test_without_a_folder_in_the_cache_the_demo_says_so_and_uses_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hicache").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Refused only when the folder is there.
    assert main(["demo", "--model", "random", "--page-size", "0"]) == 2
    said = capsys.readouterr().err
    assert f"'{tmp_path / 'hicache'}': a run that is killed cannot be continued" in said
    assert "page_size" in said
