"""The same tokens and bytes with and without the cache, whatever the options, through a restart."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from pairwise import pairwise
from serving import Variant, Workload, answers_without_cache, finish, make_engine
from shadow import Shadow

from hicache.engine.demo_phase import compare_answers
from hicache.engine.request import Request
from hicache.layout import HostLayout
from hicache.radix import CopyKind
from hicache.types import PrefetchPolicy, Tier, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicache.engine.engine import Engine
    from hicache.types import PageHash

FACTORS: dict[str, list[Any]] = {
    "write_policy": [policy.value for policy in WritePolicy],
    "prefetch_policy": [policy.value for policy in PrefetchPolicy],
    "layout": [layout.value for layout in HostLayout],
    "page_size": [16, 1, 64],
    "chunk_tokens": [96, 33, 1000],
    "attention": ["mha", "mla"],
    "dtype": ["float32", "bfloat16"],
    "num_aborts": [3, 0, 12],
    "write_by_layer": [True, False],
}
VARIANTS = [Variant(**row) for row in pairwise(FACTORS)]

Answers: TypeAlias = "Callable[[Variant, list[Request]], list[list[int]]]"


@dataclasses.dataclass
class Outcome:
    """What one row of the table has shown."""

    variant: Variant
    hit_tokens: dict[Tier, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Tier, 0))
    moved_bytes: dict[CopyKind, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(CopyKind, 0)
    )
    compared_bytes: int = 0
    num_answers: int = 0

    def note_hits(self, requests: list[Request]) -> None:
        for request in requests:
            self.hit_tokens[Tier.DEVICE] += request.device_hit_tokens
            self.hit_tokens[Tier.HOST] += request.host_hit_tokens
            self.hit_tokens[Tier.STORAGE] += request.storage_hit_tokens

    def note_moved(self, engine: Engine) -> None:
        assert engine.cache is not None
        for kind, stats in engine.cache.controller.stats.items():
            self.moved_bytes[kind] += stats.num_bytes

    def cells(self) -> list[str]:
        return [
            *(str(value) for value in dataclasses.astuple(self.variant)),
            *(str(tokens) for tokens in self.hit_tokens.values()),
            *(f"{num_bytes / 1e6:.1f}" for num_bytes in self.moved_bytes.values()),
            str(self.num_answers or "-"),
        ]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[Outcome]]:
    """Collects the rows and prints them in the end; `-s` shows it."""
    found: list[Outcome] = []
    yield found
    head = ["write", "prefetch", "layout", "page", "chunk", "attention", "dtype", "aborts"]
    head += ["by layer"]
    head += [f"{tier.value} hits" for tier in Tier]
    head += [f"{kind.value} MB" for kind in CopyKind]
    head += ["equal answers"]
    table = [head, *(outcome.cells() for outcome in found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("\n" + "  ".join(cells))


@pytest.fixture(scope="module")
def uncached() -> Answers:
    """Answers without a cache; each prompt is computed once for all variants with its model."""
    engines: dict[str, Engine] = {}
    known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def answers(variant: Variant, requests: list[Request]) -> list[list[int]]:
        plain = Variant(attention=variant.attention)
        engine = engines.setdefault(variant.attention, make_engine(plain, None))
        keys = [(variant.attention, tuple(request.prompt_ids)) for request in requests]
        for key, request in zip(keys, requests, strict=True):
            if key not in known:
                (known[key],) = answers_without_cache([request], engine)
        return [known[key] for key in keys]

    return answers


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_answers_and_loaded_bytes_are_those_without_the_cache(
    variant: Variant, tmp_path: Path, uncached: Answers, outcomes: list[Outcome]
) -> None:
    """Rounding depends on the shape of a batch: of 16-bit models only the bytes are promised."""
    workload, outcome = Workload(seed=1), Outcome(variant)
    record: dict[PageHash, bytes] = {}
    for restarted in (False, True):
        shadow = Shadow(record)
        engine = make_engine(variant, tmp_path, factory=shadow)
        shadow.watch(engine)
        for turn in range(2):
            requests = workload.serve_turn(
                engine, num_aborts=variant.num_aborts, alone=restarted and turn == 0
            )
            answers = [request.output_ids for request in requests]
            assert all(len(answer) == 32 for answer in answers)
            if variant.dtype == "float32":
                assert answers == uncached(variant, requests)
                outcome.num_answers += len(answers)
            outcome.note_hits(requests)
        finish(engine)
        outcome.note_moved(engine)
        outcome.compared_bytes += shadow.num_bytes
        assert shadow.faults == []
        shadow.close()
    outcomes.append(outcome)
    assert outcome.compared_bytes == outcome.moved_bytes[CopyKind.LOAD]
    assert all(outcome.moved_bytes.values()), outcome
    assert all(outcome.hit_tokens.values()), outcome


def test_every_two_options_are_together_in_some_variant() -> None:
    rows = [dataclasses.asdict(variant) for variant in VARIANTS]
    for one, other in itertools.combinations(FACTORS, 2):
        wanted = set(itertools.product(FACTORS[one], FACTORS[other]))
        assert {(row[one], row[other]) for row in rows} == wanted


@pytest.mark.parametrize("attention", FACTORS["attention"])
def test_one_wrong_page_in_the_host_pool_turns_both_comparisons_red(
    attention: str, tmp_path: Path
) -> None:
    variant, shadow = Variant(attention=attention), Shadow({})
    engine = make_engine(variant, tmp_path, factory=shadow)
    plain = make_engine(variant, None)
    host_pool = shadow.watch(engine)
    prompt = [(7 * n) % 250 for n in range(200)]
    engine.run(Request("first", prompt, max_new_tokens=4))
    assert engine.settle()
    assert engine.cache is not None
    engine.cache.evict(10_000)
    found = engine.cache.match_prefix(Request("x", prompt, max_new_tokens=1).prompt_key)
    assert found.host_hit_tokens >= 192
    assert found.last_host_node.host_pages is not None
    host_pool.layer_parts(2)[0][found.last_host_node.host_pages[3]] += 1.0

    damaged, sound = (Request(name, prompt, max_new_tokens=32) for name in ("damaged", "sound"))
    engine.run(damaged)
    plain.run(sound)

    assert damaged.host_hit_tokens >= 192
    difference = compare_answers(0, 0, damaged, sound)
    assert difference is not None
    assert not difference.near_tie
    assert [fault.split(":")[0] for fault in shadow.faults] == ["layer 2"]
    finish(engine)
    shadow.close()
