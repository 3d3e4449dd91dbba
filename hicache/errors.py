"""Every error that hicache raises on purpose.

    HiCacheError
    |- ConfigError           an option or a combination of options that cannot work
    |- CapacityError         memory that the machine or a pool cannot give
    |- OwnershipError        a page given back twice, or by somebody who does not own it
    |- TransferError         a copy between device and host that failed or came too late
    |- StorageError          an L3 backend that cannot do what it was asked
    |  |- StorageTimeout     ... before its deadline
    |  `- CorruptPage        ... because the stored bytes are not the ones that were written
    |- RanksLostError        a rank of the engine that is gone, or silent past its deadline
    |- RanksDivergedError    ranks that should hold equal trees and do not
    |- InvariantViolation    the cache's own state contradicts itself (a bug in hicache)
    `- ClosedError           a call on something that was closed

A message says what was wrong and what to do about it. Errors of a tier never reach a scheduler:
they become misses with a reason (`hicache.types.PageOutcome`).
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "CorruptPage",
    "HiCacheError",
    "InvariantViolation",
    "OwnershipError",
    "RanksDivergedError",
    "RanksLostError",
    "StorageError",
    "StorageTimeout",
    "TransferError",
]


class HiCacheError(Exception):
    """The root of every error that hicache raises on purpose."""


class ConfigError(HiCacheError, ValueError):
    """An option or a combination of options that cannot work; raised at construction."""


class CapacityError(HiCacheError):
    """Memory was asked for that the machine, its control group or a pool cannot give."""


class OwnershipError(HiCacheError):
    """A page was given back twice, or by somebody who does not own it."""


class TransferError(HiCacheError):
    """A copy between device and host memory failed or did not end before its deadline."""


class StorageError(HiCacheError):
    """An L3 backend cannot do what it was asked."""


class StorageTimeout(StorageError):
    """An L3 call did not end before its deadline."""


class CorruptPage(StorageError):
    """Stored bytes are not the bytes that were written."""


class RanksLostError(HiCacheError):
    """A rank is gone or has been silent past the deadline; nothing is agreed with the others now.

    Whoever is left ends what it has by itself. A rank that comes back is not taken in again:
    restart the engine.
    """


class RanksDivergedError(HiCacheError):
    """Ranks that should be equal are not: their trees, their options, or the calls they make.

    Raised on all ranks in the same call. There is no way on: ranks that take different prefixes for
    cached compute over different tokens, and wrong KV is worse than an engine that stops.
    """


class InvariantViolation(HiCacheError):
    """The cache's own state contradicts itself.

    Attributes:
        violations: every contradiction that was found, one sentence each.
    """

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        super().__init__("\n".join([f"{len(violations)} invariant(s) broken:", *violations]))


class ClosedError(HiCacheError):
    """A call was made on an object that is already closed."""
