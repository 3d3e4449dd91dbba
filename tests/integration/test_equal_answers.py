"""The same tokens with and without the cache, whatever the options, through a restart."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from serving import Variant, Workload, answers_without_cache, finish, make_engine

from hicache.engine.demo_phase import compare_answers
from hicache.engine.request import Request
from hicache.radix import CopyKind
from hicache.types import Tier

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.engine.engine import Engine

VARIANTS = [
    Variant(write_policy, prefetch_policy, layout, page_size, chunk_tokens)
    for (write_policy, prefetch_policy, layout, page_size), chunk_tokens in zip(
        itertools.product(
            ("write_through", "write_back"),
            ("wait_complete", "best_effort"),
            ("page_first", "layer_first"),
            (16, 64),
        ),
        itertools.cycle((96, 33, 1000)),
        strict=False,
    )
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_answers_are_equal_and_every_movement_happens(variant: Variant, tmp_path: Path) -> None:
    workload = Workload(seed=1)
    plain = make_engine(variant, None)
    tiers: set[Tier] = set()
    moved = dict.fromkeys(CopyKind, 0)
    for num_turns in (3, 2):  # with a restart between
        engine = make_engine(variant, tmp_path)
        for _ in range(num_turns):
            requests = workload.serve_turn(engine, num_aborts=3)
            answers = [request.output_ids for request in requests]
            assert answers == answers_without_cache(requests, plain)
            assert all(len(answer) == 32 for answer in answers)
            tiers |= tiers_hit(requests)
        finish(engine)
        for kind, num_bytes in bytes_moved(engine).items():
            moved[kind] += num_bytes
    assert all(moved.values()), moved
    assert tiers == set(Tier)


def tiers_hit(requests: list[Request]) -> set[Tier]:
    """Return the tiers in which some prompt's tokens were found."""
    hits = {
        Tier.DEVICE: sum(request.device_hit_tokens for request in requests),
        Tier.HOST: sum(request.host_hit_tokens for request in requests),
        Tier.STORAGE: sum(request.storage_hit_tokens for request in requests),
    }
    return {tier for tier, tokens in hits.items() if tokens}


def bytes_moved(engine: Engine) -> dict[CopyKind, int]:
    """Return the bytes of each movement of an engine's cache."""
    assert engine.cache is not None
    return {kind: stats.num_bytes for kind, stats in engine.cache.controller.stats.items()}


def test_one_wrong_page_in_the_host_pool_turns_the_comparison_red(tmp_path: Path) -> None:
    variant = Variant()
    engine, plain = make_engine(variant, tmp_path), make_engine(variant, None)
    prompt = [(7 * n) % 250 for n in range(200)]
    engine.run(Request("first", prompt, max_new_tokens=4))
    assert engine.settle()
    cache = engine.cache
    assert cache is not None
    cache.evict(10_000)
    found = cache.match_prefix(Request("x", prompt, max_new_tokens=1).prompt_key)
    assert found.host_hit_tokens >= 192
    host_pool = engine_host_pool(engine)
    page = int(found.last_host_node.host_pages[3])  # type: ignore[index]
    host_pool.key_pages(2)[page] += 1.0  # type: ignore[attr-defined]

    damaged = Request("second", prompt, max_new_tokens=32)
    engine.run(damaged)
    sound = Request("plain", prompt, max_new_tokens=32)
    plain.run(sound)

    assert damaged.host_hit_tokens >= 192
    difference = compare_answers(0, 0, damaged, sound)
    assert difference is not None
    assert not difference.near_tie
    finish(engine)


def engine_host_pool(engine: Engine) -> object:
    """Return the host pool behind an engine's cache, to damage it."""
    assert engine.cache is not None
    mover = engine.cache.controller._mover
    return mover._pairs[0].host_pool  # type: ignore[attr-defined]
