"""Ids, enumerations and small records that every layer shares."""

from __future__ import annotations

from enum import Enum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "IntArray",
    "IoBackend",
    "NodeId",
    "OperationId",
    "PageHash",
    "PageOutcome",
    "PrefetchPolicy",
    "RequestId",
    "StorageAdmission",
    "Tier",
    "WritePolicy",
]

PageHash = NewType("PageHash", bytes)
"""SHA-256 over a page's tokens and all pages before it: 32 bytes."""

NodeId = NewType("NodeId", int)
OperationId = NewType("OperationId", int)
RequestId: TypeAlias = str

IntArray: TypeAlias = npt.NDArray[np.int64]
"""One-dimensional int64 array of page ids (or of token slots, where the name says so)."""


class Tier(str, Enum):
    """Where bytes of a page can be."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class WritePolicy(str, Enum):
    """When device pages are copied to the host."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BEHIND = "write_behind"
    WRITE_BACK = "write_back"
    ADAPTIVE = "adaptive"


class StorageAdmission(str, Enum):
    """Which runs are persisted once the host has them."""

    ALL = "all"
    ADAPTIVE = "adaptive"
    """Those that may well be used again."""


class PrefetchPolicy(str, Enum):
    """How long a request waits for pages that storage is still delivering."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"
    ADAPTIVE = "adaptive"


class IoBackend(str, Enum):
    """How pages are addressed in a copy between device and host."""

    DIRECT = "direct"


class PageOutcome(str, Enum):
    """What became of one page in a batch that was moved.

    `OK` and `PRESENT` mean that the page is where it was asked to be; every other value is the
    reason why it is not.
    """

    OK = "ok"
    PRESENT = "present"
    """A write found the page already stored and left it."""
    MISS = "miss"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    """The bytes found belong to another key, namespace or format version."""
    TIMEOUT = "timeout"
    NO_SPACE = "no_space"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not tried, because a page before it failed or the operation was ended."""

    @property
    def good(self) -> bool:
        """Whether the page is where it was asked to be."""
        return self in (PageOutcome.OK, PageOutcome.PRESENT)
