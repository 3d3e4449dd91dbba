"""What several requests begin with is computed and loaded once; the others wait for it."""

from __future__ import annotations

import pytest
from scheduling_rig import DOCUMENT, SchedulingRig, answers_alone, ask, request, tokens

from hicache.engine.request import FinishReason, Request
from hicache.radix import CopyKind


@pytest.mark.parametrize("chunk_tokens", [64, 1000])
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_requests_begin_with_alike_is_computed_once(page_size: int, chunk_tokens: int) -> None:
    requests = [ask(number, answer=4) for number in range(6)]
    with SchedulingRig(page_size=page_size, chunk_tokens=chunk_tokens) as rig:
        num_computed = rig.run(*requests)
        num_prompt_tokens = sum(one.num_prompt_tokens for one in requests)
        # The first token of an answer comes with its prompt.
        num_decoded = sum(len(one.output_ids) - 1 for one in requests)
        saved = 5 * len(DOCUMENT)
        assert num_computed - num_decoded == num_prompt_tokens - saved
    assert [one.output_ids for one in requests] == answers_alone(requests)


def test_what_others_have_computed_while_a_request_was_held_back_is_counted_as_delayed() -> None:
    requests = [ask(number) for number in range(3)]
    with SchedulingRig() as rig:
        rig.run(*requests)
        assert [one.delayed_hit_tokens for one in requests] == [0, len(DOCUMENT), len(DOCUMENT)]
        assert [one.device_hit_tokens for one in requests] == [0, len(DOCUMENT), len(DOCUMENT)]
        assert rig.engine.counters["delayed_hit_tokens"] == 2 * len(DOCUMENT)
        assert rig.cache.prompt_tokens.delayed == 2 * len(DOCUMENT)


def test_in_the_order_of_arrival_it_is_computed_by_each() -> None:
    requests = [ask(number) for number in range(6)]
    with SchedulingRig(cache_aware=False) as rig:
        num_prompt_tokens = sum(one.num_prompt_tokens for one in requests)
        # Five fit into the first step together; the sixth finds what they have computed.
        assert rig.run(*requests) > num_prompt_tokens - 4 * len(DOCUMENT)
        assert rig.engine.counters["delayed_hit_tokens"] == 0


def test_a_request_that_comes_while_another_computes_its_document_waits_for_it() -> None:
    with SchedulingRig(chunk_tokens=200) as rig:
        rig.submit(ask(1))
        rig.engine.step()
        late = ask(2)
        rig.submit(late)
        rig.engine.step()
        assert rig.names() == []
        rig.run()
        # A chunk of 200 tokens had filled 12 pages when it came.
        assert late.device_hit_tokens == len(DOCUMENT)
        assert late.delayed_hit_tokens == len(DOCUMENT) - 192


def test_what_was_there_at_submission_is_no_delayed_hit() -> None:
    with SchedulingRig() as rig:
        rig.run(ask(1))
        second = ask(2)
        rig.run(second)
        assert (second.device_hit_tokens, second.delayed_hit_tokens) == (len(DOCUMENT), 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ask(1, prompt=DOCUMENT[:48]), ask(2, prompt=DOCUMENT[:48])),
        (request("secret", DOCUMENT, cacheable=False), ask(2)),
        (Request("a", DOCUMENT, max_new_tokens=1, cache_salt="a"), ask(2)),
        (request("other", tokens("other", 320)), ask(2)),
    ],
    ids=["too few tokens alike", "not to be cached", "another tenant", "another document"],
)
def test_nobody_waits_for_what_would_not_help(first: Request, second: Request) -> None:
    with SchedulingRig() as rig:
        rig.submit(first, second)
        assert rig.engine.step() == [first, second]


def test_only_whole_pages_are_waited_for() -> None:
    first, second = ask(1, prompt=DOCUMENT[:70]), ask(2, prompt=DOCUMENT[:70])
    with SchedulingRig(page_size=48) as rig:
        rig.submit(first, second)
        assert rig.engine.step() == [first, second]


def test_what_was_found_late_is_counted_once_though_a_request_has_to_start_anew() -> None:
    with SchedulingRig(chunk_tokens=400) as rig:
        second = request("second", DOCUMENT + tokens("long", 500))
        rig.submit(ask(1), second)
        rig.engine.step()
        rig.engine.step()
        assert 0 < second.num_computed < second.num_prompt_tokens
        rig.engine._retract(second)
        rig.run()
        assert second.device_hit_tokens > len(DOCUMENT)
        assert second.delayed_hit_tokens == len(DOCUMENT)
        assert rig.engine.counters["delayed_hit_tokens"] == len(DOCUMENT)


@pytest.mark.parametrize("way", ["aborted", "retracted"])
def test_nobody_waits_for_a_request_that_computes_no_more(way: str) -> None:
    with SchedulingRig(chunk_tokens=100, max_batch_requests=2) as rig:
        first, second = ask(1, answer=3), ask(2, answer=3)
        rig.submit(first)
        rig.engine.step()
        rig.submit(second)
        if way == "aborted":
            rig.engine.abort(first.request_id)
        else:
            rig.engine._retract(first)
        rig.engine.step()
        # Who was sent back is the first in the queue again.
        assert rig.names() == [second.request_id if way == "aborted" else first.request_id]
        rig.run()
    assert [second.output_ids] == answers_alone([second])
    if way == "aborted":
        assert first.finish_reason is FinishReason.ABORTED
    else:
        assert [first.output_ids] == answers_alone([first])


def test_what_one_request_loads_others_wait_for() -> None:
    with SchedulingRig() as rig:
        rig.run(request("before", DOCUMENT))
        rig.drop_device()
        first, second = ask(1), ask(2)
        rig.submit(first, second)
        assert rig.engine.step() == [first]
        assert rig.engine.counters["steps_held_back"] == 1
        rig.run()
        assert rig.cache.controller.stats[CopyKind.LOAD].num_pages == len(DOCUMENT) // 16
        assert (first.host_hit_tokens, second.device_hit_tokens) == (320, 320)
        # The host had it all the time.
        assert second.delayed_hit_tokens == 0


def test_what_is_not_worth_a_load_is_computed_once() -> None:
    with SchedulingRig(load_threshold_tokens=1000) as rig:
        rig.run(request("before", DOCUMENT))
        rig.drop_device()
        requests = [ask(number) for number in range(3)]
        tails = sum(one.num_prompt_tokens - len(DOCUMENT) for one in requests)
        assert rig.run(*requests) == len(DOCUMENT) + tails
        assert rig.cache.controller.stats[CopyKind.LOAD].num_pages == 0


def test_nobody_waits_for_the_computation_of_what_the_host_has_after_a_failed_load() -> None:
    failing = [True]
    with SchedulingRig(chunk_tokens=200) as rig:
        rig.run(request("before", DOCUMENT))
        rig.drop_device()
        rig.let_loads_fail(lambda: failing.pop() if failing else False)
        first, second = ask(1), ask(2)
        rig.submit(first)
        while not first.num_computed:
            rig.engine.step()
        assert (first.num_failed_loads, first.num_computed) == (1, 200)
        rig.submit(second)
        rig.engine.step()
        assert second.host_hit_tokens == len(DOCUMENT) - 192
        rig.run()
