"""Work, backends and ranks that do exactly what a test tells them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from hicache.errors import RanksLostError
from hicache.storage import HiCacheStorage, StorageCapabilities, StorageStats
from hicache.testing.faulty_storage import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache.storage import Page
    from hicache.types import PageHash, PageOutcome

GUARD_SECONDS = 10.0
"""How long a test waits for another thread before it fails."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened for too long"
        time.sleep(0.001)


class OpenGate(Gate):
    """A gate that holds nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.open()


class ScriptedWork:
    """`num_steps` calls, each of which passes `gate`; `log` gets the name at every call."""

    def __init__(
        self, name: str, log: list[str], *, num_steps: int = 1, gate: Gate | None = None
    ) -> None:
        self.name = name
        self.log = log
        self.gate = gate or OpenGate()
        self.events: list[str] = []
        self.ended = threading.Event()
        self._left = num_steps

    def step(self) -> bool:
        self.gate.pass_through()
        self.log.append(self.name)
        self._left -= 1
        more = self._left > 0 and "overdue" not in self.events
        if not more:
            self.events.append("ended")
            self.ended.set()
        return more

    def overdue(self) -> None:
        self.events.append("overdue")

    def refuse(self, reason: str) -> None:
        assert reason
        self.events.append("refused")
        self.ended.set()

    def wait(self) -> list[str]:
        assert self.ended.wait(GUARD_SECONDS), f"{self.name} did not end; it met {self.events}"
        return self.events


class ScriptedStorage(HiCacheStorage):
    """Answers each call with the next of `answers`; one that is an exception is raised."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[PageHash, ...]] = []
        self.parents: list[tuple[bytes, ...]] = []
        self.deadlines: list[float] = []

    @property
    def capabilities(self) -> StorageCapabilities:
        return StorageCapabilities(durable=False, shared_between_processes=False)

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        answer: int = self._answer(keys)
        return answer

    def batch_get(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self.deadlines.append(deadline)
        self.parents.append(tuple(parent_keys))
        answer: list[PageOutcome] = self._answer(keys)
        return answer

    def batch_set(
        self,
        keys: Sequence[PageHash],
        parent_keys: Sequence[bytes],
        pages: Sequence[Page],
        *,
        deadline: float,
    ) -> list[PageOutcome]:
        self.deadlines.append(deadline)
        self.parents.append(tuple(parent_keys))
        answer: list[PageOutcome] = self._answer(keys)
        return answer

    def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        pass

    def clear(self) -> int:
        return 0

    def stats(self) -> StorageStats:
        return StorageStats(
            get_outcomes={}, set_outcomes={}, read_bytes=0, written_bytes=0, last_error=None
        )

    def close(self) -> None:
        pass

    def _answer(self, keys: Sequence[PageHash]) -> Any:
        self.calls.append(tuple(keys))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer


class OtherRank:
    """A group of two: `other` says what the second rank answers to a vector of the first."""

    size = 2

    def __init__(self, other: Callable[[list[int]], list[int]]) -> None:
        self.other = other
        self.lengths: list[int] = []

    def agree(self, values: Sequence[int]) -> list[int]:
        self.lengths.append(len(values))
        return [
            min(mine, theirs) for mine, theirs in zip(values, self.other(list(values)), strict=True)
        ]


class TwoRanks:
    """Two ranks in two threads; one that waits for the other for too long has lost it."""

    size = 2

    def __init__(self, patience_seconds: float = GUARD_SECONDS) -> None:
        self._barrier = threading.Barrier(2, timeout=patience_seconds)
        self._said: list[Sequence[int]] = []

    def agree(self, values: Sequence[int]) -> list[int]:
        self._said.append(values)
        try:
            self._barrier.wait()
            agreed = [min(pair) for pair in zip(*self._said[-2:], strict=True)]
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RanksLostError("the other rank has not come") from error
        return agreed
