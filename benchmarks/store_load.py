"""The rows of `store` about the scheduler's thread: its step while prefetches and persists run."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Final

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
        loops: us of each piece of Python that waits for nothing.
        speeds: GB/s of each movement.
        busy_percent: part of their time that the threads for storage spent in calls of the store.
    """

    steps: list[float]
    loops: list[float]
    speeds: dict[CopyKind, float]
    busy_percent: float


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
        scheduler = Scheduler(
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
        before = {kind: (stats[kind].num_bytes, stats[kind].seconds) for kind in _MOVEMENTS}
        begin = time.monotonic()
        loops = self._step_until(
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
            loops=loops,
            speeds=speeds,
            busy_percent=100 * busy / seconds / self.num_workers,
        )

    def _step_until(
        self, scheduler: Scheduler, done: Callable[[], bool], seconds: float
    ) -> list[float]:
        """Step and loop in turn until `done` or for so many seconds; return the us of the loops."""
        loops, end, clock = [], time.monotonic() + seconds, time.perf_counter_ns
        while not done() and time.monotonic() < end:
            scheduler.step()
            begin = clock()
            self._loop()
            loops.append((clock() - begin) / 1e3)
            time.sleep(self.step_seconds)
        return loops

    def _loop(self) -> int:
        return sum(range(self.loop_length))
