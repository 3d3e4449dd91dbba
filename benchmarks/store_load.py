"""The rows of `store` about the scheduler's thread: its step while prefetches and persists run."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from benchmarks.harness import Bar, Result, check, summarise, time_calls
from benchmarks.prompt import one_torch_thread
from benchmarks.scheduler import CacheSizes, Scheduler, open_cache
from benchmarks.store_disk import conditions, scratch_folder
from hicache.layout import KVGeometry
from hicache.radix import CopyKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from benchmarks.scheduler import Served

__all__ = ["LoadRows"]

T = TypeVar("T")

_MOVEMENTS: Final = (CopyKind.PERSIST, CopyKind.PREFETCH)

_PATIENCE_SECONDS: Final = 30.0

_GIB: Final = 1 << 30


def _cache_sizes() -> CacheSizes:
    geometry = KVGeometry(
        num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", page_size=64
    )
    return CacheSizes(geometry=geometry, device_pages=96, host_pages=192)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    """What a scheduler's thread has seen under load.

    Attributes:
        steps: us of each `check_hicache_events`.
        computed: us of a core that each of them took; the rest of its time it waited for the
            interpreter's lock, which another thread held, or for a core.
        loops: us of each piece of Python that waits for nothing.
        wakes: us by which the thread came back late from each sleep: it needs a core then, and the
            interpreter's lock.
        speeds: GB/s of each movement.
        busy_percent: part of their time that the threads for storage spent in calls of the store.
    """

    steps: list[float]
    computed: list[float]
    loops: list[float]
    wakes: list[float]
    speeds: dict[CopyKind, float]
    busy_percent: float


class _Scheduler(Scheduler):
    """One that also notes what its calls have computed.

    Attributes:
        computed: us of a core that each call took, by its name.
    """

    def __init__(self, served: Served, **options: Any) -> None:
        super().__init__(served, **options)
        self.computed: defaultdict[str, list[float]] = defaultdict(list)

    def _time(self, name: str, call: Callable[[], T], *, settle: bool = True) -> T:
        begin = time.thread_time_ns()
        result = super()._time(name, call, settle=settle)
        self.computed[name].append((time.thread_time_ns() - begin) / 1e3)
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRows:
    """The rows of a scheduler's step under load, and how much is measured.

    Attributes:
        open_cache: what is measured, from sizes and storage; see `scheduler.open_cache`.
        cache: its sizes; its tiers hold a part of the prompts, so that most come from storage.
        num_prompts: prompts that come again.
        prompt_pages: pages of each.
        num_workers: threads that call the store.
        seconds: how long the load is measured.
        persist_bytes: or until so much has been stored.
        step_seconds: how long the scheduler's thread leaves the others alone after each step.
        loop_length: of a piece of Python that is about as long as a step.
    """

    open_cache: Callable[..., AbstractContextManager[Served]] = open_cache
    cache: CacheSizes = dataclasses.field(default_factory=_cache_sizes)
    num_prompts: int = 32
    prompt_pages: int = 16
    num_workers: int = 2
    seconds: float = 15.0
    persist_bytes: int = 4 * _GIB
    step_seconds: float = 0.001
    loop_length: int = 6_000

    def __call__(self) -> list[Result]:
        """Measure them all."""
        alone = time_calls(self._loop, samples=2000)
        wakes_alone = [self._sleep() for _ in range(1000)]
        with one_torch_thread(), scratch_folder() as folder:
            params = conditions(
                folder,
                page_bytes=self.cache.geometry.page_bytes,
                threads=self.num_workers,
                order="random",
                huge_pages=True,
                layout="page_first_direct",
            )
            storage = {
                "backend": "file",
                "extra_config": {"path": str(folder)},
                "num_workers": self.num_workers,
            }
            with self.open_cache(self.cache, storage) as served:
                loaded = self._run(served)
        quiet, full = {**params, "background": "none"}, {**params, "background": "storage"}
        bars = (Bar(100), Bar(500, "p99"))
        rows = [
            summarise("check_hicache_events", loaded.steps, params=full, bars=bars),
            summarise("step_cpu", loaded.computed, params=full),
            summarise("wake", loaded.wakes, params=full),
            summarise("wake", wakes_alone, params=quiet),
            summarise("loop", loaded.loops, params=full),
            summarise("loop", alone, params=quiet),
            summarise(
                "storage_busy", [loaded.busy_percent], params=full, unit="%", better="higher"
            ),
        ]
        for kind, speed in loaded.speeds.items():
            moved = {**full, "movement": kind.value}
            rows.append(summarise("moved", [speed], params=moved, unit="GB/s", better="higher"))
        return rows

    def _run(self, served: Served) -> _Loaded:
        """Return what a scheduler does and suffers while storage is busy."""
        scheduler = _Scheduler(
            served,
            num_prompts=self.num_prompts,
            prompt_tokens=self.prompt_pages * self.cache.geometry.page_size,
            quiet=False,
        )
        stats = served.cache.controller.stats
        self._step_until(
            scheduler, lambda: all(stats[kind].num_bytes for kind in _MOVEMENTS), _PATIENCE_SECONDS
        )
        check(all(stats[kind].num_bytes for kind in _MOVEMENTS), "storage moves nothing")
        scheduler.times.clear()
        scheduler.computed.clear()
        before = {kind: (stats[kind].num_bytes, stats[kind].seconds) for kind in _MOVEMENTS}
        begin = time.monotonic()
        loops, wakes = self._step_until(
            scheduler,
            lambda: stats[CopyKind.PERSIST].num_bytes > self.persist_bytes,
            self.seconds,
        )
        seconds = time.monotonic() - begin
        speeds = {
            kind: (stats[kind].num_bytes - num_bytes) / seconds / 1e9
            for kind, (num_bytes, _) in before.items()
        }
        busy = sum(stats[kind].seconds - earlier for kind, (_, earlier) in before.items())
        scheduler.stop()
        return _Loaded(
            steps=scheduler.times["check_hicache_events"],
            computed=scheduler.computed["check_hicache_events"],
            loops=loops,
            wakes=wakes,
            speeds=speeds,
            busy_percent=100 * busy / seconds / self.num_workers,
        )

    def _step_until(
        self, scheduler: Scheduler, done: Callable[[], bool], seconds: float
    ) -> tuple[list[float], list[float]]:
        """Step, loop and sleep in turn until `done` or for so many seconds.

        Returns:
            The us of the loops, and by how many us each sleep was too long.
        """
        loops, wakes = [], []
        end, clock = time.monotonic() + seconds, time.perf_counter_ns
        while not done() and time.monotonic() < end:
            scheduler.step()
            begin = clock()
            self._loop()
            loops.append((clock() - begin) / 1e3)
            wakes.append(self._sleep())
        return loops, wakes

    def _sleep(self) -> float:
        """Leave the others alone for `step_seconds`; return by how many us it was longer."""
        begin = time.perf_counter_ns()
        time.sleep(self.step_seconds)
        return (time.perf_counter_ns() - begin) / 1e3 - self.step_seconds * 1e6

    def _loop(self) -> int:
        return sum(range(self.loop_length))
