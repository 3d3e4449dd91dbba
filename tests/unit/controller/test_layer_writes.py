"""Writes whose layers are copied as the model ends them, on a simulated device."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from test_local_mover import PAGES, Bench, LoggingEngine

from hicache.controller.layer_writes import LayerWrites
from hicache.controller.records import CopyResult, WriteJob
from hicache.controller.running_copy import RunningCopy
from hicache.device.simulated import SimulatedDevice
from hicache.errors import TransferError
from hicache.types import OperationId

KV_ENDS = [(layer, 0) for layer in range(3)]
SIDE_ENDS = [(0, 1)]


def begin(bench: Bench, number: int = 0) -> None:
    bench.mover.submit_write(
        WriteJob(
            operation_id=OperationId(number),
            generation=5,
            device_pages=PAGES,
            host_pages=PAGES,
            node_ids=(),
            by_layer=True,
        )
    )


def poll(bench: Bench) -> list[CopyResult]:
    results = bench.mover.poll()
    assert all(isinstance(result, CopyResult) for result in results)
    return [result for result in results if isinstance(result, CopyResult)]


def test_a_layer_is_copied_once_it_has_ended_and_not_before() -> None:
    bench = Bench()
    begin(bench)
    bench.run("write")
    assert bench.log == []
    bench.mover.on_layer_end(1)
    bench.run("write")
    assert bench.log == ["write kv1"]
    bench.mover.on_layer_end(0, source=1)
    bench.mover.on_layer_end(0)
    bench.run("write")
    assert bench.log == ["write kv1", "write side0", "write kv0"]


@pytest.mark.parametrize("order", list(itertools.permutations(KV_ENDS + SIDE_ENDS)), ids=str)
def test_the_result_comes_when_all_layers_of_all_pools_are_copied_in_whatever_order(
    order: list[tuple[int, int]],
) -> None:
    bench = Bench()
    begin(bench, number=7)
    for layer, source in order:
        assert poll(bench) == []
        bench.mover.on_layer_end(layer, source)
        bench.run("write")
    (result,) = poll(bench)
    assert (result.operation_id, result.good, result.outcome) == (7, True, "ok")
    assert result.num_bytes == 2 * 10 * (3 + 1)
    assert sorted(bench.log) == ["write kv0", "write kv1", "write kv2", "write side0"]


def test_layers_of_a_later_pass_are_not_copied_again() -> None:
    bench = Bench()
    begin(bench)
    for layer in (0, 1, 0, 1):
        bench.mover.on_layer_end(layer)
    bench.run("write")
    assert bench.log == ["write kv0", "write kv1"]


def test_wanted_before_all_layers_have_ended_the_others_are_copied_at_once() -> None:
    bench = Bench()
    begin(bench)
    bench.mover.on_layer_end(1)
    bench.mover.finish_write(OperationId(0), wanted=True)
    bench.run("write")
    assert bench.log == ["write kv1", "write kv0", "write kv2", "write side0"]
    (result,) = poll(bench)
    assert result.good


def test_given_up_it_copies_no_more_and_ends_when_nothing_of_it_runs() -> None:
    bench = Bench()
    begin(bench)
    bench.mover.on_layer_end(0)
    bench.mover.finish_write(OperationId(0), wanted=False)
    bench.mover.on_layer_end(1)
    assert poll(bench) == []
    bench.run("write")
    (result,) = poll(bench)
    assert (result.good, result.outcome, result.num_bytes, result.error) == (
        False,
        "abandoned",
        0,
        "",
    )
    assert bench.log == ["write kv0"]


def test_a_finish_after_the_last_layer_changes_nothing() -> None:
    bench = Bench()
    begin(bench)
    for layer, source in KV_ENDS + SIDE_ENDS:
        bench.mover.on_layer_end(layer, source)
    bench.mover.finish_write(OperationId(0), wanted=False)
    bench.run("write")
    (result,) = poll(bench)
    assert result.good


@pytest.mark.parametrize("broken", ["write kv0", "write kv2", "write side0"])
def test_a_layer_that_fails_fails_its_own_write_among_those_that_take_turns(broken: str) -> None:
    bench = Bench()
    begin(bench, number=0)
    begin(bench, number=1)
    for layer, source in KV_ENDS + SIDE_ENDS:
        bench.mover.on_layer_end(layer, source)
    # The first of two copies of each layer is that of the write that began first.
    failed = 0
    while bench.device.step("write"):
        if bench.log and bench.log[-1] == broken and not failed:
            failed = 1
            bench.broken.clear()
        elif not failed:
            bench.broken.add(broken)
    first, second = poll(bench)
    assert (first.good, second.good) == (False, True)
    assert broken in first.error


def test_a_write_by_layer_and_one_at_once_report_their_own_errors() -> None:
    bench = Bench()
    begin(bench, number=0)
    bench.broken.add("write kv0")
    bench.mover.on_layer_end(0)
    bench.run("write")
    bench.broken.clear()
    bench.write(number=1)
    bench.mover.finish_write(OperationId(0), wanted=True)
    bench.run("write")
    results = poll(bench)
    assert [(one.operation_id, one.good) for one in results] == [(0, False), (1, True)]


class DeviceWithALateModel(SimulatedDevice):
    """Its compute stream runs later, as that of a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.create_stream("model")

    def compute_stream(self) -> Any:
        return self.model


def test_a_layer_is_copied_behind_what_the_model_has_enqueued_so_far() -> None:
    device, log = DeviceWithALateModel(), list[str]()
    engine = LoggingEngine("kv", 2, log, set())
    writes = LayerWrites(device, device.create_stream("write"), [engine])
    job = WriteJob(
        operation_id=OperationId(0),
        generation=0,
        device_pages=PAGES,
        host_pages=PAGES,
        node_ids=(),
        by_layer=True,
    )
    finished = device.create_event()
    copy = RunningCopy(job, num_bytes=0, finished=finished, now=lambda: 0.0)
    writes.begin(copy, [engine.plan(PAGES, PAGES)])
    for layer in range(2):
        device.model.enqueue(partial(log.append, f"store kv{layer}"))
        writes.layer_ended(layer, 0)
    assert not device.step("write")
    assert device.step("model")
    while device.step("model") or device.step("write"):
        pass
    assert log == ["store kv0", "store kv1", "write kv0", "write kv1"]
    assert copy.result(launched_only=False).good


def test_close_gives_up_what_waits_for_layers() -> None:
    bench = Bench()
    begin(bench)
    assert bench.mover.close(1.0)
    (result,) = poll(bench)
    assert result.outcome == "abandoned"
    assert bench.log == []


def test_pages_are_checked_when_the_write_is_reserved() -> None:
    bench = Bench()
    with pytest.raises(TransferError, match="comes twice"):
        bench.mover.submit_write(
            WriteJob(
                operation_id=OperationId(0),
                generation=0,
                device_pages=np.array([1, 1]),
                host_pages=PAGES,
                node_ids=(),
                by_layer=True,
            )
        )
