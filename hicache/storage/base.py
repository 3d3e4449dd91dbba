"""The contract between hicache and an L3 backend, and the records that cross it.

A backend keeps pages under their hashes. What else the bytes depend on is the namespace it was
built with, so equal keys of different namespaces are different pages.

`hicache.testing.storage_contract` holds this contract as a test suite that any backend can run.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from hicache.clock import Clock, MonotonicClock
from hicache.config import RankPlacement
from hicache.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache.hashing import StorageNamespace
    from hicache.types import PageHash, PageOutcome

__all__ = [
    "DEFAULT_CALL_BYTES",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "Page",
    "Piece",
    "StorageCapabilities",
    "StorageFigures",
    "StorageStats",
]


DEFAULT_CALL_BYTES: Final = 32 << 20
"""Some milliseconds of a disk: what a call costs beside its bytes is small, and an end that is
asked for, a deadline or another operation does not wait for long."""


class Piece(NamedTuple):
    """One contiguous run of host memory.

    Attributes:
        address: of its first byte, in this process.
        num_bytes: its length, at least 1.
    """

    address: int
    num_bytes: int


Page: TypeAlias = tuple[Piece, ...]
"""Where one page lies in host memory: its pieces, in the order of the stored bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiCacheStorageConfig:
    """What every backend is built from.

    Attributes:
        namespace: what the stored bytes depend on besides the tokens.
        page_bytes: length of every page in bytes.
        extra_config: options of the backend itself; it refuses those that it does not know.
        clock: what deadlines are measured on.
        placement: of the rank, for backends that spread their load by it. What it says about the
            stored bytes is in the namespace: replicas that hold the same bytes have the same.
        is_mla_model: whether all tensor-parallel ranks hold the same bytes.
        tp_lcm_size: into how many groups of KV heads the pages of the model are split, of which
            this backend gets one; None when they are not.
        eviction_policy: what the cache above evicts by, for backends that have an order of eviction
            to choose; None when it does not say.
    """

    namespace: StorageNamespace
    page_bytes: int
    extra_config: Mapping[str, object] = dataclasses.field(default_factory=dict)
    clock: Clock = dataclasses.field(default_factory=MonotonicClock)
    placement: RankPlacement = dataclasses.field(default_factory=RankPlacement)
    is_mla_model: bool = False
    tp_lcm_size: int | None = None
    eviction_policy: str | None = None

    def __post_init__(self) -> None:
        if self.page_bytes < 1:
            raise ConfigError(f"page_bytes must be at least 1, got {self.page_bytes}")

    def checked_extra_config(self, backend: str, known: Mapping[str, type]) -> dict[str, Any]:
        """Return the options, after refusing those that `backend` does not know or cannot use.

        Messages name options and types, never values: an option can be a secret.

        Args:
            backend: name of the backend, for the message.
            known: type of each option by name.

        Raises:
            ConfigError: an option is unknown or of another type.
        """
        for option, value in self.extra_config.items():
            if option not in known:
                raise ConfigError(
                    f"storage backend {backend!r} has no option {option!r} in its extra_config; "
                    f"known options: {', '.join(sorted(known)) or 'none'}"
                )
            # `type is`, because a bool is an int but not a size.
            if type(value) is not known[option]:
                raise ConfigError(
                    f"option {option!r} of storage backend {backend!r} must be of type "
                    f"{known[option].__name__}, got {type(value).__name__}"
                )
        return dict(self.extra_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageCapabilities:
    """What a backend can do beyond the contract.

    Attributes:
        durable: pages outlive the process; a later instance with the same options finds them.
        shared_between_processes: instances that are open at once see each other's pages.
        call_bytes: how many bytes a call best moves: more where much is lost between two calls.
    """

    durable: bool
    shared_between_processes: bool
    call_bytes: int = DEFAULT_CALL_BYTES

    def __post_init__(self) -> None:
        if self.call_bytes < 1:
            raise ConfigError(f"call_bytes of a backend must be at least 1, got {self.call_bytes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageStats:
    """What one backend instance has done since it was built; no count ever decreases.

    Outcomes that never happened are left out.

    Attributes:
        get_outcomes: pages that reads were asked for, by outcome.
        set_outcomes: pages that writes were asked for, by outcome.
        read_bytes: payload of the pages read with outcome `OK`.
        written_bytes: payload of the pages written with outcome `OK`.
        last_error: the newest error behind an outcome `FAILED` or `NO_SPACE`, or behind a look-up
            that raised, for people.
    """

    get_outcomes: Mapping[PageOutcome, int]
    set_outcomes: Mapping[PageOutcome, int]
    read_bytes: int
    written_bytes: int
    last_error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageFigures:
    """How a store is, as far as its backend can tell; None is what it does not know or have.

    A store can be shared: space and evictions are those of the whole of it.

    Attributes:
        used_bytes: space that it takes.
        limit_bytes: that it may take.
        spare_bytes: free space around it above what it leaves free; below 0 it has to shrink.
        num_pages: of this namespace that are stored.
        num_evicted_pages: that were given up to make room.
        num_index_rebuilds: how often this process had to make its index anew.
        num_direct_refusals: how often direct I/O was refused to this instance.
    """

    used_bytes: int | None = None
    limit_bytes: int | None = None
    spare_bytes: int | None = None
    num_pages: int | None = None
    num_evicted_pages: int | None = None
    num_index_rebuilds: int | None = None
    num_direct_refusals: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.known().items():
            if type(value) is not int:
                raise StorageError(f"{name} of a store must be an int, got {type(value).__name__}")

    def known(self) -> dict[str, int]:
        """Return those that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


class HiCacheStorage(ABC):
    """An L3 backend: keeps the pages of one namespace.

    Threading: several threads call at once; a call blocks its caller and releases the interpreter
    lock while it waits for I/O. Page memory belongs to the call until it returns, also past the
    deadline.

    Errors: what can go wrong with data, disk or network is an outcome of a page; a look-up, which
    has no outcomes, raises `StorageError` for it. Other exceptions are for misuse: `StorageError`
    for batches whose lengths do not agree, keys that are not hashes and pages that are not
    `page_bytes` long; `ClosedError` after `close`.

    Deadlines are absolute seconds on the config's clock. They are checked between pages: at or
    after the deadline no page is begun and those left are `TIMEOUT`.
    """

    @abstractmethod
    def __init__(self, config: HiCacheStorageConfig) -> None:
        """Open the store; the factory builds every backend this way.

        Raises:
            ConfigError: an option is unknown or cannot work, or the store cannot be reached.
        """

    @property
    @abstractmethod
    def capabilities(self) -> StorageCapabilities:
        """What this backend can do beyond the contract; constant."""

    @abstractmethod
    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        """Return how many leading pages are stored, stopping at the first that is not.

        A belief, not a promise: a page found here can be gone, or prove damaged, when it is read.

        Raises:
            StorageError: nobody can tell, because disk, network or server fail. Whoever asks goes
                on without the pages, as if they were not stored; but "0" would say that the backend
                is well.
        """

    @abstractmethod
    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """Read pages of one prefix, in order, into `pages`.

        A page is `OK` only when its bytes were verified to be those that were written under its
        key; what the memory of any other page then holds is unspecified. The read ends at the
        first page that is not `OK`, because a prefix with a hole is of no use: those behind it
        are `SKIPPED`. A page that proves damaged is no longer stored, so that the next write of
        its key repairs it.

        Args:
            keys: hashes of the pages.
            parent_keys: as in `batch_set`, for a backend that stores elsewhere what it reads; no
                answer depends on them. The page before one need not be in the batch: ranks that
                share the pages of a prefix read some each.
            pages: where the bytes go.
            deadline: see the class.

        Returns:
            One outcome per key.
        """

    @abstractmethod
    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """Store pages that are not stored yet, in order.

        A page is published as a whole or not at all. One that is stored already stays as it is and
        is `PRESENT`. One whose parent came before it in this batch and is not good is `SKIPPED`:
        behind a hole it could never be hit.

        Args:
            keys: hashes of the pages.
            parent_keys: what each key was chained from: the hash of the page before, the request's
                `namespace_seed`, or `b""`.
            pages: where the bytes are; only read.
            deadline: see the class.

        Returns:
            One outcome per key.
        """

    @abstractmethod
    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Announce memory in which pages lie, for backends that must pin or map it.

        Args:
            regions: address and length in bytes of each.
        """

    @abstractmethod
    def clear(self) -> int:
        """Remove all pages of this namespace and nothing else; return how many those were.

        A write in flight may publish its page after this returns.
        """

    @abstractmethod
    def stats(self) -> StorageStats:
        """Return counters as they are now; works after `close` as well."""

    def figures(self) -> StorageFigures:
        """Return how the store is now; unless a backend says so, nothing is known.

        Asked after calls, in their threads: it must be cheap and wait for nobody. It raises nothing
        for what happens to disk or network, and works after `close` as well.
        """
        return StorageFigures()

    @abstractmethod
    def close(self) -> None:
        """Release what this instance holds; the pages stay where they are.

        Idempotent; does not wait for calls in flight, which end by themselves. Afterwards every
        call but `stats`, `figures` and `close` raises `ClosedError`.
        """
