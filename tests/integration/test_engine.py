"""The reference engine under memory pressure, aborts, failed loads and bad input."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from serving import MODEL, Variant, answers_without_cache, finish, make_engine
from storage_damage import flip

from hicache.engine.request import FinishReason, Request
from hicache.errors import ConfigError
from hicache.radix import CopyKind
from hicache.storage.page_store import list_pages
from hicache.testing.invariants import check_system

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from hicache.engine.engine import Engine
    from hicache.transfer import TorchTransferEngine, TransferPlan


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(num_tokens)]


def host_engine(engine: Engine) -> TorchTransferEngine:
    """Return the copy engine of an engine's cache, to make it fail."""
    assert engine.cache is not None
    pairs = engine.cache.controller._mover._pairs  # type: ignore[attr-defined]
    transfer: TorchTransferEngine = pairs[0].engine
    return transfer


@pytest.mark.parametrize("cached", [True, False])
def test_requests_that_outgrow_the_pool_together_are_retracted_and_still_right(
    cached: bool, tmp_path: Path
) -> None:
    engine = make_engine(Variant(), tmp_path if cached else None)
    plain = make_engine(Variant(), None)
    # Both fit when admitted; while they decode they need 25 pages each of the pool's 48.
    requests = [Request(str(n), prompt_of(n, 368), max_new_tokens=32) for n in range(2)]
    engine.run(*requests)
    assert [r.output_ids for r in requests] == answers_without_cache(requests, plain)
    if cached:
        finish(engine)


def test_a_failed_load_is_computed_instead_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = make_engine(Variant(), tmp_path), make_engine(Variant(), None)
    prompt = prompt_of(1, 200)
    engine.run(Request("first", prompt, max_new_tokens=1))
    assert engine.settle()
    assert engine.cache is not None
    engine.cache.evict(1_000)
    transfer = host_engine(engine)
    load_layer = transfer.load_layer

    def fail_at_layer_2(plan: TransferPlan, layer: int) -> None:
        if layer == 2:
            raise OSError("the link is down")
        load_layer(plan, layer)

    monkeypatch.setattr(transfer, "load_layer", fail_at_layer_2)
    request = Request("second", prompt, max_new_tokens=32)
    engine.run(request)

    assert request.num_failed_loads == 1
    assert [request.output_ids] == answers_without_cache([request], plain)
    stats = engine.cache.controller.stats
    assert [s.outcomes["failed"] for s in stats.values() if s.outcomes["failed"]] == [1]
    finish(engine)


def test_pages_of_a_prompt_are_written_while_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = make_engine(Variant(chunk_tokens=64), tmp_path), make_engine(Variant(), None)
    assert engine.cache is not None
    mover: Any = engine.cache.controller._mover
    finished_in_time: list[bool] = []
    take_results = engine._take_results

    def watched(batch: Any, choices: Any) -> None:
        # All layers were announced in the pass: none is left to be copied at the insertion.
        finished_in_time.append(not len(mover._layer_writes))
        take_results(batch, choices)

    monkeypatch.setattr(engine, "_take_results", watched)
    request = Request("one", prompt_of(1, 200), max_new_tokens=32)
    engine.run(request)
    assert [request.output_ids] == answers_without_cache([request], plain)
    assert all(finished_in_time)
    assert engine.settle()
    writes = engine.cache.controller.stats[CopyKind.WRITE]
    # Three chunks complete pages of the prompt; decoding has filled more in the end.
    assert (writes.outcomes["ok"], writes.outcomes["abandoned"]) == (4, 0)
    assert engine.cache.counters["abandoned_write_pages"] == 0
    finish(engine)


def test_a_pass_that_fails_gives_up_what_was_reserved_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = make_engine(Variant(), tmp_path), make_engine(Variant(), None)
    assert engine.cache is not None
    prompt = prompt_of(1, 150)
    engine.run(Request("first", prompt[:100], max_new_tokens=1))
    assert engine.settle()
    engine.cache.evict(1_000)
    transfer = host_engine(engine)
    load_layer = transfer.load_layer

    def fail_at_layer_1(plan: TransferPlan, layer: int) -> None:
        if layer == 1:
            raise OSError("the link is down")
        load_layer(plan, layer)

    monkeypatch.setattr(transfer, "load_layer", fail_at_layer_1)
    request = Request("second", prompt, max_new_tokens=32)
    engine.run(request)
    assert [request.output_ids] == answers_without_cache([request], plain)
    assert request.num_failed_loads == 1
    assert engine.settle()
    assert engine.cache.controller.stats[CopyKind.WRITE].outcomes["abandoned"] == 1
    finish(engine)


def test_a_page_damaged_in_storage_shortens_the_hit_and_never_the_answer(tmp_path: Path) -> None:
    """C041: storage promises 12 pages by their length and delivers 5."""
    first, plain = make_engine(Variant(), tmp_path), make_engine(Variant(), None)
    prompt = prompt_of(2, 200)
    first.run(Request("first", prompt, max_new_tokens=1))
    finish(first)
    pages = list(list_pages(str(tmp_path)))
    assert len(pages) == 12
    flip(pages[5], -7)

    second = make_engine(Variant(), tmp_path)
    request = Request("second", prompt, max_new_tokens=32)
    second.run(request)
    assert 0 < request.storage_hit_tokens < 192
    assert [request.output_ids] == answers_without_cache([request], plain)
    finish(second)


def test_aborts_in_every_state_leave_nothing_behind(tmp_path: Path) -> None:
    engine = make_engine(Variant(), tmp_path)
    assert engine.cache is not None
    for steps in range(12):
        requests = [Request(f"{steps}/{n}", prompt_of(n, 150), max_new_tokens=8) for n in range(4)]
        for request in requests:
            engine.submit(request)
        for _ in range(steps):
            engine.step()
        for request in requests:
            engine.abort(request.request_id)
            assert check_system(engine.cache, request_device_pages=engine.owned_pages()) == []
        assert not engine.waiting
        assert not engine.running
        assert all(r.finished for r in requests)
        if not steps:
            assert requests[0].finish_reason is FinishReason.ABORTED
    engine.abort("a request that never was")
    finish(engine)


def test_salts_keep_equal_prompts_apart_in_every_tier(tmp_path: Path) -> None:
    engine = make_engine(Variant(), tmp_path)
    prompt = prompt_of(3, 100)
    engine.run(Request("a", prompt, max_new_tokens=2, cache_salt="a"))
    other = Request("b", prompt, max_new_tokens=2, cache_salt="b")
    engine.run(other)
    assert other.computed_tokens == 100
    finish(engine)
    restarted = make_engine(Variant(), tmp_path)
    plain, same = (
        Request("c", prompt, max_new_tokens=2),
        Request("d", prompt, max_new_tokens=2, cache_salt="a"),
    )
    restarted.run(plain)
    restarted.run(same)
    assert plain.computed_tokens == 100
    assert same.storage_hit_tokens == 96
    finish(restarted)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("x", [], max_new_tokens=1), "at least one prompt token"),
        (Request("x", [1], max_new_tokens=0), "at least one prompt token"),
        (Request("x", [1] * 10_000, max_new_tokens=1), "make the pool larger"),
    ],
    ids=["no prompt", "nothing to generate", "larger than the pool"],
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(
    request_: Request, reason: str
) -> None:
    engine = make_engine(Variant(), None)
    with pytest.raises(ConfigError, match=reason):
        engine.submit(request_)
    assert not engine.waiting


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine(Variant(), None)
    engine.submit(Request("x", [1], max_new_tokens=1))
    with pytest.raises(ConfigError, match="in use"):
        engine.submit(Request("x", [2], max_new_tokens=1))


def test_a_layer_is_waited_for_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer i reads before layer i + 1 has arrived: the copy overlaps the computation."""
    engine = make_engine(Variant(), tmp_path)
    prompt = prompt_of(4, 200)
    engine.run(Request("first", prompt, max_new_tokens=1))
    assert engine.settle()
    assert engine.cache is not None
    engine.cache.evict(1_000)
    transfer = host_engine(engine)
    load_layer, read = transfer.load_layer, engine._pool.get_key_buffer
    computed: list[int] = []
    seen: dict[int, int] = {}

    def load_after_the_layer_before(plan: TransferPlan, layer: int) -> None:
        # Layer 0 goes at once; each other one only when the model has read the one before.
        while layer and layer - 1 not in computed:
            time.sleep(0.0005)
        load_layer(plan, layer)

    def note(layer: int) -> torch.Tensor:
        buffer = read(layer)
        computed.append(layer)
        seen[layer] = len(computed)
        return buffer

    monkeypatch.setattr(transfer, "load_layer", load_after_the_layer_before)
    monkeypatch.setattr(engine._pool, "get_key_buffer", note)
    request = Request("second", prompt, max_new_tokens=1)
    engine.run(request)
    assert request.host_hit_tokens == 192
    assert sorted(seen) == list(range(MODEL.config.num_layers))
    finish(engine)
