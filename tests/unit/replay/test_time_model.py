"""Times to first token against sums made by hand: a block of 4 tokens, 1 byte of KV a token."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from small_traces import BLOCK_TOKENS, make_request

from hicache.errors import ConfigError
from hicache.replay import TimeModel
from hicache.replay.time_model import Timeline
from hicache.types import PrefetchPolicy

# A token takes 1 s to compute, 0.25 s from the host, 0.5 s from storage to the host.
MODEL = TimeModel(
    prefill_tokens_per_second=1.0,
    kv_bytes_per_token=1,
    link_bytes_per_second=4.0,
    storage_bytes_per_second=2.0,
    timeout_base_seconds=3.0,
    timeout_per_ki_token_seconds=0.0,
)


def timeline(policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE, **changes: Any) -> Timeline:
    return Timeline(dataclasses.replace(MODEL, **changes), policy)


def serve(
    line: Timeline, arrival: float, *, stored: int = 0, computed: int = 4, loaded: int = 0
) -> int:
    request = make_request([0], arrival=arrival)
    num_arrived = line.fetch(request, stored, BLOCK_TOKENS)
    line.serve(request, computed, loaded)
    return num_arrived


def test_a_request_waits_for_those_before_it() -> None:
    line = timeline()
    serve(line, 0.0)
    serve(line, 1.0)
    # The second begins at 4 s, and its first token is there at 8 s.
    assert line.summary().ttft_seconds_mean == pytest.approx((4.0 + 7.0) / 2)
    assert line.summary().engine_seconds == pytest.approx(8.0)
    assert line.summary().utilisation == pytest.approx(8.0)


def test_loading_and_computing_go_on_together() -> None:
    line = timeline()
    serve(line, 0.0, computed=4, loaded=8)
    assert line.summary().ttft_seconds_mean == pytest.approx(4.0)
    line = timeline()
    serve(line, 0.0, computed=1, loaded=80)
    assert line.summary().ttft_seconds_mean == pytest.approx(20.0)


def test_the_last_token_of_a_prompt_is_computed_whatever_is_cached() -> None:
    line = timeline()
    serve(line, 0.0, computed=0)
    assert line.summary().ttft_seconds_mean == pytest.approx(1.0)


def test_under_wait_complete_a_request_waits_for_all_of_storage() -> None:
    line = timeline()
    assert serve(line, 0.0, stored=3) == 3
    assert line.summary().ttft_seconds_mean == pytest.approx(3 * 2.0 + 4.0)


def test_under_best_effort_a_request_takes_what_came_while_it_waited() -> None:
    line = timeline(PrefetchPolicy.BEST_EFFORT)
    assert serve(line, 0.0, stored=3) == 0
    # It waits from 1 s to 4 s: time for one block of 2 s.
    assert serve(line, 1.0, stored=3) == 1
    assert line.summary().ttft_seconds_mean == pytest.approx((4.0 + 7.0) / 2)


def test_under_timeout_a_request_waits_no_longer_than_it_may() -> None:
    line = timeline(PrefetchPolicy.TIMEOUT)
    assert serve(line, 0.0, stored=3) == 1
    assert line.summary().ttft_seconds_mean == pytest.approx(3.0 + 4.0)


def test_storage_reads_for_one_request_after_another() -> None:
    line = timeline()
    serve(line, 0.0, stored=3)
    serve(line, 0.0, stored=5)
    # The engine is free at 10 s, but the second read lasts from 6 s to 16 s.
    assert line.summary().ttft_seconds_mean == pytest.approx((10.0 + 20.0) / 2)


def test_speed_moves_arrivals_together() -> None:
    line = timeline(speed=2.0)
    serve(line, 0.0)
    serve(line, 2.0)
    assert line.summary().ttft_seconds_mean == pytest.approx((4.0 + 7.0) / 2)


def test_without_requests_all_times_are_zero() -> None:
    assert timeline().summary().engine_seconds == 0.0


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(TimeModel)], ids=lambda name: name
)
def test_a_speed_that_is_none_is_refused(name: str) -> None:
    values: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=name):
        TimeModel(**values)
