"""What a write policy asks of the tree, of a cache and of a replay alike."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache.types import StorageAdmission, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache.radix.node import RadixNode

__all__ = ["Admission", "Duplicates", "WriteRule", "write_rule_for"]


class Admission(str, Enum):
    """Which of the pages that a tier loses are kept in the next one."""

    ALL = "all"
    HOPEFUL = "hopeful"
    """Those that may well be used again, see `ReuseStatistics.hopeless`."""
    WORTHY = "worthy"
    """Of these, those that are worth what the host would give up for them."""


class Duplicates(str, Enum):
    """When host copies of what the device has too make room, beside sole copies."""

    FIRST = "first"
    IF_WANTED = "if_wanted"
    """First where their room brings noticeably more hits, but for a few: those that the device
    evicts next, which need not be written then. Otherwise last."""
    LAST = "last"
    """The oldest of them are what the device evicts next, and would be lost with both copies."""
    STAY = "stay"


class WriteRule(NamedTuple):
    """What is written, when, and what makes room for it on the host.

    Attributes:
        min_uses: requests that must have used a run before an insertion writes it; None when
            insertions write nothing.
        on_eviction: whether what the device evicts unwritten is written first.
        admission: what of it is written.
        duplicates: what makes room.
    """

    min_uses: int | None
    on_eviction: bool
    admission: Admission
    duplicates: Duplicates

    def due(self, node: RadixNode) -> RadixNode | None:
        """Return what an insertion that ended at `node` writes, with all that is above it."""
        if self.min_uses is None:
            return None
        # Nobody uses a run without its prefix, so counts do not rise on the way down.
        while node.num_uses < self.min_uses and node.parent is not None:
            node = node.parent
        return node


_RULES: Final[Mapping[WritePolicy, WriteRule]] = {
    WritePolicy.WRITE_THROUGH: WriteRule(0, False, Admission.ALL, Duplicates.LAST),
    WritePolicy.WRITE_THROUGH_SELECTIVE: WriteRule(2, False, Admission.ALL, Duplicates.LAST),
    WritePolicy.WRITE_BEHIND: WriteRule(None, True, Admission.ALL, Duplicates.FIRST),
    WritePolicy.WRITE_BACK: WriteRule(None, True, Admission.ALL, Duplicates.FIRST),
    WritePolicy.ADAPTIVE: WriteRule(None, True, Admission.WORTHY, Duplicates.IF_WANTED),
}

_STORED_IF_HOPEFUL: Final = WriteRule(None, True, Admission.HOPEFUL, Duplicates.IF_WANTED)
"""What is to be stored has to pass the host, worth its place there or not."""


def write_rule_for(policy: WritePolicy, storage: StorageAdmission | None) -> WriteRule:
    """Return the rule of a policy, given what is stored; `None` without a store."""
    if policy is not WritePolicy.ADAPTIVE or storage is None:
        return _RULES[policy]
    if storage is StorageAdmission.ADAPTIVE:
        return _STORED_IF_HOPEFUL
    # To write late what a store gets in any case saves nothing, and more of it is lost meanwhile.
    return _RULES[WritePolicy.WRITE_THROUGH]
