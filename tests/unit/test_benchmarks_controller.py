"""Laws of the benchmarks of calls and of first tokens: figures of a cache that is whole."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import benchmarks.controller
import benchmarks.e2e
from benchmarks.harness import CheckFailed
from benchmarks.rank_steps import RankSteps
from benchmarks.scheduler import CacheSizes, open_cache
from hicache.layout import KVGeometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks.harness import Result, Step
    from benchmarks.scheduler import Served

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16", page_size=4)
SIZES = benchmarks.controller.Sizes(
    calls=CacheSizes(geometry=GEOMETRY, device_pages=80, host_pages=80),
    call_pages=(1, 3),
    prefetch_tokens=320,
    samples=5,
    load=CacheSizes(geometry=GEOMETRY, device_pages=300, host_pages=600),
    load_prompts=16,
    load_prompt_pages=80,
    load_seconds=0.7,
)


def run(steps: list[Step], label: str) -> list[Result]:
    (step,) = [step for step in steps if step.label == label]
    return list(step.run())


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("idle", "check_hicache_events"),
        ("write 3 pages", "write_through_per_page"),
        ("load 3 pages", "load_back"),
        ("prefetch", "prefetch_from_storage"),
    ],
)
def test_each_call_is_timed_alone(label: str, name: str) -> None:
    (result,) = run(benchmarks.controller.steps(quick=True, sizes=SIZES), label)
    assert (result.name, result.unit) == (name, "us")
    assert 0 < result.median <= result.p99


def test_an_idle_step_of_several_ranks_is_one_agreement_and_little_else() -> None:
    results = list(RankSteps(cache=SIZES.calls, num_ranks=(2,), samples=5)())
    assert [(one.name, one.params["ranks"], one.peer) for one in results] == [
        ("check_hicache_events", 2, "all_reduce"),
        ("agreements_per_step", 2, None),
    ]
    assert results[1].median == 1
    assert [bar.limit for bar in results[1].bars] == [1]


def test_what_ends_an_idle_cache_is_timed_by_name() -> None:
    results = run(benchmarks.controller.steps(quick=True, sizes=SIZES), "life cycle")
    assert [one.name for one in results] == ["reset", "detach", "attach", "close"]
    assert {one.samples for one in results} == {3}
    assert all(one.bars for one in results)


@pytest.mark.parametrize("background", ["quiet", "full"])
def test_under_load_every_call_is_timed_and_all_four_movements_are_moving(background: str) -> None:
    steps = benchmarks.controller.steps(quick=True, sizes=SIZES)
    results = run(steps, f"calls, {background} background")
    calls = {str(one.params["call"]) for one in results if one.name == "call"}
    assert calls == {
        "loop", "check_hicache_events", "prefetch_from_storage", "check_prefetch_progress",
        "match_prefix", "inc_lock_ref", "init_load_back", "ready_to_load_host_cache", "insert",
        "dec_lock_ref", "evict",
    }  # fmt: skip
    moved = {one.params["movement"]: one.median for one in results if one.name == "moved"}
    assert moved.keys() == {"write", "load", "persist", "prefetch"}
    assert min(moved.values()) > 0


@contextmanager
def losing_a_page(sizes: CacheSizes, storage: Mapping[str, object] | None) -> Iterator[Served]:
    with open_cache(sizes, storage) as served:
        yield served
        served.allocator.alloc(1)


@pytest.mark.parametrize("label", ["idle", "calls, full background"])
def test_a_cache_that_has_lost_a_page_gives_no_figure(label: str) -> None:
    steps = benchmarks.controller.steps(quick=True, sizes=SIZES, open_cache=losing_a_page)
    with pytest.raises(CheckFailed, match=r"1 device page\(s\) have no owner"):
        run(steps, label)


# -- time to first token --------------------------------------------------------------------------

TTFT_SIZES = benchmarks.e2e.Sizes(num_turns=2, rounds=1, prompt_tokens=(128, 192), real_model=False)


def test_the_first_token_is_timed_from_every_tier_beside_computing() -> None:
    (step,) = benchmarks.e2e.steps(quick=True, sizes=TTFT_SIZES)
    results = step.run()
    rows = [(one.name, one.params["tier"], one.peer, one.samples) for one in results]
    assert rows == [
        ("ttft", "none", None, 2),
        ("ttft", "L1", "computed", 2),
        ("ttft", "L2", "computed", 2),
        ("ttft", "L3", "computed", 2),
        ("loading_share", "L2", None, 2),
        ("loading_share", "L3", None, 2),
    ]
    assert {one.params["prompt_tokens"] for one in results} == {"168-232"}


def test_an_answer_that_differs_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    run_request = benchmarks.e2e._Bench._run

    def tampered(bench: Any, engine: Any, prompt: Any) -> Any:
        request = run_request(bench, engine, prompt)
        if engine.cache is not None:
            first = request.choices[0]
            request.choices[0] = dataclasses.replace(first, token_ids=first.token_ids[::-1])
        return request

    monkeypatch.setattr(benchmarks.e2e._Bench, "_run", tampered)
    (step,) = benchmarks.e2e.steps(quick=True, sizes=TTFT_SIZES)
    with pytest.raises(CheckFailed, match="the answer from L3 differs"):
        step.run()


def test_a_hit_in_another_tier_than_named_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.e2e._Bench, "_leave_only", lambda bench, tier: None)
    (step,) = benchmarks.e2e.steps(quick=True, sizes=TTFT_SIZES)
    with pytest.raises(CheckFailed, match="instead of 128 tokens were found in L3"):
        step.run()
