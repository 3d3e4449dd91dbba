"""The command `hicache simulate`: runs, tells what was found, and writes it down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
from typing import TYPE_CHECKING

from hicache.clock import MonotonicClock
from hicache.errors import ConfigError
from hicache.sim.coverage import Coverage
from hicache.sim.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicache.clock import Clock
    from hicache.sim.shrinking import FailingRun
    from hicache.sim.simulation import Failure, Report

__all__ = ["SimulateArguments", "failure_text", "random_seed", "run_simulate"]

_SEED_BITS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateArguments:
    """What the command line asks for.

    Attributes:
        seed: of the first run, unless there are `seconds`.
        num_seeds: how many runs, each of the next seed.
        steps: of each run.
        ranks: that hold equal trees in each run.
        seconds: for how long runs of fresh seeds are begun, instead of `num_seeds`.
        json_path: where the report goes as JSON, if anywhere.
    """

    seed: int = 0
    num_seeds: int = 1
    steps: int
    ranks: int = 1
    seconds: float | None = None
    json_path: Path | None = None


def random_seed() -> int:
    """Return a seed that the operating system has drawn."""
    return random.SystemRandom().getrandbits(_SEED_BITS)


def run_simulate(
    arguments: SimulateArguments,
    *,
    say: Callable[[str], None],
    clock: Clock | None = None,
    draw_seed: Callable[[], int] = random_seed,
) -> int:
    """Simulate and tell people through `say`; a progress bar shows when a person is watching.

    Run after run, to the first that finds something; with `seconds`, until they have passed. A run
    that has begun is finished, and its seed is told before, so that it is known whatever happens.

    Args:
        arguments: what to run.
        say: takes a line, or several.
        clock: what `seconds` are measured on.
        draw_seed: gives the fresh seeds.

    Returns:
        The exit status: 0 nothing was wrong, 1 an invariant is broken or a declared meeting is
        missing.

    Raises:
        ConfigError: an argument cannot work.
    """
    _require_possible(arguments)
    clock = clock or MonotonicClock()
    started = clock.now()
    reports: list[Report] = []
    for seed in _seeds(arguments, clock, draw_seed):
        if arguments.seconds is not None or arguments.num_seeds > 1:
            say(_command(seed, arguments.steps, arguments.ranks))
        with _progress(arguments.steps) as progress:
            report = simulate(seed, arguments.steps, num_ranks=arguments.ranks, progress=progress)
        reports.append(report)
        if not report.passed:
            break
    seconds = clock.now() - started
    coverage = Coverage.total([report.coverage for report in reports])
    say(coverage.table())
    say(_summary(reports, seconds))
    say(_verdict(reports[-1]))
    if arguments.json_path is not None:
        text = json.dumps(_to_json(reports, coverage, seconds), indent=2)
        arguments.json_path.write_text(text + "\n", encoding="utf-8")
    return 0 if reports[-1].passed else 1


def _seeds(
    arguments: SimulateArguments, clock: Clock, draw_seed: Callable[[], int]
) -> Iterator[int]:
    if arguments.seconds is None:
        yield from range(arguments.seed, arguments.seed + arguments.num_seeds)
        return
    end = clock.now() + arguments.seconds
    yield draw_seed()
    while clock.now() < end:
        yield draw_seed()


def _require_possible(arguments: SimulateArguments) -> None:
    """Raise before the work begins, so that no long run ends without its report."""
    seconds, target = arguments.seconds, arguments.json_path
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--seconds must be more than 0, not {seconds}")
    if arguments.num_seeds < 1 or (seconds is not None and arguments.num_seeds > 1):
        raise ConfigError("--seeds must be at least 1, and says nothing together with --seconds")
    if target is None:
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {target}: {error}") from error
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise ConfigError(f"--json {target} cannot be written; name a file in a writable folder")


def _summary(reports: list[Report], seconds: float) -> str:
    seeds = f"seed {reports[0].seed}" if len(reports) == 1 else f"{len(reports)} seeds"
    num_steps = sum(report.num_steps for report in reports)
    num_episodes = sum(report.num_episodes for report in reports)
    num_ranks = reports[0].coverage.num_ranks
    ranks = "" if num_ranks == 1 else f" of {num_ranks} ranks"
    return f"{seeds}: {num_steps} steps in {num_episodes} episodes{ranks}, {seconds:.1f} s"


def _verdict(report: Report) -> str:
    if report.failure is not None:
        return failure_text(report, report.failure)
    if report.passed:
        return "every invariant held after every step"
    coverage = report.coverage
    unmet = [meeting for meeting in coverage.declared if meeting in coverage.unmet]
    names = "\n  ".join(" ".join(part.value for part in meeting) for meeting in unmet)
    return (
        f"never met with seed {report.seed}, though {report.num_steps} steps have to meet it:\n"
        f"  {names}"
    )


def failure_text(report: Report, failure: Failure) -> str:
    """Say what went wrong, how to see it again, and in how few steps it can be had."""
    shortest = failure.shortest
    return "\n".join(
        [
            f"BROKEN at step {failure.step}; again with:",
            f"  {_command(report.seed, failure.step, failure.run.num_ranks)}",
            *[f"  {violation}" for violation in failure.run.violations],
            f"shortest failing run, {len(shortest.decisions)} of {len(failure.run.decisions)} "
            "steps of the episode:",
            *[f"  {line}" for line in shortest.log],
            *[f"  {violation}" for violation in shortest.violations],
        ]
    )


def _command(seed: int, num_steps: int, num_ranks: int) -> str:
    ranks = "" if num_ranks == 1 else f" --ranks {num_ranks}"
    return f"hicache simulate --seed {seed} --steps {num_steps}{ranks}"


def _to_json(reports: list[Report], coverage: Coverage, seconds: float) -> dict[str, object]:
    newest = reports[-1]
    failure = newest.failure
    return {
        "seconds": seconds,
        "passed": newest.passed,
        "ranks": coverage.num_ranks,
        "runs": [
            {
                "seed": report.seed,
                "steps": report.num_steps,
                "episodes": report.num_episodes,
                "digest": report.digest,
            }
            for report in reports
        ],
        "meetings": [
            {
                "operation": meeting.operation.value,
                "state": meeting.state.value,
                "fault": meeting.fault.value,
                "count": coverage.counts[meeting],
                "declared": meeting in coverage.declared,
            }
            for meeting in sorted({*coverage.declared, *coverage.counts})
        ],
        "actions": dict(sorted(coverage.actions.items())),
        "failure": None
        if failure is None
        else {
            "seed": newest.seed,
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
