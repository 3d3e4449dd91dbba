"""Makes SGLang importable on a machine without a GPU, and imports modules of it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

__all__ = ["prepare_sglang", "sglang_version", "srt"]

_ABSENT = ("sgl_kernel", "torchvision")
"""What SGLang imports for GPUs and images; nothing that is measured uses any of it."""


class _AnyName(type):
    """Lets a stand-in class have every attribute, as a text."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    """A module in which every name is a class without content."""

    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of the packages that are absent."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _ABSENT or name.endswith(".scalar_type"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare_sglang(source: str | None) -> None:
    """Prepare this process for `srt`.

    Args:
        source: folder with another release to import instead of the one installed.
    """
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_RUST_BUILD_MODE": "never",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust",
    }
    sys.meta_path.insert(0, _StandInFinder())
    if source is not None:
        sys.path.insert(0, source)


def srt(name: str) -> Any:
    """Import a module of SGLang's runtime; only after `prepare_sglang`."""
    return importlib.import_module(f"sglang.srt.{name}")


def sglang_version() -> str:
    """Return the version that is imported."""
    return str(importlib.import_module("sglang").__version__)
