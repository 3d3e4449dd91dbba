"""Laws of counted bytecodes; and the present code runs no more of them than the stored one."""

from __future__ import annotations

import gc
import platform
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

import benchmarks.instructions
from benchmarks.bytecodes import count_bytecodes
from benchmarks.harness import run_steps
from benchmarks.stored_runs import read_stored, row_key

if TYPE_CHECKING:
    from types import FrameType

    from benchmarks.harness import Result

TOLERANCE = 1.1
"""How many times as many bytecodes as stored pass."""

TINY = benchmarks.instructions.Sizes(nodes=(3,), leaves=(20,), cycles=10, request_pages=(2,))
ADVICE = """
If this is meant, store the new counts with the change:
    python -m benchmarks instructions --json build/counts/instructions.json
    python -m benchmarks history add build/counts
"""


def add_up(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def test_each_turn_of_a_loop_runs_as_many_bytecodes() -> None:
    counts = [count_bytecodes(partial(add_up, turns))[1] for turns in (10, 20, 30)]
    assert counts[1] - counts[0] == counts[2] - counts[1] > 0


def test_calls_within_the_call_count_and_the_result_comes_back() -> None:
    direct, few = count_bytecodes(lambda: 0)
    nested, more = count_bytecodes(lambda: add_up(100))
    assert (direct, nested) == (0, 4950)
    assert more > few + 100


def test_a_tracer_and_the_garbage_collector_are_left_as_they_were_even_by_an_error() -> None:
    def tracer(frame: FrameType, event: str, argument: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with pytest.raises(ZeroDivisionError):
            count_bytecodes(lambda: 1 // 0)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert gc.isenabled()


def counted(sizes: benchmarks.instructions.Sizes) -> list[Result]:
    return run_steps(benchmarks.instructions.steps(quick=True, sizes=sizes), watch=sys.stderr)


def test_the_same_work_runs_the_same_bytecodes_again() -> None:
    first, again = ([(row_key(row), row.median) for row in counted(TINY)] for _ in range(2))
    assert first == again


def test_every_call_of_a_scheduler_and_of_the_tree_is_counted() -> None:
    assert {row.name for row in counted(TINY)} == {
        "match", "lock", "unlock", "insert", "evict", "match_prefix", "inc_lock_ref",
        "dec_lock_ref", "init_load_back", "ready_to_load_host_cache", "prefetch_from_storage",
        "check_prefetch_progress", "check_hicache_events",
    }  # fmt: skip


def test_the_code_runs_no_more_bytecodes_than_are_stored() -> None:
    python = ".".join(platform.python_version_tuple()[:2])
    stored = [run for run in read_stored("instructions") if run.python == python]
    if not stored:
        pytest.skip(f"no counts are stored for Python {python}")
    rows = {row_key(row): row.median for row in counted(benchmarks.instructions.Sizes())}
    before = {key: median for key, (median, _) in stored[-1].rows.items()}
    assert rows.keys() == before.keys(), f"other calls are counted than are stored.{ADVICE}"
    worse = [
        f"{key}: {count:g} bytecodes, {before[key]:g} stored"
        for key, count in rows.items()
        if count > TOLERANCE * before[key]
    ]
    assert not worse, "\n".join(["more bytecodes than stored:", *worse, ADVICE])
