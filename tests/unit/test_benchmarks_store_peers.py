"""Laws of running a store beside those of other systems, with stand-ins for these."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

import benchmarks.store
from benchmarks.__main__ import main
from benchmarks.harness import CheckFailed
from benchmarks.store_calls import CallSizes
from benchmarks.store_transfers import TransferSizes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.harness import Result

SIZES = benchmarks.store.Sizes(
    transfers=TransferSizes(
        warm_page_bytes=(64,), batch_pages=4, set_bytes=1536, read_bytes=512, write_bytes=512,
        turns=3,
    ),
    calls=CallSizes(look_pages=24, batch_pages=4, samples=20),
)  # fmt: skip
PEERS = frozenset({"sglang", "lmcache"})
NAMES = ["sglang-0.0-file", "lmcache-0.0-fs_native"]

TORCH = """
    import numpy

    class Tensor(numpy.ndarray):
        def copy_(self, other):
            self[...] = other

        def numpy(self):
            return self.view(numpy.ndarray)

    def from_numpy(array):
        return array.view(Tensor)

    def zeros(length, dtype):
        return numpy.zeros(length, dtype).view(Tensor)

    def set_num_threads(number):
        pass

    Size, uint8 = tuple, numpy.uint8
    """

HICACHE_FILE = """
    import os
    import numpy

    class HiCacheStorageConfig:
        def __init__(self, **fields):
            print("noise")

    class HiCacheFile:
        def __init__(self, config):
            self.folder = os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"]

        def path(self, key):
            return os.path.join(self.folder, key)

        def batch_set(self, keys, pages):
            for key, page in zip(keys, pages):
                with open(self.path(key), "wb") as file:
                    file.write(page.numpy().tobytes())
            return True

        def batch_get(self, keys, targets):
            for key, target in zip(keys, targets):
                with open(self.path(key), "rb") as file:
                    target.copy_(numpy.frombuffer(file.read(), dtype=numpy.uint8))
            return targets

        def batch_exists(self, keys):
            return sum(os.path.exists(self.path(key)) for key in keys)
    """

FS_NATIVE = """
    import os

    class Adapter:
        def __init__(self, spec):
            assert spec["type"] == "fs_native" and spec["num_workers"] in (1, 2)
            self.folder, self.tasks, self.ended = spec["base_path"], 0, {}
            self.events = [os.eventfd(0), os.eventfd(0)]

        def get_store_event_fd(self):
            return self.events[0]

        def get_load_event_fd(self):
            return self.events[1]

        def path(self, key):
            return os.path.join(self.folder, key.chunk_hash.hex())

        def end(self, event):
            self.tasks += 1
            self.ended[self.tasks] = True
            os.eventfd_write(self.events[event], 1)
            return self.tasks

        def submit_store_task(self, keys, objects):
            for key, page in zip(keys, objects):
                with open(self.path(key), "wb") as file:
                    file.write(page.raw_data.numpy().tobytes())
            return self.end(0)

        def submit_load_task(self, keys, objects):
            for key, page in zip(keys, objects):
                with open(self.path(key), "rb") as file:
                    file.readinto(page.raw_data.numpy())
            return self.end(1)

        def pop_completed_store_tasks(self):
            ended, self.ended = self.ended, {}
            return ended

        def query_load_result(self, task):
            return self.ended.pop(task, None)

        def close(self):
            for event in self.events:
                os.close(event)

    create_l2_adapter = Adapter
    """

LMCACHE_MODULES = {
    "__init__": "",
    "v1/distributed/api": """
        from collections import namedtuple
        ObjectKey = namedtuple("ObjectKey", "chunk_hash model_name kv_rank")
        """,
    "v1/memory_management": """
        from types import SimpleNamespace
        MemoryFormat = SimpleNamespace(KV_2LTD=1)
        MemoryObjMetadata = TensorMemoryObj = SimpleNamespace
        """,
    "v1/distributed/l2_adapters/__init__": FS_NATIVE,
    "v1/distributed/l2_adapters/config": """
        import json
        from types import SimpleNamespace

        def parse_args_to_l2_adapters_config(arguments):
            return SimpleNamespace(adapters=[json.loads(arguments.l2_adapter[0])])
        """,
}


def write_module(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source), encoding="utf-8")


def hicache_file(home: Path) -> Path:
    return home / "venv-sglang/sglang-0.5.23/sglang/srt/mem_cache/hicache_storage.py"


def fs_native(home: Path) -> Path:
    return home / "venv-lmcache/site/lmcache/v1/distributed/l2_adapters/__init__.py"


def tamper(path: Path, source: str, replacement: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert source in text
    path.write_text(text.replace(source, replacement), encoding="utf-8")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for peers whose two systems, and their torch, are as small as the drivers allow."""
    site = tmp_path / "venv-lmcache/site"
    for name, setting in (("sglang", ""), ("lmcache", f'PYTHONPATH="{site}" ')):
        python = tmp_path / f"venv-{name}/bin/python"
        write_module(python, f'#!/bin/sh\n{setting}exec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    write_module(hicache_file(tmp_path), HICACHE_FILE)
    version = '__version__ = "0.0"'
    write_module(tmp_path / "venv-sglang/sglang-0.5.23/sglang/__init__.py", version)
    for folder in (site, tmp_path / "venv-sglang/sglang-0.5.23"):
        write_module(folder / "torch.py", TORCH)
    for module, source in LMCACHE_MODULES.items():
        write_module(site / f"lmcache/{module}.py", source)
    metadata = "Metadata-Version: 2.1\nName: lmcache\nVersion: 0.0\n"
    write_module(site / "lmcache-0.0.dist-info/METADATA", metadata)
    monkeypatch.setenv("HICACHE_PEERS_HOME", str(tmp_path))
    return tmp_path


def run(*, peers: frozenset[str] = PEERS, step: int = 0) -> list[Result]:
    steps = [
        step
        for step in benchmarks.store.steps(quick=True, peers=peers, sizes=SIZES)
        if step.label in ("0 KiB pages, warm", "looks")
    ]
    return list(steps[step].run())


@pytest.mark.usefixtures("home")
def test_every_system_has_a_row_of_each_kind_with_its_median() -> None:
    results = run()
    assert [(one.name, one.params["threads"], one.peer) for one in results] == [
        (name, threads, peer)
        for name, calls in (("read_warm", ("preadv", "preadv_xxh3")), ("write_warm", ("pwritev",)))
        for threads in (1, 2)
        for peer in ("memcpy", *calls, *NAMES)
    ]
    assert all(one.ratio is not None and one.ratio > 0 for one in results)


@pytest.mark.usefixtures("home")
def test_looks_stand_beside_those_of_a_system_that_answers_at_once() -> None:
    (look,) = run(step=1)
    assert (look.name, look.peer) == ("exists_4", NAMES[0])
    assert [(bar.limit, bar.statistic) for bar in look.bars] == [(50, "median")]


@pytest.mark.parametrize(
    ("module", "source", "replacement", "name"),
    [
        (hicache_file, "file.read()", "file.read()[::-1]", NAMES[0]),
        (hicache_file, "return targets", "return [None for _ in targets]", NAMES[0]),
        (fs_native, "file.readinto", "len", NAMES[1]),
    ],
)
def test_a_system_that_brings_a_wrong_byte_gives_no_figure(
    module: Callable[[Path], Path], source: str, replacement: str, name: str, home: Path
) -> None:
    tamper(module(home), source, replacement)
    with pytest.raises(CheckFailed, match=rf"page \d+ is not what {name} was given"):
        run()


def test_a_system_that_misses_a_page_when_it_looks_gives_no_figure(home: Path) -> None:
    tamper(hicache_file(home), "for key in keys)", "for key in keys[1:])")
    with pytest.raises(CheckFailed, match=f"{NAMES[0]} finds 3 of 4 pages"):
        run(step=1)


def test_a_system_that_fails_later_is_left_out_of_the_rows_with_the_reason(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(fs_native(home), "def query_load_result", "def other")
    assert {one.peer for one in run()} == {
        "memcpy",
        "preadv",
        "preadv_xxh3",
        "pwritev",
        NAMES[0],
    }
    error = "AttributeError: 'Adapter' object has no attribute 'query_load_result'"
    assert f"skipped {NAMES[1]}, which does not run here: {error}" in capsys.readouterr().err


def test_a_system_that_does_not_start_is_named_once_and_left_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(hicache_file(home), "import os", "raise ImportError('no GPU')")
    steps = benchmarks.store.steps(quick=True, peers=PEERS, sizes=SIZES)
    for step in steps:
        if step.label in ("0 KiB pages, warm", "looks"):
            assert NAMES[0] not in {one.peer for one in step.run()}
    message = "skipped sglang's file, which does not run here: ImportError: no GPU"
    assert capsys.readouterr().err.count(message) == 1


def test_systems_that_are_not_installed_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HICACHE_PEERS_HOME", str(tmp_path))
    assert main(["hash", "--quick", "--peers", "sglang,lmcache"]) == 0
    captured = capsys.readouterr()
    for name in PEERS:
        assert captured.err.count(f"{name} is not installed in {tmp_path}") == 1
