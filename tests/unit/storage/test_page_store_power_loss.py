"""A commit of a page store's index waits for no disk, so a power loss may do anything to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from page_store_tools import OK, chain, num_stored, open_store, read, verify_index, write

from hicache.errors import ConfigError
from hicache.storage.page_store import unsynced_mark
from hicache.storage.page_store.unsynced_mark import UnsyncedMark

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = chain(1, 4)


def start_the_machine_again(monkeypatch: pytest.MonkeyPatch, boot_id: str) -> None:
    monkeypatch.setattr(unsynced_mark, "_read_boot_id", lambda: boot_id)


def scramble(index: Path) -> None:
    """Leave blocks of the file as a disk has them that wrote some and not others."""
    with open(index / "data.mdb", "r+b") as file:
        for block in range(3, os.path.getsize(index / "data.mdb") // 4096, 2):
            file.seek(block * 4096)
            file.write(os.urandom(4096))


def lose_everything(index: Path) -> None:
    (index / "data.mdb").write_bytes(b"")


def leave_as_it_is(index: Path) -> None:
    assert index.is_dir()


def die_with_an_open_store(path: Path) -> None:
    """Write pages in a process that is killed with the store open."""
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from page_store_tools import chain, open_store, write\n"
        "write(open_store(sys.argv[1]), chain(1, 4))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("harm", [scramble, lose_everything, leave_as_it_is])
def test_after_a_power_loss_the_index_is_made_anew_from_the_headers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
) -> None:
    die_with_an_open_store(tmp_path)
    harm(tmp_path / "index")
    start_the_machine_again(monkeypatch, "another boot")
    storage = open_store(tmp_path)
    assert "the machine went down while" in caplog.text
    assert "rebuilt it from the headers: 4 pages" in caplog.text
    assert read(storage, KEYS) == [OK] * 4
    verify_index(tmp_path)
    storage.close()


def test_while_the_machine_runs_a_process_that_is_killed_costs_no_rebuild(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    die_with_an_open_store(tmp_path)
    storage = open_store(tmp_path)
    assert not caplog.text
    assert read(storage, KEYS) == [OK] * 4
    storage.close()


def test_a_store_that_was_closed_outlives_a_power_loss_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_store(tmp_path)
    write(storage, KEYS)
    storage.close()
    start_the_machine_again(monkeypatch, "another boot")
    storage = open_store(tmp_path)
    assert not caplog.text
    assert num_stored(storage, KEYS) == 4
    storage.close()


def test_only_the_last_of_two_processes_to_close_a_store_clears_its_mark(tmp_path: Path) -> None:
    storage = open_store(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv[2]); import page_store_tools as tools; "
    code += "tools.open_store(sys.argv[1]).close()"
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, str(tmp_path), here], check=True)
    assert not UnsyncedMark(str(tmp_path)).is_of_another_boot
    assert UnsyncedMark(str(tmp_path), boot_id="another boot").is_of_another_boot
    storage.close()
    assert not UnsyncedMark(str(tmp_path), boot_id="another boot").is_of_another_boot


def test_the_mark_is_on_the_disk_before_the_first_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Watched(UnsyncedMark):
        def set(self) -> None:
            seen.append((tmp_path / "index" / "data.mdb").exists())
            super().set()

    monkeypatch.setattr("hicache.storage.page_store.registry.UnsyncedMark", Watched)
    open_store(tmp_path).close()
    assert seen == [False]


def test_a_kernel_that_does_not_tell_its_boot_is_another_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsynced_mark, "_BOOT_ID", tmp_path / "nothing here")
    mark = UnsyncedMark(str(tmp_path))
    mark.set()
    assert not mark.is_of_another_boot
    assert UnsyncedMark(str(tmp_path)).is_of_another_boot
    mark.clear()
    assert not UnsyncedMark(str(tmp_path)).is_of_another_boot


def test_a_torn_mark_is_one_of_another_boot(tmp_path: Path) -> None:
    assert not UnsyncedMark(str(tmp_path)).is_of_another_boot
    (tmp_path / "UNSYNCED").write_bytes(b"\xff\x00")
    assert UnsyncedMark(str(tmp_path)).is_of_another_boot
    UnsyncedMark(str(tmp_path)).set()
    assert not UnsyncedMark(str(tmp_path)).is_of_another_boot


def test_a_mark_of_another_boot_is_no_reason_to_rebuild_under_a_living_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be of another boot then, unless somebody has changed it; so it is refused."""
    code = "import sys, time; sys.path.insert(0, sys.argv[2]); import page_store_tools as tools; "
    code += "storage = tools.open_store(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, str(tmp_path), here]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"open\n"
        start_the_machine_again(monkeypatch, "another boot")
        with pytest.raises(ConfigError, match="cannot be rebuilt while processes use it"):
            open_store(tmp_path)
        process.stdin.close()
        process.wait(timeout=60)
