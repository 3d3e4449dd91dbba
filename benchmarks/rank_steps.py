"""What a scheduler's step costs where several ranks have to come to the same decision."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from benchmarks.harness import Bar, Result, check, summarise, time_calls
from benchmarks.scheduler import CacheSizes, open_cache
from hicache.ranks import TorchRankGroup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

__all__ = ["RankSteps"]

_PATIENCE_SECONDS = 120.0

_AGREEMENT_WORDS = 320


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What the first rank has seen.

    Attributes:
        steps: us of each `check_hicache_events` in which nothing has happened.
        agreements: us of the agreement of such a step alone.
        agreements_per_step: how often ranks met for a step.
    """

    steps: list[float]
    agreements: list[float]
    agreements_per_step: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The rows of idle steps of ranks in processes over gloo.

    Attributes:
        cache: of each rank.
        num_ranks: how many; a row each.
        samples: timed steps.
    """

    cache: CacheSizes
    num_ranks: Sequence[int] = (2, 4)
    samples: int = 1000

    def __call__(self) -> list[Result]:
        """Measure them all."""
        return [row for size in self.num_ranks for row in self._rows(size)]

    def _rows(self, size: int) -> list[Result]:
        measured = self._measure(size)
        params: dict[str, str | int | float | bool] = {"state": "idle", "ranks": size}
        step = summarise("check_hicache_events", measured.steps, params=params)
        met = [measured.agreements_per_step]
        bars = (Bar(1),)
        return [
            step.beside("all_reduce", measured.agreements),
            summarise("agreements_per_step", met, params=params, unit="calls", bars=bars),
        ]

    def _measure(self, size: int) -> _Measured:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                spawn.Process(
                    target=_run_rank,
                    args=(rank, size, f"{folder}/ranks", self, theirs if rank == 0 else None),
                    daemon=True,
                )
                for rank in range(size)
            ]
            for one in ranks:
                one.start()
            try:
                check(ours.poll(_PATIENCE_SECONDS), f"{size} ranks do not come to an end")
                measured: _Measured = ours.recv()
                for one in ranks:
                    one.join(_PATIENCE_SECONDS)
                statuses = [one.exitcode for one in ranks]
                check(statuses == [0] * size, f"ranks end with {statuses}")
            finally:
                for one in ranks:
                    one.kill()
        return measured


def _run_rank(
    rank: int, size: int, rendezvous: str, sizes: RankSteps, answer: Connection | None
) -> None:
    """Step as often as the others, in a process; the first rank tells what it took."""
    address = Path(rendezvous).as_uri()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    group = TorchRankGroup(timeout_seconds=_PATIENCE_SECONDS)
    with open_cache(sizes.cache, {"backend": "memory"}, ranks=group) as served:
        meeting = served.cache.controller.meeting
        before = meeting.num_agreements
        steps = time_calls(served.cache.check_hicache_events, samples=sizes.samples)
        num_steps = sizes.samples + math.ceil(sizes.samples / 10)
        met = (meeting.num_agreements - before) / num_steps
    words = list(range(_AGREEMENT_WORDS))
    agreements = time_calls(lambda: group.agree(words), samples=sizes.samples)
    if answer is not None:
        answer.send(_Measured(steps, agreements, met))
    dist.destroy_process_group()
