"""Classes that a configuration names: by a short name, or by the path of one's own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["find_class", "is_class_path"]


def is_class_path(text: str) -> bool:
    """Whether a text has the form `module.path:ClassName`; `find_class` imports nothing else."""
    module_path, _, class_name = text.partition(":")
    return all(part.isidentifier() for part in (*module_path.split("."), class_name))


def find_class(name: str, known: Mapping[str, Any], *, what: str) -> Any:
    """Return what a name stands for; what comes from a path is as it was found, not checked.

    Args:
        name: one of those that are known, or `module.path:ClassName`. That module is imported,
            which runs it.
        known: by name.
        what: it is, for messages.

    Raises:
        ConfigError: there is nothing of this name, or its module cannot be imported.
    """
    if name in known:
        return known[name]
    if not is_class_path(name):
        raise ConfigError(
            f"there is no {what} {name!r}; give one of {', '.join(known)}, or "
            "module.path:ClassName of your own"
        )
    module_path, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_path), class_name)
    except Exception as error:  # To import is to run, so anything can go wrong.
        raise ConfigError(
            f"the {what} {name!r} cannot be imported ({type(error).__name__}: {error})"
        ) from error
