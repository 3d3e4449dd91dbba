"""The command `hicache simulate`: runs, tells what was found, and writes it down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.sim.coverage import DECLARED
from hicache.sim.simulation import COVERING_STEPS, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicache.sim.shrinking import FailingRun
    from hicache.sim.simulation import Failure, Report

__all__ = ["SimulateArguments", "failure_text", "run_simulate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """What the command line asks for.

    Attributes:
        json_path: where the report goes as JSON, if anywhere.
    """

    seed: int
    steps: int
    json_path: Path | None = None


def run_simulate(arguments: SimulateArguments, *, say: Callable[[str], None]) -> int:
    """Simulate and tell people through `say`; a progress bar shows when a person is watching.

    Returns:
        The exit status: 0 nothing was wrong, 1 an invariant is broken or a declared meeting is
        missing.

    Raises:
        ConfigError: an argument cannot work.
    """
    target = arguments.json_path
    if target is not None:
        # Before the work, so that no long run ends without its report.
        _require_writable(target)
    started = time.monotonic()
    with _progress(arguments.steps) as progress:
        report = simulate(arguments.seed, arguments.steps, progress=progress)
    seconds = time.monotonic() - started
    say(report.coverage.table())
    say(
        f"seed {report.seed}: {report.num_steps} steps in {report.num_episodes} episodes, "
        f"{seconds:.1f} s"
    )
    if report.failure is not None:
        say(failure_text(report, report.failure))
    elif not report.passed:
        unmet = [meeting for meeting in DECLARED if meeting in report.coverage.unmet]
        names = "\n  ".join(" ".join(part.value for part in meeting) for meeting in unmet)
        say(f"never met, though {COVERING_STEPS} steps have to meet it:\n  {names}")
    else:
        say("every invariant held after every step")
    if target is not None:
        text = json.dumps(_to_json(report, seconds), indent=2)
        target.write_text(text + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def _require_writable(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {target}: {error}") from error
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"--json {target} cannot be written; name a file in a writable folder")


def failure_text(report: Report, failure: Failure) -> str:
    """Say what went wrong, how to see it again, and in how few steps it can be had."""
    shortest = failure.shortest
    return "\n".join(
        [
            f"BROKEN at step {failure.step}; again with:",
            f"  hicache simulate --seed {report.seed} --steps {failure.step}",
            *[f"  {violation}" for violation in failure.run.violations],
            f"shortest failing run, {len(shortest.decisions)} of {len(failure.run.decisions)} "
            "steps of the episode:",
            *[f"  {line}" for line in shortest.log],
            *[f"  {violation}" for violation in shortest.violations],
        ]
    )


def _to_json(report: Report, seconds: float) -> dict[str, object]:
    counts = report.coverage.counts
    failure = report.failure
    return {
        "seed": report.seed,
        "steps": report.num_steps,
        "episodes": report.num_episodes,
        "seconds": seconds,
        "passed": report.passed,
        "digest": report.digest,
        "meetings": [
            {
                "operation": meeting.operation.value,
                "state": meeting.state.value,
                "fault": meeting.fault.value,
                "count": counts[meeting],
                "declared": meeting in DECLARED,
            }
            for meeting in sorted({*DECLARED, *counts})
        ],
        "failure": None
        if failure is None
        else {
            "step": failure.step,
            "violations": list(failure.run.violations),
            "shortest": _run_to_json(failure.shortest),
        },
    }


def _run_to_json(run: FailingRun) -> dict[str, object]:
    return {
        "episode": run.seed,
        "decisions": [list(decision) for decision in run.decisions],
        "log": list(run.log),
        "violations": list(run.violations),
    }


@contextlib.contextmanager
def _progress(num_steps: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on a terminal if `tqdm`, of the extra `demo`, is there."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda _count: None
        return
    with tqdm(total=num_steps, unit="step", disable=None) as bar:
        yield bar.update
