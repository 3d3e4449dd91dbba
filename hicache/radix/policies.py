"""Orders of eviction by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from hicache.errors import ConfigError
from hicache.radix.adaptive_policy import AdaptivePolicy
from hicache.radix.eviction import LruPolicy
from hicache.radix.keyed_policies import FifoPolicy, LfuPolicy, MruPolicy, PriorityPolicy
from hicache.radix.slru_policy import SlruPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache.radix.eviction import EvictionPolicy

__all__ = ["POLICY_NAMES", "create_policy"]

_POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {
    "adaptive": AdaptivePolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "lru": LruPolicy,
    "mru": MruPolicy,
    "priority": PriorityPolicy,
    "slru": SlruPolicy,
}

POLICY_NAMES: Final = tuple(_POLICIES)
"""Names that `create_policy` knows."""


def create_policy(name: str) -> Callable[[], EvictionPolicy]:
    """Return what makes the queues of a policy; each queue of a tree gets one of its own.

    Args:
        name: one of `POLICY_NAMES`, or `module.path:ClassName` of a class with the methods of
            `EvictionPolicy` that is made without arguments. The module is imported.

    Raises:
        ConfigError: there is no such policy.
    """
    known = _POLICIES.get(name)
    if known is not None:
        return known
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(
            f"there is no eviction policy {name!r}; give one of {', '.join(POLICY_NAMES)}, or "
            "module.path:ClassName of your own"
        )
    try:
        policy = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the eviction policy {name!r} cannot be imported: {error}") from error
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(
            f"{name!r} is no eviction policy: it has no {', '.join(missing)}; see EvictionPolicy"
        )
    chosen: Callable[[], EvictionPolicy] = policy
    return chosen


_METHODS: Final = ("add", "discard", "touch", "pop", "__len__", "__iter__")
