"""Orders of eviction by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache.class_paths import find_class
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
    policy: Callable[[], EvictionPolicy] = find_class(name, _POLICIES, what="eviction policy")
    missing = [method for method in _METHODS if not callable(getattr(policy, method, None))]
    if missing:
        raise ConfigError(
            f"{name!r} is no eviction policy: it has no {', '.join(missing)}; see EvictionPolicy"
        )
    return policy


_METHODS: Final = ("add", "discard", "touch", "pop", "__len__", "__iter__")
