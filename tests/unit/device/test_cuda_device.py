"""What is particular to CUDA: the device runs behind the host."""

from __future__ import annotations

import pytest
import torch

from hicache.device import create_device
from hicache.errors import TransferError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GUARD_SECONDS = 30.0
LONG_CYCLES = 2_000_000_000


def sleep_on_device() -> None:
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]


def test_kernels_launched_by_work_run_on_the_stream_behind_the_host() -> None:
    device = create_device("cuda")
    stream, event = device.create_stream("load"), device.create_event()
    stream.enqueue(sleep_on_device)
    stream.record(event)
    assert not event.query()
    with pytest.raises(TransferError, match="'load'"):
        event.synchronize(0.001)
    event.synchronize(GUARD_SECONDS)
    assert event.query()
    assert stream.close(GUARD_SECONDS)


def test_the_compute_stream_waits_on_the_device_for_bytes_that_another_stream_writes() -> None:
    device = create_device("cuda")
    load, written = device.create_stream("load"), device.create_event()
    target = torch.zeros(1 << 20, device=device.torch_device)
    torch.cuda.synchronize()

    def write() -> None:
        sleep_on_device()
        target.fill_(7.0)

    load.enqueue(write)
    load.record(written)
    device.compute_stream().wait(written)
    total = target.sum()
    assert total.item() == 7.0 * target.numel()
    assert load.close(GUARD_SECONDS)


def test_the_compute_stream_is_the_one_that_torch_has_current() -> None:
    device = create_device("cuda")
    other = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
    event = device.create_event()
    with torch.cuda.stream(other):
        sleep_on_device()
        device.compute_stream().record(event)
    assert not event.query()
    event.synchronize(GUARD_SECONDS)
    assert other.query()
