"""Facts about the machine that a measurement was made on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import hicache

__all__ = ["machine_facts"]

_PACKAGES = ("torch", "numpy")


def machine_facts(device: str | None = None) -> dict[str, object]:
    """Return what must stand beside every measurement, as plain data for JSON.

    Args:
        device: name of the accelerator that was used; None when it was the CPU.

    Returns:
        `cpu` (model), `cores` (usable by this process), `memory_bytes` (of the machine), `device`
        and `versions` (by package name, None for a package that is not installed).
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
        "versions": {
            "hicache": hicache.__version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
