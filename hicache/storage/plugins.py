"""Backends that installed distributions offer as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final, NamedTuple

from hicache.errors import ConfigError

__all__ = ["PLUGIN_GROUP", "Plugin", "find_plugin", "plugin_names"]

PLUGIN_GROUP: Final = "hicache.storage"
"""The group of the entry points; each is a backend's name and `module.path:ClassName`."""


class Plugin(NamedTuple):
    """A class that a distribution offers; nothing of it is imported.

    Attributes:
        distribution: name and version, for messages.
    """

    module_path: str
    class_name: str
    distribution: str


def find_plugin(name: str) -> Plugin | None:
    """Return what is installed under a backend's name, or `None`. Reads the list of distributions.

    Raises:
        ConfigError: several distributions offer the name.
    """
    found = {
        f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown one": point.value
        for point in entry_points(group=PLUGIN_GROUP, name=name)
    }
    if len(found) > 1:
        raise ConfigError(
            f"storage backend {name!r} is offered by several distributions: "
            f"{', '.join(sorted(found))}; remove all but one, or name the class of one with the "
            "backend 'dynamic'"
        )
    for distribution, value in found.items():
        module_path, _, class_name = value.partition("[")[0].partition(":")
        return Plugin(module_path.strip(), class_name.strip(), distribution)
    return None


def plugin_names() -> list[str]:
    """Return every name that an installed distribution offers, sorted."""
    return sorted({point.name for point in entry_points(group=PLUGIN_GROUP)})
