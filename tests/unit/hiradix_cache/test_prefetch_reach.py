"""How far the prefetch of a request reaches, as long as it has not ended."""

from __future__ import annotations

import pytest
from builders import PAGE, Rig, config_for, store_with, tokens
from scripted_parts import Barrier, faulty_storage, injected

from hicache.config import PrefetchConfig
from hicache.radix import RadixKey
from hicache.testing.faulty_storage import Verb
from hicache.types import PrefetchPolicy

STORED = RadixKey(tokens(1, 2, 3))
KEY = RadixKey(tokens(1, 2, 3, 4, 5))


def rig_with(gates: dict[Verb, Barrier], *, max_inflight_pages: int | None = None) -> Rig:
    config = config_for(
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        storage=injected(),
        prefetch=PrefetchConfig(threshold_tokens=PAGE, max_inflight_pages=max_inflight_pages),
    )
    rig = Rig(config, create_storage=faulty_storage(store_with(STORED), gates=gates))
    rig.gates += gates.values()
    return rig


def test_it_is_what_was_asked_for_then_what_storage_has_then_nothing() -> None:
    gates = {Verb.EXISTS: Barrier(), Verb.GET: Barrier()}
    gates[Verb.EXISTS].shut()
    gates[Verb.GET].shut()
    with rig_with(gates) as rig:
        assert rig.cache.prefetch_reach("p") == 0
        rig.begin_prefetch(KEY)
        rig.step(3)
        assert rig.cache.prefetch_reach("p") == 5 * PAGE
        gates[Verb.EXISTS].open()
        rig.step_until(gates[Verb.GET].entered.is_set)
        assert rig.cache.prefetch_reach("p") == 3 * PAGE
        assert rig.cache.prefetch_reach("another") == 0
        gates[Verb.GET].open()
        rig.settle()
        assert rig.cache.prefetch_reach("p") == 0


def test_it_is_counted_from_the_beginning_of_the_key() -> None:
    gates = {Verb.GET: Barrier()}
    gates[Verb.GET].shut()
    with rig_with(gates) as rig:
        rig.insert(KEY.prefix(PAGE))
        rig.settle()
        rig.begin_prefetch(KEY)
        rig.step_until(gates[Verb.GET].entered.is_set)
        assert rig.cache.prefetch_reach("p") == 3 * PAGE


def test_a_prefetch_that_waits_for_room_reaches_as_far_as_its_whole_pages() -> None:
    gates = {Verb.GET: Barrier()}
    gates[Verb.GET].shut()
    with rig_with(gates, max_inflight_pages=4) as rig:
        rig.begin_prefetch(KEY)
        rig.step_until(gates[Verb.GET].entered.is_set)
        refused = RadixKey([*tokens(11, 12), 1])
        assert not rig.begin_prefetch(refused, request_id="refused")
        assert rig.cache.prefetch_reach("refused") == 2 * PAGE
        rig.cache.release_aborted_request("refused")
        assert rig.cache.prefetch_reach("refused") == 0


@pytest.mark.parametrize("way", ["the request is aborted", "the cache is reset"])
def test_nothing_is_reached_when_the_request_does_not_wait_any_more(way: str) -> None:
    gates = {Verb.GET: Barrier()}
    gates[Verb.GET].shut()
    with rig_with(gates) as rig:
        rig.begin_prefetch(KEY)
        rig.step_until(gates[Verb.GET].entered.is_set)
        if way == "the request is aborted":
            rig.cache.release_aborted_request("p")
        else:
            rig.cache.reset()
        assert rig.cache.prefetch_reach("p") == 0
