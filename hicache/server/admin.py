"""What people may have done to a cache and get to know of it; on the thread that owns the cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from hicache.controller import AttachmentState
from hicache.errors import HiCacheError, StorageTimeout
from hicache.hiradix_cache import snapshot_of
from hicache.server.masking import mask_options, mask_text
from hicache.storage.circuit_breaker import CircuitState
from hicache.storage.instrumented import HealthState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache.config import StorageConfig
    from hicache.controller import StorageStatus
    from hicache.hiradix_cache import HiRadixCache, PinnedPrefix
    from hicache.metrics import CacheSnapshot
    from hicache.server.attach_request import AttachRequest
    from hicache.server.pin_request import PinRequest

__all__ = ["CacheAdmin", "Done"]

_DETACH_SECONDS = 0.2
"""For how long a detach may keep the scheduler from its work; a call that takes longer hangs."""


class Done(NamedTuple):
    """What was done, and how the store is afterwards.

    Attributes:
        done: in words.
        complete: False for a detach that a call keeps from its end.
        status: as `CacheAdmin.status`.
    """

    done: str
    complete: bool
    status: dict[str, object]


class CacheAdmin:
    """The commands of the HTTP app; every method belongs to the thread that owns the cache.

    What is said about the options of a backend, in answers and in errors, is masked.

    Args:
        cache: the cache.
        started_with: the store that the process was started with; a request that attaches one
            need only say what is to be different.
        busy: returns why the scheduler is not idle, as `2 request(s) run`, or an empty text.
        encode: text to token ids, of the model that is served; None takes pins as token ids only.
    """

    def __init__(
        self,
        cache: HiRadixCache,
        *,
        started_with: StorageConfig,
        busy: Callable[[], str],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self._cache = cache
        self._encode = encode
        self._started_with = started_with
        self._busy = busy

    def attach(self, request: AttachRequest) -> Done:
        """Attach a store, or change the policies of the one that is attached.

        Raises:
            HiCacheError: the scheduler is not idle, another store is attached, or this one cannot
                be had; nothing has changed.
        """
        self._require_idle("attach")
        controller = self._cache.controller
        before, policies_before = controller.storage, controller.storage_status.policies
        try:
            storage = request.storage_config(before, self._started_with)
            policies = request.policies_in(self._cache.config)
            self._cache.attach_storage_backend(storage, policies=policies)
        except HiCacheError as error:
            raise HiCacheError(self._mask(str(error), request.extra_config)) from None
        done = f"attached storage backend {storage.backend!r}"
        if before is not None:
            done = "changed the policies" if policies != policies_before else "nothing was to do"
            done += f"; storage backend {storage.backend!r} stays attached"
        return Done(done, complete=True, status=self.status())

    def detach(self) -> Done:
        """Detach the store; nothing without one.

        Raises:
            HiCacheError: the scheduler is not idle; nothing has changed.
        """
        state = self._cache.controller.storage_state
        if state is AttachmentState.DETACHED:
            return Done("nothing was attached", complete=True, status=self.status())
        if state is AttachmentState.ATTACHED:
            self._require_idle("detach")
        name = self._cache.controller.storage_status.backend
        try:
            self._cache.detach_storage_backend(_DETACH_SECONDS)
        except StorageTimeout as error:
            return Done(str(error), complete=False, status=self.status())
        return Done(f"detached storage backend {name!r}", complete=True, status=self.status())

    def clear(self) -> Done:
        """Remove this model's pages from the store.

        Raises:
            HiCacheError: the scheduler is not idle, no store takes work, or its backend failed.
        """
        self._require_idle("clear")
        try:
            num_pages = self._cache.clear_storage_backend()
        except HiCacheError as error:
            raise HiCacheError(self._mask(str(error))) from None
        return Done(f"removed {num_pages} page(s)", complete=True, status=self.status())

    def pin(self, request: PinRequest) -> dict[str, object]:
        """Pin a prefix, also while requests run; return it as `pins` does.

        Raises:
            HiCacheError: it cannot be pinned, or not besides what is pinned already.
        """
        key = request.key(self._encode)
        return _pin_fields(self._cache.pin_prefix(key, seconds=request.ttl_seconds))

    def unpin(self, pin_id: str) -> bool:
        """End a pin; False when there is none."""
        return self._cache.unpin_prefix(pin_id)

    def pins(self) -> list[dict[str, object]]:
        """Return what is pinned, as data for JSON; see `PinnedPrefix`."""
        return [_pin_fields(pinned) for pinned in self._cache.pinned_prefixes()]

    def status(self) -> dict[str, object]:
        """Return how the store is, as data for JSON; fields that SGLang has are named as there."""
        status = self._cache.storage_status
        snapshot = status.report.snapshot
        error = None if snapshot is None else snapshot.health.last_error
        options = {} if status.config is None else status.config.extra_config
        busy = self._busy()
        return {
            "hicache_storage_backend": status.backend,
            "hicache_storage_backend_extra_config": mask_options(options),
            "hicache_storage_prefetch_policy": status.policies.prefetch_policy.value,
            "hicache_write_policy": status.policies.write_policy.value,
            "prefetch_threshold": status.policies.prefetch.threshold_tokens,
            "state": status.state.value,
            "model_name": status.model_name,
            "healthy": None if snapshot is None else snapshot.health.state is HealthState.GREEN,
            "last_error": None if error is None else self._mask(error),
            "num_in_flight": status.num_in_flight,
            "num_abandoned_calls": status.report.num_abandoned_calls,
            "num_pins": len(self._cache.pinned_prefixes()),
            "reasons": [*([busy] if busy else []), *status.reasons],
        }

    def complaints(self) -> list[str]:
        """Return what is not as it should be, without anything that could be a secret.

        L3 can fail or hang, and requests are served all the same.
        """
        return _complaints(self._cache.storage_status)

    def snapshot(self) -> CacheSnapshot:
        """Return all numbers."""
        return snapshot_of(self._cache)

    def _mask(self, text: str, requested: Mapping[str, object] | None = None) -> str:
        """Return `text` without what any options that it may speak of say."""
        config = self._cache.storage_status.config
        options = [requested or {}, self._started_with.extra_config]
        options += [] if config is None else [config.extra_config]
        return mask_text(text, {"options": options})

    def _require_idle(self, verb: str) -> None:
        busy = self._busy()
        if busy:
            raise HiCacheError(
                f"cannot {verb} a storage backend while {busy}; try again afterwards"
            )


def _pin_fields(pinned: PinnedPrefix) -> dict[str, object]:
    return dataclasses.asdict(pinned)


def _complaints(status: StorageStatus) -> list[str]:
    report, complaints = status.report, []
    if status.state is AttachmentState.DETACHING:
        complaints.append(f"storage backend {status.backend!r} is detaching: a call to it hangs")
    if report.snapshot is not None and report.snapshot.health.state is HealthState.RED:
        complaints.append(f"calls to storage backend {status.backend!r} fail")
    complaints += [
        f"{verb.value} does not reach storage: too many calls have failed"
        for verb, state in report.circuits.items()
        if state is not CircuitState.CLOSED
    ]
    if report.num_abandoned_calls:
        complaints.append(
            f"{report.num_abandoned_calls} call(s) to storage are past their deadline and have not "
            "returned"
        )
    return complaints
