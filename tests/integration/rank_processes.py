"""Processes that are ranks of one gloo group, started once and told what to do again and again."""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hicache.ranks import TorchRankGroup

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess
    from pathlib import Path
    from types import TracebackType

GUARD_SECONDS = 60.0
"""How long the parent waits for an answer before it ends the ranks."""


class RankProcesses:
    """`size` ranks; leaving it ends them, however they are."""

    def __init__(self, size: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        self._count = size
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, str(directory / "store"), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()

    def run(self, scenario: str, *, size: int | None = None, **options: Any) -> list[Any]:
        """Run a scenario to its end and return what each rank has answered; see `begin`."""
        self.begin(scenario, size=size, **options)
        return self.answers()

    def begin(self, scenario: str, *, size: int | None = None, **options: Any) -> None:
        """Begin `module:function` on the first `size` ranks at once.

        The function gets a fresh `TorchRankGroup` of them, its rank within, and `options`; where a
        value of `options` is a `PerRank`, its own.
        """
        self._count = count = size or len(self._pipes)
        for rank, pipe in enumerate(self._pipes):
            mine = {
                name: value[rank % len(value)] if isinstance(value, PerRank) else value
                for name, value in options.items()
            }
            pipe.send((scenario, count, mine))

    def answers(self) -> list[Any]:
        """Wait for the ranks and return their answers; None of one that has died.

        Raises:
            AssertionError: a rank has raised something; with its traceback.
        """
        return [self._answer(rank) for rank in range(len(self._pipes))][: self._count]

    def kill(self, rank: int) -> None:
        """End a rank with SIGKILL."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        assert wait([pipe], GUARD_SECONDS), f"rank {rank} does not answer"
        try:
            good, answer = pipe.recv()
        except EOFError:
            return None
        assert good, f"rank {rank}: {answer}"
        return answer


class PerRank(tuple[Any, ...]):
    """An option that each rank has its own value of; repeated when there are more ranks."""

    __slots__ = ()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=GUARD_SECONDS),
    )
    while True:
        try:
            scenario, count, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, _run(rank, scenario, count, options)
        except BaseException:  # noqa: BLE001  # told to the parent
            answer = False, traceback.format_exc()
        pipe.send(answer)


def _run(rank: int, scenario: str, count: int, options: Mapping[str, Any]) -> object:
    module, function = scenario.split(":")
    options = dict(options)
    deadline = options.pop("deadline_seconds", 10.0)
    # Every rank of the world takes part in making a group, also who is not in it.
    members = dist.new_group(list(range(count)), timeout=datetime.timedelta(seconds=deadline))
    if rank >= count:
        return None
    group = TorchRankGroup(members, timeout_seconds=deadline)
    run = getattr(importlib.import_module(module), function)
    return run(group, **options)
