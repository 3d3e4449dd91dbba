"""In which order a page store gives up its leaves: policies by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from hicache.class_paths import find_class
from hicache.errors import ConfigError
from hicache.storage.page_store.reuse_history import (
    NUM_AGES,
    NUM_CELLS,
    NUM_CLASSES,
    age_limits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache.storage.page_store.reuse_history import ReuseHistory

__all__ = [
    "DEFAULT_POLICY",
    "POLICY_NAMES",
    "AdaptivePolicy",
    "FifoPolicy",
    "LfuPolicy",
    "LruPolicy",
    "SlruPolicy",
    "Stage",
    "StoragePolicy",
    "create_policy",
]

DEFAULT_POLICY: Final = "adaptive"

_EVERY_CLASS: Final = tuple(range(NUM_CLASSES))
_PROTECTED_SHARE: Final = 0.2
_TICKS_PER_ORDER: Final = 64


class Stage(NamedTuple):
    """Leaves that may go, the longest unused first.

    Attributes:
        use_classes: classes of their uses, see `class_of`; 0 are those used once.
        youngest: least age in ticks.
        oldest: largest age; `None` for any.
    """

    use_classes: Sequence[int] = _EVERY_CLASS
    youngest: int = 0
    oldest: int | None = None


class StoragePolicy(Protocol):
    """An order of eviction, made without arguments, one for each store that a process has open.

    It is asked within write transactions, one at a time. Leaves lie in the index by class of uses
    and last use whatever the policy is, so each process may have its own, and another one tomorrow.

    Attributes:
        notes_uses: whether a read makes a difference to the order.
    """

    notes_uses: bool

    def stages(self, history: ReuseHistory) -> Sequence[Stage]:
        """Return what may go, in this order; what is in no stage is given up by no means."""


class LruPolicy:
    """Least recently used first."""

    notes_uses = True

    def stages(self, history: ReuseHistory) -> Sequence[Stage]:
        """See `StoragePolicy.stages`."""
        return (Stage(),)


class FifoPolicy(LruPolicy):
    """In the order in which pages were stored: no use is noted."""

    notes_uses = False


class LfuPolicy:
    """Fewest uses first, by classes of them; then least recently used."""

    notes_uses = True

    def stages(self, history: ReuseHistory) -> Sequence[Stage]:
        """See `StoragePolicy.stages`."""
        return [Stage((use_class,)) for use_class in _EVERY_CLASS]


class SlruPolicy:
    """What was used once goes first, while the others are few enough to be protected.

    As soon as more than a share of the leaves were used again, recency counts alone.
    """

    notes_uses = True

    def stages(self, history: ReuseHistory) -> Sequence[Stage]:
        """See `StoragePolicy.stages`."""
        num_protected = sum(history.num_leaves[1:])
        if num_protected > _PROTECTED_SHARE * sum(history.num_leaves):
            return (Stage(),)
        return Stage((0,)), Stage(_EVERY_CLASS[1:])


class AdaptivePolicy:
    """What is worth least first, by class of uses and octave of age; see `ReuseHistory`."""

    notes_uses = True

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._next_order = 0

    def stages(self, history: ReuseHistory) -> Sequence[Stage]:
        """See `StoragePolicy.stages`; of equally worthy leaves the older go first."""
        if history.now >= self._next_order:
            self._next_order = history.now + _TICKS_PER_ORDER
            worth = history.worth()
            order = sorted(
                range(NUM_CELLS), key=lambda cell: (worth[cell], -(cell % NUM_AGES), cell)
            )
            self._stages = [
                Stage((cell // NUM_AGES,), *age_limits(cell % NUM_AGES)) for cell in order
            ]
        return self._stages


_POLICIES: Final[Mapping[str, Callable[[], StoragePolicy]]] = {
    "adaptive": AdaptivePolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "lru": LruPolicy,
    "slru": SlruPolicy,
}

POLICY_NAMES: Final = tuple(_POLICIES)
"""Names that `create_policy` knows."""


def create_policy(name: str) -> StoragePolicy:
    """Return a new policy.

    Args:
        name: one of `POLICY_NAMES`, or `module.path:ClassName` of a class with what
            `StoragePolicy` names that is made without arguments. The module is imported.

    Raises:
        ConfigError: there is no such policy.
    """
    policy = find_class(name, _POLICIES, what="eviction policy of page stores")
    if not (callable(getattr(policy, "stages", None)) and hasattr(policy, "notes_uses")):
        raise ConfigError(
            f"{name!r} is no eviction policy of page stores: it lacks stages or notes_uses; see "
            "hicache.storage.page_store.eviction_policies.StoragePolicy"
        )
    chosen: StoragePolicy = policy()
    return chosen
