"""Which store a controller has: how it comes, how it goes, and what is told about it."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from hicache.controller.agreed_numbers import option_digests
from hicache.controller.joint_call import meet_until_done
from hicache.controller.rank_meeting import Call, paired, unequal
from hicache.errors import HiCacheError, StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.config import HiCacheConfig, PrefetchConfig, StorageConfig
    from hicache.controller.mover import Mover
    from hicache.controller.rank_meeting import RankMeeting
    from hicache.controller.records import StorageReport
    from hicache.types import PrefetchPolicy, WritePolicy

__all__ = ["AttachmentState", "StorageAttachment", "StoragePolicies", "StorageStatus"]


class AttachmentState(str, Enum):
    """Whether there is a store, and whether it takes work.

    detached --attach--> attached --detach--> detached
                            |                    ^
                            +-----> detaching ---+
                      a call hangs         detach again
    """

    DETACHED = "detached"
    ATTACHED = "attached"
    DETACHING = "detaching"
    """It takes no new work and is not closed yet: a call to it has not returned, the cache closes,
    or a rank of the engine was lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoragePolicies:
    """What attaching a store may change of a cache's configuration; see `HiCacheConfig`."""

    write_policy: WritePolicy
    prefetch_policy: PrefetchPolicy
    prefetch: PrefetchConfig

    @classmethod
    def of(cls, config: HiCacheConfig) -> StoragePolicies:
        """Return the policies of `config`."""
        return cls(
            write_policy=config.write_policy,
            prefetch_policy=config.prefetch_policy,
            prefetch=config.prefetch,
        )

    def applied_to(self, config: HiCacheConfig) -> HiCacheConfig:
        """Return `config` with these policies; a `ConfigError` when they do not fit the rest."""
        return dataclasses.replace(
            config,
            write_policy=self.write_policy,
            prefetch_policy=self.prefetch_policy,
            prefetch=self.prefetch,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageStatus:
    """What there is to know about the store of one rank.

    Attributes:
        state: see `AttachmentState`.
        config: of the store, also while it is detaching; None without one.
        policies: those in force.
        num_in_flight: operations of any kind that have not ended, also those of calls that hang.
        report: what the moving side says; its abandoned calls keep a store from being closed.
        reasons: why an attach, a detach or a clear would be refused now, one sentence each.
    """

    state: AttachmentState
    config: StorageConfig | None
    policies: StoragePolicies
    num_in_flight: int
    report: StorageReport
    reasons: tuple[str, ...]

    @property
    def backend(self) -> str | None:
        """Name of the store's backend."""
        return None if self.config is None else self.config.backend

    @property
    def model_name(self) -> str | None:
        """Name of the model whose pages the store holds."""
        return None if self.config is None else self.config.model_name


class StorageAttachment:
    """Opens, closes and clears the store of one rank, in step with the other ranks.

    All ranks call alike: an attach and a clear are one agreement, a detach is at most two, where
    none of them takes long (see `meet_until_done`), and afterwards every rank has the same `state`,
    whatever went wrong on one of them. When a rank is lost, all of them raise `RanksLostError`.

    Args:
        mover: where the store is opened.
        meeting: where the outcome is agreed.

    Attributes:
        state: see `AttachmentState`.
        config: of the store, also while it is detaching; None without one.
        batch_pages: pages of one call to the store attached last, the fewest of all ranks.
    """

    def __init__(self, mover: Mover, meeting: RankMeeting) -> None:
        self._mover = mover
        self._meeting = meeting
        self.state = AttachmentState.DETACHED
        self.config: StorageConfig | None = None
        self.batch_pages = 1

    @property
    def open_config(self) -> StorageConfig | None:
        """The configuration of the store that takes work; None when none does."""
        return self.config if self.state is AttachmentState.ATTACHED else None

    def attach(
        self,
        storage: StorageConfig,
        *,
        config: HiCacheConfig,
        policies: StoragePolicies | None,
        num_in_flight: int,
    ) -> HiCacheConfig:
        """Open a store; nothing when this very one is open.

        Blocks as its backend does, but for `storage.open_timeout_seconds` at most.

        Args:
            storage: the store.
            config: in force now.
            policies: to be in force from now on; those of `config` when None.
            num_in_flight: operations of any kind that have not ended.

        Returns:
            `config` with `policies`.

        Raises:
            HiCacheError: another one is there, something is in flight, another rank could not open
                its own, or was given other options; nothing has changed.
            ConfigError: the backend cannot be had; nothing has changed.
            StorageTimeout: it does not open in time; nothing has changed, and what it opens later
                is closed.
        """
        self._meeting.require_all()
        wanted, error = config, None
        try:
            self._require_vacant(storage)
            wanted = config if policies is None else policies.applied_to(config)
            _require_idle("attach", num_in_flight)
        except HiCacheError as refusal:
            error = refusal
        opened = False

        def open_store() -> int:
            nonlocal opened
            if error is not None:
                raise error
            if self.state is not AttachmentState.DETACHED:
                return self.batch_pages
            batch_pages = self._mover.attach_storage(storage)
            opened = True
            return batch_pages

        try:
            self.batch_pages = self._open_everywhere(storage, wanted, open_store)
        except BaseException:
            if opened:
                self._mover.discard_storage()
            raise
        self.state, self.config = AttachmentState.ATTACHED, storage
        return wanted

    def detach(self, timeout_seconds: float, *, num_in_flight: int) -> None:
        """Close the store; nothing without one. Blocks for `timeout_seconds` at most.

        When a call has not returned by then, the store is left detaching: no query, read or persist
        begins any more, everything else goes on, and a later detach completes this one. When a rank
        was lost, each of the others closes its own.

        Args:
            timeout_seconds: how long to wait for calls to return.
            num_in_flight: operations that have not ended and can still bring something.

        Raises:
            HiCacheError: something is in flight on some rank; nothing has changed.
            StorageTimeout: a call still runs; the store is detaching.
        """
        if self.state is AttachmentState.DETACHED:
            return
        if self.state is AttachmentState.ATTACHED:
            if not self._agreed(Call.DETACH, num_in_flight == 0):
                _require_idle("detach", num_in_flight)
                raise HiCacheError("cannot detach a storage backend: another rank is not idle")
            self.state = AttachmentState.DETACHING
        closed = self._closed_everywhere(partial(self._mover.detach_storage, timeout_seconds))
        if not closed:
            raise StorageTimeout(f"{self._why_detaching()}; detach again when it has returned")
        self.closed()

    def clear(self, *, num_in_flight: int) -> int:
        """Remove this namespace's pages from the store and return how many.

        Blocks as the backend does, but for `storage.open_timeout_seconds` at most.

        Raises:
            StorageTimeout: it is not cleared by then and goes on; work ends with nothing meanwhile.
            HiCacheError: no store takes work, something is in flight, or another rank could not
                clear its own.
        """
        if self.state is AttachmentState.DETACHING:
            raise HiCacheError(f"cannot clear: {self._why_detaching()}")
        if self.config is None:
            raise HiCacheError("no storage backend is attached; attach one before clearing it")
        _require_idle("clear", num_in_flight)
        num_removed, agreed = meet_until_done(
            self._meeting, Call.CLEAR, self._mover.clear_storage, lambda _: 1
        )
        if not agreed[0]:
            raise HiCacheError("another rank could not clear its store; clear again")
        return num_removed

    def refuse_work(self) -> None:
        """Take no new work: nobody is there to agree on what it brings, or everything closes."""
        if self.state is AttachmentState.ATTACHED:
            self.state = AttachmentState.DETACHING

    def closed(self) -> None:
        """Note that the mover has closed the store."""
        self.state, self.config = AttachmentState.DETACHED, None

    def status(self, policies: StoragePolicies, *, num_in_flight: int) -> StorageStatus:
        """Return what there is to know; asks the mover."""
        reasons = []
        if self._meeting.ended is not None:
            reasons.append(str(self._meeting.ended))
        elif self.state is AttachmentState.DETACHING:
            reasons.append(self._why_detaching())
        if num_in_flight:
            reasons.append(f"{num_in_flight} operation(s) are in flight")
        return StorageStatus(
            state=self.state,
            config=self.config,
            policies=policies,
            num_in_flight=num_in_flight,
            report=self._mover.storage_report(),
            reasons=tuple(reasons),
        )

    def _open_everywhere(
        self, storage: StorageConfig, config: HiCacheConfig, open_store: Callable[[], int]
    ) -> int:
        """Let every rank open its store; return the fewest pages that a call to one of them moves.

        Raises:
            HiCacheError: not every rank has opened the same store with the same options. Raised on
                all ranks, and none is left off worse for it: unlike trees, options that differ have
                done no harm yet. What `open_store` raises comes first.
        """
        digests = option_digests(config) | option_digests(storage)
        _, agreed = meet_until_done(
            self._meeting,
            Call.ATTACH,
            open_store,
            lambda batch_pages: batch_pages,
            more=paired(digests.values()),
        )
        different = unequal(digests, agreed[1:])
        if different:
            raise HiCacheError(
                f"cannot attach a storage backend: ranks were given unequal {', '.join(different)}"
            )
        if not agreed[0]:
            raise HiCacheError(
                f"another rank cannot attach storage backend {storage.backend!r}; its error says "
                "why"
            )
        return agreed[0]

    def _closed_everywhere(self, close: Callable[[], bool]) -> bool:
        """Return whether every rank that can still be met has closed its store."""
        if self._meeting.ended is not None:
            return close()
        _, agreed = meet_until_done(self._meeting, Call.CLOSE_STORE, close, int)
        return bool(agreed[0])

    def _agreed(self, call: Call, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return bool(self._meeting.agree(call, [int(value)])[0])

    def _require_vacant(self, wanted: StorageConfig) -> None:
        """Raise `HiCacheError` when another store than `wanted` is there."""
        if self.config is None or wanted == self.open_config:
            return
        if self.state is AttachmentState.DETACHING:
            raise HiCacheError(
                f"cannot attach: {self._why_detaching()}; detach it first, when that has returned"
            )
        name = self.config.backend
        options = " with other options" if name == wanted.backend else ""
        raise HiCacheError(f"storage backend {name!r} is attached{options}; detach it first")

    def _why_detaching(self) -> str:
        assert self.config is not None
        return f"storage backend {self.config.backend!r} is detaching and a call to it still runs"


def _require_idle(verb: str, num_in_flight: int) -> None:
    if num_in_flight:
        raise HiCacheError(
            f"cannot {verb} a storage backend while {num_in_flight} operation(s) are in flight; "
            "call check_hicache_events until none is"
        )
