"""A set of processes that are the ranks of one spread engine after another."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spread_scenarios import Served

if TYPE_CHECKING:
    from spread_scenarios import Scenario

__all__ = ["SpreadRanks"]

GUARD_SECONDS = 90.0


class SpreadRanks:
    """Ranks in processes of their own; to be closed.

    Args:
        folder: for what they have to share.
        num_ranks: processes. A scenario with fewer ranks leaves the last ones idle.
    """

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._num_served = 0
        worker = Path(__file__).with_name("engine_worker.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(worker), str(folder), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def serve(self, scenario: Scenario) -> list[Served]:
        """Let the ranks serve a scenario together; return what each of them says."""
        asked = self.processes[: scenario.num_ranks]
        self._num_served += 1
        request = {"number": self._num_served, "scenario": dataclasses.asdict(scenario)}
        for process in asked:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        replies = [_read(process) for process in asked]
        errors = [reply["error"] for reply in replies if "error" in reply]
        assert not errors, "\n".join([f"scenario {scenario}", *errors])
        return [Served(**reply["served"]) for reply in replies]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(GUARD_SECONDS), "a rank does not answer"
    line = process.stdout.readline()
    assert line, f"a rank has ended with status {process.wait()}"
    reply: dict[str, Any] = json.loads(line)
    return reply
