"""What storage has for several requests is fetched once; the others wait for it."""

from __future__ import annotations

import pytest
from scheduling_rig import DOCUMENT, SchedulingRig, answers_alone, ask, request, store_with, tokens
from scripted_parts import Barrier

from hicache.radix import CopyKind
from hicache.storage.memory import MemoryPages
from hicache.testing.faulty_storage import Verb


def test_what_storage_has_is_fetched_once() -> None:
    gates = {Verb.GET: Barrier()}
    gates[Verb.GET].shut()
    with SchedulingRig(store=store_with(DOCUMENT), gates=gates) as rig:
        requests = [ask(number, answer=4) for number in range(4)]
        rig.submit(*requests)
        for _ in range(20):
            assert rig.engine.step() == []
            assert rig.cache.controller.in_flight[CopyKind.PREFETCH] == 1
        gates[Verb.GET].open()
        assert rig.run() - 3 * 4 == sum(20 + number for number in range(4))
        assert rig.cache.controller.stats[CopyKind.PREFETCH].num_pages == len(DOCUMENT) // 16
        hits = [(one.storage_hit_tokens, one.delayed_hit_tokens) for one in requests]
        assert hits == [(320, 0), (0, 320), (0, 320), (0, 320)]
    assert [one.output_ids for one in requests] == answers_alone(requests)


def test_when_the_leader_is_aborted_a_follower_fetches_for_itself() -> None:
    gates = {Verb.EXISTS: Barrier()}
    gates[Verb.EXISTS].shut()
    with SchedulingRig(store=store_with(DOCUMENT), gates=gates) as rig:
        first, second = ask(1), ask(2)
        rig.submit(first, second)
        rig.engine.step()
        assert not rig.cache.prefetch_reach(second.request_id)
        rig.engine.abort(first.request_id)
        rig.engine.step()
        assert rig.cache.prefetch_reach(second.request_id) >= len(DOCUMENT)
        gates[Verb.EXISTS].open()
        rig.run()
        assert (second.storage_hit_tokens, second.delayed_hit_tokens) == (320, 0)


def test_what_could_not_be_loaded_was_not_found_late() -> None:
    with SchedulingRig(store=store_with(DOCUMENT)) as rig:
        first, second = ask(1), ask(2)
        rig.submit(first, second)
        assert rig.engine.settle()
        rig.engine.abort(first.request_id)
        rig.let_loads_fail(lambda: True)
        rig.run()
        assert rig.engine.counters["delayed_hit_tokens"] == len(DOCUMENT)
        assert second.computed_tokens == second.num_prompt_tokens
        assert second.delayed_hit_tokens == 0


def test_a_new_request_under_the_name_of_an_aborted_leader_leads_nobody() -> None:
    gates = {Verb.EXISTS: Barrier()}
    gates[Verb.EXISTS].shut()
    with SchedulingRig(store=MemoryPages(), gates=gates) as rig:
        first, second = ask(1), ask(2)
        rig.submit(first, second)
        rig.engine.abort(first.request_id)
        rig.submit(request(first.request_id, tokens("other", 320)))
        rig.engine.step()
        assert rig.cache.prefetch_reach(second.request_id) >= len(DOCUMENT)


def test_nothing_is_fetched_for_a_follower_that_is_aborted() -> None:
    gates = {Verb.EXISTS: Barrier()}
    gates[Verb.EXISTS].shut()
    with SchedulingRig(store=MemoryPages(), gates=gates) as rig:
        first, second = ask(1), ask(2)
        rig.submit(first, second)
        rig.engine.abort(second.request_id)
        rig.engine.abort(first.request_id)
        rig.engine.step()
        assert not rig.cache.prefetch_reach(second.request_id)


def test_a_follower_fetches_what_comes_after_that_of_its_leader() -> None:
    whole = DOCUMENT + tokens("conversation", 160)
    with SchedulingRig(store=store_with(whole)) as rig:
        first = ask(1)
        second = request("second", whole + tokens("question", 8))
        rig.run(first, second)
        assert (first.storage_hit_tokens, second.delayed_hit_tokens) == (320, 320)
        assert second.storage_hit_tokens == 160
        assert rig.cache.controller.stats[CopyKind.PREFETCH].num_pages == len(whole) // 16


@pytest.mark.parametrize("answered_first", [False, True])
def test_when_storage_has_nothing_for_the_leader_its_followers_do_not_ask(
    answered_first: bool,
) -> None:
    with SchedulingRig(store=MemoryPages()) as rig:
        requests = [ask(number) for number in range(4)]
        rig.submit(*requests)
        if answered_first:
            assert rig.engine.settle()
        rig.run()
        assert rig.engine.counters["delayed_hit_tokens"] == 3 * len(DOCUMENT)
        assert rig.cache.counters["prefetch_revoked"] == 1


def test_a_long_fetch_is_not_waited_for_when_little_of_it_is_of_use() -> None:
    gates = {Verb.GET: Barrier()}
    gates[Verb.GET].shut()
    book = DOCUMENT[:128] + tokens("book", 640)
    with SchedulingRig(store=store_with(book, DOCUMENT), gates=gates) as rig:
        rig.submit(request("long", book), ask(2))
        rig.engine.step()
        assert rig.cache.controller.in_flight[CopyKind.PREFETCH] == 2


def test_under_best_effort_a_fetch_ends_when_its_request_could_run_and_not_before() -> None:
    gates = {Verb.GET: Barrier()}
    store = store_with(DOCUMENT)
    with SchedulingRig(
        store=store, gates=gates, max_batch_requests=1, prefetch_policy="best_effort"
    ) as rig:
        rig.run(request("other", tokens("other", 100)))
        gates[Verb.GET].shut()
        fetching = ask(1)
        ready = request("ready", tokens("other", 100), answer=4)
        rig.submit(fetching, ready)
        # The younger one has its KV on the device: while it runs, the fetch goes on.
        for _ in range(4):
            assert rig.engine.step() == [ready]
            assert rig.cache.prefetch_reach(fetching.request_id) >= len(DOCUMENT)
        gates[Verb.GET].open()
        assert rig.engine.settle()
        rig.run()
        assert fetching.storage_hit_tokens == len(DOCUMENT)

        gates[Verb.GET].shut()
        rig.drop_device()
        rig.cache.evict_host(1_000_000)
        late = ask(2)
        rig.submit(late)
        assert rig.engine.step() == []
        assert rig.engine.step() == [late]
        assert late.storage_hit_tokens == 0


def test_under_best_effort_no_more_are_asked_than_the_batch_has_places() -> None:
    gates = {Verb.GET: Barrier()}
    other = tokens("other", 320)
    with SchedulingRig(
        store=store_with(DOCUMENT, other),
        gates=gates,
        max_batch_requests=2,
        prefetch_policy="best_effort",
    ) as rig:
        runs = request("runs", tokens("runs", 40), answer=8)
        rig.submit(runs)
        rig.engine.step()
        gates[Verb.GET].shut()
        first, second = ask(1, answer=8), ask(2, prompt=other)
        rig.submit(first, second)
        rig.engine.step()
        rig.engine.step()
        assert rig.names() == ["runs", "ask 1"]
        assert rig.cache.prefetch_reach(second.request_id) >= len(other)
        gates[Verb.GET].open()
        assert rig.engine.settle()
        rig.run()
        assert second.storage_hit_tokens == len(other)
