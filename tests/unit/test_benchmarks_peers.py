"""Laws of running beside another system: both do the same work, and both are checked."""

from __future__ import annotations

import base64
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import benchmarks.hash
from benchmarks.__main__ import main
from benchmarks.forest import Cycle, run_cycle
from benchmarks.harness import CheckFailed
from benchmarks.peers.process import PeerFailed
from benchmarks.peers.sglang_process import SglangProcess, find_sglang
from benchmarks.peers.sglang_rows import TreeRows
from benchmarks.prompt import Prompt
from hicache.radix import RadixKey, RadixTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE_SIZE = 4
PROMPTS = tuple(
    Prompt.create(num_tokens=64, num_nodes=num_nodes, page_size=PAGE_SIZE) for num_nodes in (1, 16)
)
ROWS = TreeRows(prompts=PROMPTS, leaves=(20, 40), insert_leaves=20, matches_per_cycle=3, samples=20)


class OwnTree(SglangProcess):
    """Answers as SGLang's process does, from a tree of hicache in this process."""

    def __init__(self, create_tree: Callable[[int], RadixTree] = RadixTree) -> None:
        self.name = "double"
        self._create_tree = create_tree

    def call(self, do: str, /, **arguments: Any) -> Any:
        return getattr(self, f"_{do}")(**arguments)

    def _reset(self, page_size: int) -> bool:
        self._tree = self._create_tree(page_size)
        self._keys: dict[int, RadixKey] = {}
        return False

    def _insert(self, tokens: str, lengths: list[int], paths: list[list[int]]) -> None:
        ids, start = unpack(tokens), 0
        for length, path in zip(lengths, paths, strict=True):
            self._keys[path[-1]] = key = RadixKey(ids[start : start + length])
            self._tree.insert(key, np.array(path, dtype=np.int64))
            start += length

    def _match(self, page: int, start: str, slots: bool, samples: int) -> dict[str, Any]:
        path = self._tree.match(self._keys[page]).device_pages.tolist()
        return {"times": [1.0] * samples, "path": path}

    def _lock_unlock(self, page: int, samples: int) -> dict[str, Any]:
        node = self._tree.match(self._keys[page]).last_device_node
        self._tree.lock(node)
        protected = [self._tree.protected_size]
        self._tree.unlock(node)
        return {"times": [1.0] * samples, "protected": [*protected, self._tree.protected_size]}

    def _cycles(self, tokens: str, length: int, cycles: list[Any]) -> list[dict[str, Any]]:
        answers = []
        for ids, (chosen, path) in zip(unpack(tokens).reshape(-1, length), cycles, strict=True):
            keys = [self._keys[page] for page in chosen]
            self._keys[path[-1]] = key = RadixKey(ids)
            answers.append(run_cycle(self._tree, Cycle(chosen, keys, key, path, -1))._asdict())
        return answers


def unpack(tokens: str) -> Any:
    return np.frombuffer(base64.b64decode(tokens), dtype=np.int32)


def test_every_row_of_the_tree_names_the_peer_and_has_its_median() -> None:
    results = ROWS(OwnTree())
    assert {result.peer for result in results} == {"double"}
    assert all(result.ratio is not None and result.ratio > 0 for result in results)
    names = [result.name for result in results]
    assert {name: names.count(name) for name in names} == {
        "match": 8, "lock_unlock": 1, "insert": 1, "evict": 4,
    }  # fmt: skip


class EvictsTwo(RadixTree):
    def evict(self, num_pages: int, **options: Any) -> Any:
        return super().evict(num_pages + 1, **options)


class MatchesLess(RadixTree):
    def match(self, key: RadixKey) -> Any:
        return super().match(key.prefix(len(key) - PAGE_SIZE))


class LocksNothing(RadixTree):
    def lock(self, node: Any) -> None:
        pass

    def unlock(self, node: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("create_tree", "complaint"),
    [
        (MatchesLess, "match of double gives other pages"),
        (LocksNothing, "lock and unlock of double protect"),
        (EvictsTwo, "evict freed"),
    ],
)
def test_a_peer_that_is_wrong_fails_the_check(
    create_tree: Callable[[int], RadixTree], complaint: str
) -> None:
    with pytest.raises(CheckFailed, match=complaint):
        ROWS(OwnTree(create_tree))


# -- a peer's process -----------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for peers in which SGLang is installed as a package that only hashes."""
    python = tmp_path / "venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    package = tmp_path / "venv-sglang" / "sglang-0.5.23" / "sglang"
    (package / "srt" / "mem_cache").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.0"\nprint("noise")\n')
    write_hasher(tmp_path, "previous + data[offset:offset + step]")
    monkeypatch.setenv("HICACHE_PEERS_HOME", str(tmp_path))
    return tmp_path


def write_hasher(home: Path, hashed: str) -> None:
    source = f"""
        import hashlib
        from array import array

        def get_hash_str(ids, prior, *, page_size):
            data, step, previous, hashes = array("I", ids).tobytes(), 4 * page_size, b"", []
            for offset in range(0, len(data), step):
                previous = hashlib.sha256({hashed}).digest()
                hashes.append(previous.hex())
            return hashes
        """
    module = home / "venv-sglang" / "sglang-0.5.23" / "sglang" / "srt" / "mem_cache" / "utils.py"
    module.write_text(textwrap.dedent(source))


def beside(label: str) -> Any:
    sizes = benchmarks.hash.Sizes(tokens=64, page_size=4, samples=10)
    steps = benchmarks.hash.steps(quick=True, peers=frozenset({"sglang"}), sizes=sizes)
    (step,) = [step for step in steps if step.label == label]
    return step


@pytest.mark.usefixtures("home")
def test_a_peers_process_does_the_work_whatever_it_prints_besides() -> None:
    (result,) = beside("beside SGLang's hash").run()
    assert (result.name, result.peer, result.samples) == ("hash_pages", "sglang-0.0-hash", 10)
    assert result.peer_median is not None
    assert result.peer_median > 0


def test_a_peers_process_that_gives_other_hashes_fails_the_check(home: Path) -> None:
    write_hasher(home, "data[offset:offset + step]")
    with pytest.raises(CheckFailed, match=r"sglang-0\.0-hash gives other hashes"):
        beside("beside SGLang's hash").run()


def test_a_peer_that_does_not_run_is_skipped_and_the_reason_given(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hasher(home, "no_such_name")
    assert beside("beside SGLang's hash").run() == []
    assert "skipped SGLang's hash" in capsys.readouterr().err
    core = find_sglang(home)[0]
    core.python.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(PeerFailed, match="ended without an answer"):
        SglangProcess(core)


def test_the_newer_release_is_there_only_where_it_was_unpacked(home: Path) -> None:
    both = [(core.core, core.source is not None) for core in find_sglang(home)]
    assert both == [
        ("radix", False), ("hiradix", False), ("unified-rust", False), ("unified-rust", True),
        ("hash", True),
    ]  # fmt: skip
    (home / "venv-sglang" / "sglang-0.5.23" / "sglang" / "__init__.py").unlink()
    assert {core.source for core in find_sglang(home)} == {None}


def test_a_peer_that_is_not_installed_is_named_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HICACHE_PEERS_HOME", str(tmp_path))
    assert main(["hash", "--quick", "--peers", "sglang"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(f"sglang is not installed in {tmp_path}") == 1
    assert "hash_pages" in captured.out


def test_an_unknown_peer_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["hash", "--peers", "nobody"])
    assert exit_info.value.code == 2
    assert "unknown nobody; known: lmcache, sglang" in capsys.readouterr().err
