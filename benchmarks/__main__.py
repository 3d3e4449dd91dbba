"""The command line of the benchmark suite."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.catalogue import known_benchmarks
from benchmarks.harness import CheckFailed, describe_noise, run_steps
from benchmarks.peers.installed import add_peers_option, installed_peers
from benchmarks.table import Run, format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness import Step

__all__ = ["main", "report"]

_OTHER_COMMANDS: Final = {
    "all": "benchmarks.suite",
    "history": "benchmarks.regressions",
    "report": "benchmarks.report",
}

_EPILOG = """\
benchmarks:
{benchmarks}

other commands (each has its own --help):
  all DIR               run every benchmark, peers too where asked; one page of all results
  report DIR --html F   make the page of the results in DIR; --markdown F the tables for the docs
  history check DIR     compare the results in DIR with stored runs of the same kind of machine
  history add DIR       store the results in DIR for later comparisons

Prints every figure with the bar that it has to reach; the garbage collector is on, times are
medians and p99 of single calls. Only ratios of figures of one run say much on a shared machine;
`instructions` counts bytecodes instead, which no load changes.

peers are looked for in $HICACHE_PEERS_HOME, or ~/.cache/hicache-peers; docs/benchmarks.md tells
what has to be there. One that is not is named once and left out. Public traces for `replay` are
looked for in $HICACHE_TRACES, or in shared/traces beside the repository.

exit status: 0 done, 1 the work that was measured was not right, or a figure is worse than stored
ones (`history check`), 2 wrong usage. A bar that is missed is reported and does not change it.

examples:
  python -m benchmarks tree --quick
  python -m benchmarks hash --peers sglang --json build/bench/hash.json
  python -m benchmarks replay --quick --peers sglang
  python -m benchmarks all build/bench --quick --peers sglang,lmcache
  python -m benchmarks history check build/bench
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what `arguments` (by default the command line's) say, as `--help` has it.

    Returns:
        The exit status: 0 done, 1 what was checked failed. Wrong usage raises `SystemExit(2)`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] and given[0] in _OTHER_COMMANDS:
        # Only the page needs matplotlib and Jinja2.
        return int(importlib.import_module(_OTHER_COMMANDS[given[0]]).main(given[1:]))
    parser = _parser()
    options = parser.parse_args(given)
    target: Path | None = options.json
    if target is not None:
        # Before the work, so that no long run ends without its result.
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--json {target}: {error}")
        if target.is_dir() or not os.access(target.parent, os.W_OK):
            parser.error(f"--json {target} cannot be written; name a file in a writable folder")
    module = importlib.import_module(f"benchmarks.{options.name}")
    steps = module.steps(quick=options.quick, peers=installed_peers(options.peers))
    command = shlex.join(["python", "-m", "benchmarks", *given])
    return report(options.name, steps, command=command, quick=options.quick, json_path=target)


def report(
    benchmark: str,
    steps: Sequence[Step],
    *,
    command: str = "",
    quick: bool = False,
    json_path: Path | None = None,
) -> int:
    """Run `steps`, print the table and write the JSON; return the exit status of `main`."""
    noise = {"before": describe_noise()}
    print(f"before: {noise['before']}", flush=True)
    try:
        results = run_steps(steps, watch=sys.stderr)
    except CheckFailed as error:
        print(f"{benchmark}: check failed: {error}", file=sys.stderr)
        return 1
    noise["after"] = describe_noise()
    print(f"after:  {noise['after']}\n\n{format_table(results)}")
    if json_path is not None:
        run = Run(benchmark=benchmark, command=command, noise=noise, quick=quick, results=results)
        run.write(json_path)
    return 0


def _parser() -> argparse.ArgumentParser:
    known = known_benchmarks()
    width = max(map(len, known))
    listed = "\n".join(
        f"  {name:<{width}}  {about.partition(chr(10))[0]}" for name, about in known.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure one part of hicache and check that it did the work right.",
        epilog=_EPILOG.format(benchmarks=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=list(known), help="what to measure")
    parser.add_argument("--quick", action="store_true", help="fewer samples and smaller sizes")
    add_peers_option(parser)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
