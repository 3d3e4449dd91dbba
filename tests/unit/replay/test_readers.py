"""Trace files of every format, and what is said about those that are broken."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from hicache.errors import ConfigError
from hicache.replay import TraceError, open_trace
from hicache.replay.trace import TraceFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOONCAKE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 1500, "input_length": 1024, "hash_ids": [0, 3]},
    {"timestamp": 1500, "input_length": 1500, "hash_ids": [4, 1, 2]},
]


def lines(objects: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def write_log(path: Path, objects: list[dict[str, Any]]) -> Path:
    path.write_text(lines(objects), encoding="utf-8")
    return path


def archive(path: Path, sessions: dict[str, Any]) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, session in sessions.items():
            raw = session if isinstance(session, bytes) else json.dumps(session).encode()
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def session(*requests: dict[str, Any], block_size: int = 64) -> dict[str, Any]:
    return {"id": "s", "block_size": block_size, "requests": list(requests)}


def turn(t: float, ids: list[int], *, tokens: int = 0) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens or 64 * len(ids), "out": 3, "hash_ids": ids}


def as_it_is(text: bytes) -> bytes:
    return text


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", as_it_is), (".xz", lzma.compress), (".gz", gzip.compress)]
)
def test_a_mooncake_file_reads_the_same_packed_or_not(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    path.write_bytes(pack(lines(MOONCAKE).encode()))
    trace = open_trace(path)
    assert (trace.format, trace.block_tokens) == (TraceFormat.MOONCAKE, 512)
    requests = list(trace)
    assert [request.arrival_seconds for request in requests] == [0.0, 1.5, 1.5]
    assert [request.input_tokens for request in requests] == [1030, 1024, 1500]
    assert [request.output_tokens for request in requests] == [7, 0, 0]


def test_a_block_is_known_by_its_whole_prefix(tmp_path: Path) -> None:
    requests = list(open_trace(write_log(tmp_path / "t.jsonl", MOONCAKE)))
    assert [request.blocks.tolist() for request in requests] == [[0, 1, 2], [0, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hash_ids": [0]}, "line 2: 1 hash_ids for 1024 input tokens, which are 2 blocks"),
        ({"hash_ids": "0"}, "line 2: 'hash_ids' must be a list of integers"),
        ({"hash_ids": [0, True]}, "line 2: 'hash_ids' must be a list of integers"),
        ({"timestamp": -1}, "line 2: its timestamp is before"),
        ({"timestamp": "now"}, "line 2: 'timestamp' must be a number"),
        ({"input_length": 1.5}, "line 2: 'input_length' must be an integer"),
        ({"output_length": -1}, "line 2: 'output_length' must be an integer"),
    ],
)
def test_a_wrong_line_of_a_mooncake_file_is_named(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    broken = [MOONCAKE[0], {**MOONCAKE[1], **change}]
    with pytest.raises(TraceError, match=complaint):
        list(open_trace(write_log(tmp_path / "t.jsonl", broken)))


def test_the_lines_before_a_broken_one_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(MOONCAKE[:1]) + "\n{oops\n", encoding="utf-8")
    requests = iter(open_trace(path))
    assert next(requests).input_tokens == 1030
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: not JSON"):
        next(requests)


def test_a_packed_file_that_is_cut_short_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(lines(MOONCAKE[:1] * 2000).encode())[:-20])
    with pytest.raises(TraceError, match=r"cannot be read after line \d+"):
        list(open_trace(path))


@pytest.mark.parametrize("text", ["", "\n", "[1]\n", '{"a": 1}\n'])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError):
        open_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there is no trace"):
        open_trace(tmp_path / "none.jsonl")


def test_a_block_of_no_tokens_is_refused(tmp_path: Path) -> None:
    path = write_log(tmp_path / "t.jsonl", MOONCAKE)
    with pytest.raises(ConfigError):
        open_trace(path, block_tokens=0)


def test_sessions_begin_at_drawn_times_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "t.tar.xz",
        {"agentic/b.json": session(turn(0, [2])), "agentic/a.json": session(turn(5.0, [1]))},
    )
    trace = open_trace(path)
    assert (trace.format, trace.block_tokens) == (TraceFormat.AGENTIC, 512)
    rng = random.Random(0)
    first, second = rng.uniform(0, 86400.0), rng.uniform(0, 86400.0)
    assert (round(first, 3), round(second, 3)) == (72958.048, 65487.260)
    assert [request.arrival_seconds for request in trace] == [second, first + 5.0]


def test_nested_requests_stand_in_place_and_keep_their_own_time(tmp_path: Path) -> None:
    nested = {"t": 100.0, "type": "subagent", "requests": [turn(1.0, [7]), turn(0.0, [8])]}
    path = archive(
        tmp_path / "t.tar.xz", {"a.json": session(turn(1.0, [5]), nested, turn(1.0, [6]))}
    )
    start = random.Random(0).uniform(0, 86400.0)
    requests = list(open_trace(path))
    assert [round(request.arrival_seconds - start, 6) for request in requests] == [0, 1, 1, 1]
    # Numbers are given in the order of the file: 5, 7, 8, 6.
    assert [request.blocks.tolist() for request in requests] == [[2], [0], [1], [3]]


def test_eight_ids_are_one_block_and_sessions_share_none(tmp_path: Path) -> None:
    ids = list(range(17))
    path = archive(
        tmp_path / "t.tar.xz",
        {
            "a.json": session(turn(0, ids), turn(1, ids[:16]), turn(2, ids[:15]), turn(3, [])),
            "b.json": session(turn(0, ids, tokens=1234)),
        },
    )
    requests = sorted(open_trace(path), key=lambda request: request.blocks[0])
    assert [request.blocks.tolist() for request in requests] == [
        [0, 1, 2],
        [0, 1],
        [0, 3],
        [4, 5, 6],
    ]
    assert [request.input_tokens for request in requests] == [17 * 64, 16 * 64, 15 * 64, 1234]


@pytest.mark.parametrize(
    ("sessions", "complaint"),
    [
        ({"a.json": b"{"}, "a.json: not JSON"),
        ({"a.json": [1]}, "a.json: not a JSON object"),
        ({"a.json": {"block_size": 64}}, "a.json: 'requests' must be a list of objects"),
        ({"a.json": session(turn(0, [1]), block_size=100)}, "no multiple of 100"),
        ({"a.json": session(turn(0, [1]), {"t": 0, "in": 64})}, "request 2: 'hash_ids'"),
        ({"a.txt": b""}, "holds no session"),
    ],
)
def test_a_broken_session_is_named(
    tmp_path: Path, sessions: dict[str, Any], complaint: str
) -> None:
    path = archive(tmp_path / "t.tar.xz", sessions)
    with pytest.raises(TraceError, match=complaint):
        list(open_trace(path))


def test_an_archive_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.tar.xz"
    path.write_bytes(b"no archive")
    with pytest.raises(TraceError, match="cannot be read as an archive"):
        list(open_trace(path))


def test_a_log_of_tokens_is_cut_into_blocks(tmp_path: Path) -> None:
    log = [
        {"tokens": [1, 2, 3, 4, 5], "timestamp": 1e9, "output_tokens": [6, 7]},
        {"tokens": [1, 2, 3, 9], "timestamp": 1e9 + 2.5, "output_tokens": 3},
        {"tokens": [1, 2, 3, 4, 5, 6, 7, 8], "timestamp": 1e9 + 2.5, "output_length": 4},
    ]
    requests = list(open_trace(write_log(tmp_path / "t.jsonl", log), block_tokens=3))
    assert [request.arrival_seconds for request in requests] == [0.0, 2.5, 2.5]
    assert [request.output_tokens for request in requests] == [2, 3, 4]
    assert [request.blocks.tolist() for request in requests] == [[0, 1], [0, 4], [0, 2, 5]]
    cached = requests[0].cached_blocks
    assert cached is not None
    assert cached.tolist() == [0, 2, 3]
    assert [request.cached_blocks for request in requests[1:]] == [None, None]


def test_words_of_a_prompt_stand_for_tokens(tmp_path: Path) -> None:
    log = [{"prompt": "you are  a\nbot"}, {"prompt": "you are a cat", "output": "meow meow"}]
    requests = list(open_trace(write_log(tmp_path / "t.jsonl", log), block_tokens=2))
    assert [request.blocks.tolist() for request in requests] == [[0, 1], [0, 2]]
    assert [request.output_tokens for request in requests] == [0, 2]


def test_a_tokenizer_file_cuts_prompts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    log = write_log(tmp_path / "t.jsonl", [{"prompt": "a b x"}, {"prompt": "a b y"}])
    first, second = open_trace(log, block_tokens=3, tokenizer=file)
    assert first.blocks.tolist() == second.blocks.tolist() == [0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"prompt": ""}, "line 2: give 'tokens'"),
        ({"prompt": 3}, "line 2: 'prompt' must be a text"),
        ({"tokens": ["a"]}, "line 2: 'tokens' must be a list of integers"),
        ({"tokens": [1], "timestamp": 4.0}, "line 2: its timestamp is before"),
    ],
)
def test_a_wrong_line_of_a_log_is_named(
    tmp_path: Path, line: dict[str, Any], complaint: str
) -> None:
    path = write_log(tmp_path / "t.jsonl", [{"tokens": [1], "timestamp": 5.0}, line])
    with pytest.raises(TraceError, match=complaint):
        list(open_trace(path))
