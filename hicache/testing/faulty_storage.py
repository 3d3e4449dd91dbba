"""A storage backend that misbehaves on purpose, on exactly the calls it is told to.

It breaks the contract in the ways in which plugins do: it raises, answers late, answers with the
wrong shape, or does not come back. It never answers `OK` for wrong bytes: to verify them is the
backend's part of the contract, and `storage_contract` tests that.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from enum import Enum
from typing import TYPE_CHECKING, Any

from hicache.storage.base import HiCacheStorage
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hicache.storage.base import Page, StorageCapabilities, StorageFigures, StorageStats
    from hicache.types import PageHash

__all__ = ["Fault", "FaultyStorage", "Gate", "InjectedFault", "Verb", "seeded_faults"]

_SCRIBBLE = 0xDB


class InjectedFault(Exception):
    """What a faulty call raises: deliberately no error of hicache."""


class Verb(str, Enum):
    """A call that moves or looks for pages."""

    EXISTS = "batch_exists"
    GET = "batch_get"
    SET = "batch_set"


class Fault(str, Enum):
    """What goes wrong with one call."""

    RAISE = "raise"
    """`InjectedFault`, before anything is done."""
    DELAY = "delay"
    """The call sleeps first and is right then."""
    SHORT = "short"
    """One outcome too few; one page fewer found."""
    LONG = "long"
    """One outcome too many; more pages found than were asked for."""
    WRONG_TYPE = "wrong_type"
    """An answer of another type."""
    HOLE = "hole"
    """The middle page is missing, in the answer and in memory; those behind it are not."""


class Gate:
    """Holds calls at their entry until a test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        """Set as soon as a call has arrived."""
        self._opened = threading.Event()

    def open(self) -> None:
        """Let all calls through, those to come as well."""
        self._opened.set()

    def pass_through(self) -> None:
        """Block until the gate is open."""
        self.entered.set()
        self._opened.wait()


def seeded_faults(
    seed: int, *, rate: float, faults: Sequence[Fault] = tuple(Fault)
) -> Iterator[Fault | None]:
    """Yield for call after call one of `faults` with probability `rate`, else `None`."""
    rng = random.Random(seed)
    while True:
        yield rng.choice(faults) if rng.random() < rate else None


class FaultyStorage(HiCacheStorage):
    """Wraps a backend; see `Fault` for what it can do.

    Thread-safe. The n-th call of a verb meets the n-th fault given for the verb.
    """

    def __init__(
        self,
        inner: HiCacheStorage,
        *,
        faults: Mapping[Verb, Iterable[Fault | None]] | None = None,
        gates: Mapping[Verb, Gate] | None = None,
        delay_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wrap `inner`.

        Args:
            inner: does the work.
            faults: for each verb a script, or `seeded_faults`; calls beyond its end are sound.
            gates: hold the calls of a verb at their entry, before their fault.
            delay_seconds: what a `DELAY` gives to `sleep`.
            sleep: how to pass time.
        """
        self._inner = inner
        self._faults = {verb: iter(script) for verb, script in (faults or {}).items()}
        self._gates = dict(gates or {})
        self._delay_seconds = delay_seconds
        self._sleep = sleep
        # Guards the scripts, which several threads draw from.
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> StorageCapabilities:
        """Those of the wrapped backend."""
        return self._inner.capabilities

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        """See `HiCacheStorage.batch_exists`."""
        fault = self._enter(Verb.EXISTS)
        found = self._inner.batch_exists(keys)
        if fault is Fault.SHORT:
            return max(found - 1, 0)
        if fault is Fault.LONG:
            return len(keys) + 1
        if fault is Fault.HOLE:
            return min(found, len(keys) // 2)
        return _wrong_type() if fault is Fault.WRONG_TYPE else found

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_get`."""
        fault = self._enter(Verb.GET)
        outcomes = self._inner.batch_get(keys, parent_keys, pages, deadline=deadline)
        if fault is Fault.HOLE and keys:
            middle = len(keys) // 2
            outcomes[middle] = PageOutcome.MISS
            for address, num_bytes in pages[middle]:
                ctypes.memset(address, _SCRIBBLE, num_bytes)
        return _misshape(outcomes, fault)

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        """See `HiCacheStorage.batch_set`."""
        fault = self._enter(Verb.SET)
        if fault is not Fault.HOLE or not keys:
            outcomes = self._inner.batch_set(keys, parent_keys, pages, deadline=deadline)
            return _misshape(outcomes, fault)
        middle = len(keys) // 2
        before, behind = slice(middle), slice(middle + 1, None)
        return [
            *self._inner.batch_set(
                keys[before], parent_keys[before], pages[before], deadline=deadline
            ),
            PageOutcome.FAILED,
            *self._inner.batch_set(
                keys[behind], parent_keys[behind], pages[behind], deadline=deadline
            ),
        ]

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `HiCacheStorage.register_memory`."""
        self._inner.register_memory(regions)

    def clear(self) -> int:
        """See `HiCacheStorage.clear`."""
        return self._inner.clear()

    def stats(self) -> StorageStats:
        """See `HiCacheStorage.stats`."""
        return self._inner.stats()

    def figures(self) -> StorageFigures:
        """See `HiCacheStorage.figures`."""
        return self._inner.figures()

    def close(self) -> None:
        """See `HiCacheStorage.close`; calls held at a gate stay held."""
        self._inner.close()

    def _enter(self, verb: Verb) -> Fault | None:
        if verb in self._gates:
            self._gates[verb].pass_through()
        with self._lock:
            fault = next(self._faults[verb], None) if verb in self._faults else None
        if fault is Fault.RAISE:
            raise InjectedFault(f"injected into {verb.value}")
        if fault is Fault.DELAY:
            self._sleep(self._delay_seconds)
        return fault


def _misshape(outcomes: list[PageOutcome], fault: Fault | None) -> list[PageOutcome]:
    if fault is Fault.SHORT:
        return outcomes[:-1]
    if fault is Fault.LONG:
        return [*outcomes, PageOutcome.OK]
    return _wrong_type() if fault is Fault.WRONG_TYPE else outcomes


def _wrong_type() -> Any:
    return "an answer of the wrong type"
