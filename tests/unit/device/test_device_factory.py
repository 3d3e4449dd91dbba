"""`create_device` finds a device by name or says what to use instead."""

from __future__ import annotations

import pytest
import torch

from hicache.device import create_device
from hicache.device.cpu import CpuDevice
from hicache.errors import ConfigError


def test_cpu_is_always_there() -> None:
    device = create_device("cpu")
    assert isinstance(device, CpuDevice)
    assert device.torch_device == torch.device("cpu")


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cpu:0"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        create_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_without_cuda_is_refused_with_what_to_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=r"finds no CUDA device; check the driver .* or use 'cpu'"
    ):
        create_device(name)


def test_a_device_number_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="finds 2; use 'cuda:0' to 'cuda:1'"):
        create_device("cuda:2")
