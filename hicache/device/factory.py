"""A device from its name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from hicache.device.cpu import CpuDevice
from hicache.device.cuda import CudaDevice
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.device.base import Device

__all__ = ["create_device"]


def create_device(name: str, *, wait_timeout_seconds: float = 30.0) -> Device:
    """Return the device called `name`.

    Args:
        name: `cpu`, `cuda` (torch's current device) or `cuda:N`.
        wait_timeout_seconds: after how long a CPU stream gives up a `Stream.wait`. Without effect
            on CUDA, where the device waits.

    Raises:
        ConfigError: no such device here; the message says what to use instead.
    """
    if name == "cpu":
        return CpuDevice(wait_timeout_seconds=wait_timeout_seconds)
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"unknown device {name!r}; use 'cpu', 'cuda' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r} is not available: torch {torch.__version__} finds no CUDA device; "
            "check the driver and that torch is a CUDA build, or use 'cpu'"
        )
    index = torch.cuda.current_device() if match[1] is None else int(match[1])
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device {name!r} is not available: torch finds {count}; use 'cuda:0' to "
            f"'cuda:{count - 1}'"
        )
    return CudaDevice(torch.device("cuda", index))
