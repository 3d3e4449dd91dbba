"""Processes that die while they write, and what the next one finds."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

from hicache.hashing import StorageNamespace, hash_pages
from hicache.storage.base import HiCacheStorageConfig
from hicache.storage.file import FileStorage
from hicache.testing.page_buffer import PageBuffer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from pathlib import Path

PAGE_BYTES = 1 << 20
NUM_KEYS = 100
LATER = 1e18
OK, MISS = PageOutcome.OK, PageOutcome.MISS


def open_storage(root: Path) -> FileStorage:
    namespace = StorageNamespace(
        model="model",
        weights_revision="1",
        dtype="float16",
        layout="page_first",
        page_size=1,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )
    return FileStorage(
        HiCacheStorageConfig(
            namespace=namespace, page_bytes=PAGE_BYTES, extra_config={"path": str(root)}
        )
    )


def keys_of_round(serial: int) -> list[PageHash]:
    return hash_pages(bytes(4 * NUM_KEYS), page_size=1, prior=bytes([serial]) * 32)


def payload_of(key: PageHash) -> bytes:
    return random.Random(key).randbytes(PAGE_BYTES)


def get_page(storage: FileStorage, key: PageHash) -> tuple[PageOutcome, bytes]:
    target = PageBuffer(PAGE_BYTES)
    (outcome,) = storage.batch_get([key], [target.page], deadline=LATER)
    return outcome, target.read()


def set_page(storage: FileStorage, key: PageHash) -> PageOutcome:
    source = PageBuffer.holding(payload_of(key))
    return storage.batch_set([key], [b""], [source.page], deadline=LATER)[0]


def start_writer(root: Path, serial: int, body: str) -> subprocess.Popen[str]:
    """Run `body` in a process that has this module's names; wait for its first line."""
    program = f"""
        import os, sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from pathlib import Path
        from test_file_crash import keys_of_round, open_storage, set_page

        root, serial = Path({str(root)!r}), {serial}
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_killed_writer_leaves_the_pages_it_had_finished_and_no_part_of_another(
    tmp_path: Path,
) -> None:
    """Case C111."""
    body = """
        storage = open_storage(root)
        for index, key in enumerate(keys_of_round(serial)):
            set_page(storage, key)
            if index == 0:
                print("started", flush=True)
        time.sleep(600)
    """
    seed = 20_251
    rng = random.Random(seed)
    for serial in range(4):
        process = start_writer(tmp_path, serial, body)
        time.sleep(rng.uniform(0.0, 0.1))
        kill(process)
        storage = open_storage(tmp_path)
        assert list(tmp_path.glob("*/tmp/*")) == []
        keys = keys_of_round(serial)
        found = [get_page(storage, key) for key in keys]
        num_whole = [outcome for outcome, _ in found].count(OK)
        assert num_whole >= 1
        for index, (outcome, payload) in enumerate(found):
            assert outcome is (OK if index < num_whole else MISS), f"{seed=} {serial=} {index=}"
            assert index >= num_whole or payload == payload_of(keys[index])


def test_a_file_being_written_is_kept_while_its_writer_lives_and_removed_after_its_death(
    tmp_path: Path,
) -> None:
    """Case C018."""
    body = """
        def write_half_and_hang(fd, buffers, writev=os.writev):
            writev(fd, [buffers[0], buffers[1][:1000]])
            print("started", flush=True)
            time.sleep(600)

        storage = open_storage(root)
        os.writev = write_half_and_hang
        set_page(storage, keys_of_round(serial)[0])
    """
    process = start_writer(tmp_path, 0, body)
    key = keys_of_round(0)[0]

    beside = open_storage(tmp_path)
    assert len(list(tmp_path.glob("*/tmp/*.tmp"))) == 1
    assert get_page(beside, key)[0] is MISS

    kill(process)
    after = open_storage(tmp_path)
    assert list(tmp_path.glob("*/tmp/*")) == []
    assert get_page(after, key)[0] is MISS
    assert set_page(after, key) is OK
    assert get_page(beside, key) == (OK, payload_of(key))


def test_files_that_are_no_temporary_files_of_ours_stay(tmp_path: Path) -> None:
    open_storage(tmp_path)
    (directory,) = tmp_path.glob("*/tmp")
    foreign = directory / "1-notes.tmp"
    foreign.write_bytes(b"mine")
    orphan = directory / f"{os.getpid()}-00c0ffee-7.tmp"  # Its process id lives, its writer not.
    orphan.write_bytes(b"half a page")
    open_storage(tmp_path)
    assert list(directory.iterdir()) == [foreign]
