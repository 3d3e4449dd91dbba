"""Pages that are written while the pass that computes them still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from builders import GEOMETRY, PAGE, Rig, config_for, tokens

from hicache.errors import OwnershipError
from hicache.radix import CopyKind, RadixKey
from hicache.testing.stamped_kv import stamp_of
from hicache.types import WritePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache.radix import InsertResult
    from hicache.types import IntArray

KEY = RadixKey(tokens(1, 2, 3, 4))
LAYERS = range(GEOMETRY.num_layers)


class Pass:
    """A request's forward pass over the full pages of a key, layer by layer."""

    def __init__(self, rig: Rig, key: RadixKey, *, request_id: str = "r") -> None:
        self.rig = rig
        self.key = key
        self.request_id = request_id
        rig.pool.register_layer_end_notifier(rig.mover.on_layer_end)
        pages = rig.device_pages.alloc(len(key) // PAGE)
        assert pages is not None
        self.pages: IntArray = pages
        rig.request_pages.append(pages)
        rig.remember(key)

    def reserve(self) -> bool:
        return self.rig.cache.reserve_write(self.request_id, self.pages)

    def compute(self, layers: Iterable[int] = LAYERS) -> None:
        stamp = stamp_of(self.key, GEOMETRY)
        index = torch.from_numpy(self.pages)
        for layer in layers:
            for kv, part in enumerate(self.rig.pool.layer_parts(layer)):
                part[index] = stamp[kv, layer]
            self.rig.pool.end_layer(layer)

    def insert(self, *, chunked: bool = False) -> InsertResult:
        result = self.rig.cache.insert(
            self.key, self.pages, request_id=self.request_id, chunked=chunked
        )
        self.leave()
        self.rig.device_pages.free(self.pages[: result.already_present_pages])
        return result

    def abort(self) -> None:
        self.rig.cache.release_aborted_request(self.request_id)
        self.leave()
        self.rig.device_pages.free(self.pages)

    def leave(self) -> None:
        self.rig.request_pages = [one for one in self.rig.request_pages if one is not self.pages]


def outcomes(rig: Rig) -> dict[str, int]:
    return dict(rig.cache.controller.stats[CopyKind.WRITE].outcomes)


def test_the_layers_are_on_the_host_before_the_pages_are_inserted() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        assert work.reserve()
        work.compute()
        rig.step_until(lambda: outcomes(rig) == {"ok": 1})
        work.insert()
        rig.settle()
        assert outcomes(rig) == {"ok": 1}
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_nothing_matches_on_the_host_until_the_pages_are_inserted() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute()
        rig.step_until(lambda: rig.cache.controller.writes.acks[0].num_good is not None)
        assert rig.hit(KEY) == (0, 0)
        work.insert()


def test_layers_that_nobody_announced_are_copied_at_the_insertion() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute([0])
        rig.pool.register_layer_end_notifier(None)
        work.compute([1])
        work.insert()
        rig.settle()
        assert outcomes(rig) == {"ok": 1}
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_when_another_request_has_inserted_a_part_the_rest_is_written_anew() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute()
        rig.insert(KEY.prefix(2 * PAGE), request_id="other")
        work.insert()
        rig.settle()
        assert rig.cache.counters["abandoned_write_pages"] == 4
        assert rig.host_pages.num_available == 16 - 4
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_when_all_of_it_is_present_the_reservation_is_given_up() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute()
        rig.insert(KEY, request_id="other")
        work.insert()
        rig.settle()
        assert rig.cache.counters["abandoned_write_pages"] == 4
        assert rig.host_pages.num_available == 16 - 4


@pytest.mark.parametrize("num_layers", range(GEOMETRY.num_layers + 1))
def test_aborted_after_any_layer_its_host_pages_come_back(num_layers: int) -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute(range(num_layers))
        work.abort()
        rig.settle()
        assert rig.host_pages.num_available == 16
        assert rig.hit(KEY) == (0, 0)


@pytest.mark.parametrize("num_layers", range(GEOMETRY.num_layers + 1))
def test_a_reset_after_any_layer_gives_it_up(num_layers: int) -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute(range(num_layers))
        rig.cache.reset()
        work.compute(range(num_layers, GEOMETRY.num_layers))
        work.insert()
        rig.settle()
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)
        assert rig.host_pages.num_available == 16 - 4


def test_a_close_in_the_middle_of_a_pass_ends_in_time_and_owns_nothing() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        work.reserve()
        work.compute([0])
        assert rig.cache.close(5.0)
        assert rig.cache.num_in_flight == 0
        assert rig.host_pages.num_available == 16


def test_an_abandoned_pass_can_be_tried_again_and_a_second_reservation_is_refused() -> None:
    with Rig() as rig:
        work = Pass(rig, KEY)
        assert work.reserve()
        with pytest.raises(OwnershipError, match="reserved a write already"):
            work.reserve()
        work.compute([0])
        rig.cache.abandon_write("r")
        rig.cache.abandon_write("r")
        assert work.reserve()
        work.compute()
        work.insert()
        rig.settle()
        assert outcomes(rig) == {"abandoned": 1, "ok": 1}
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_fails_makes_the_whole_write_a_miss(layer: int) -> None:
    with Rig() as rig:
        rig.engine.broken_writes.add(layer)
        work = Pass(rig, KEY)
        work.reserve()
        work.compute()
        work.insert()
        rig.settle()
        assert outcomes(rig) == {"failed": 1}
        assert rig.host_pages.num_available == 16
        rig.engine.broken_writes.clear()


def test_chunks_are_written_each_in_its_own_pass() -> None:
    with Rig() as rig:
        half = len(KEY) // 2
        work = Pass(rig, KEY.prefix(half))
        work.reserve()
        work.compute()
        first = work.insert(chunked=True)
        rig.cache.inc_lock_ref(first.node)
        second = rig.device_pages.alloc(2)
        assert second is not None
        assert rig.cache.reserve_write("r", second)
        stamp = stamp_of(KEY, GEOMETRY, first_page=2)
        for layer in LAYERS:
            for kv, part in enumerate(rig.pool.layer_parts(layer)):
                part[torch.from_numpy(second)] = stamp[kv, layer]
            rig.pool.end_layer(layer)
        found = rig.match(KEY)
        rig.cache.insert(
            KEY,
            np.concatenate([found.device_pages, second]),
            request_id="r",
            chunked=False,
        )
        rig.cache.dec_lock_ref(first.node)
        rig.settle()
        assert outcomes(rig) == {"ok": 2}
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


def test_without_room_on_the_host_nothing_is_reserved_and_nothing_lost() -> None:
    with Rig(config_for(host_pages=3)) as rig:
        work = Pass(rig, KEY)
        assert not work.reserve()
        work.compute()
        work.insert()
        rig.settle()
        assert rig.hit(KEY) == (4, 0)


def test_room_is_made_as_for_any_write() -> None:
    with Rig(config_for(host_pages=4)) as rig:
        rig.insert(RadixKey(tokens(7, 8)))
        rig.settle()
        work = Pass(rig, KEY)
        assert work.reserve()
        work.compute()
        work.insert()
        rig.settle()
        rig.evict_device()
        assert rig.hit(KEY) == (0, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"write_by_layer": False},
        *({"write_policy": policy} for policy in WritePolicy if policy != "write_through"),
    ],
    ids=str,
)
def test_where_insertion_does_not_write_nothing_is_reserved(options: dict[str, Any]) -> None:
    with Rig(config_for(**options)) as rig:
        work = Pass(rig, KEY)
        assert not work.reserve()
        work.compute()
        work.insert()
