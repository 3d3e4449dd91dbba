"""All benchmarks, one after the other: `python -m benchmarks all DIR`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.catalogue import known_benchmarks
from benchmarks.peers.installed import add_peers_option
from benchmarks.regressions import compare_all, format_changes
from benchmarks.report import write_page
from benchmarks.table import read_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    RunCommand = Callable[[Sequence[str]], int]

__all__ = ["main", "run_all"]


def main(arguments: Sequence[str], *, run: RunCommand = subprocess.call) -> int:
    """Do what `arguments` say; return 1 when something failed. Wrong usage: `SystemExit(2)`.

    Args:
        arguments: of the command line.
        run: runs a command and returns its exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks all",
        description="Run every benchmark in a process of its own and make one page of the results. "
        "One that fails is named there, and the others go on.",
        epilog="exit status: 0 done, 1 a benchmark or the page failed, 2 wrong usage. A missed "
        "bar, and a figure that is worse than stored ones, are reported and do not change it.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="for NAME.json and report.html")
    parser.add_argument("--quick", action="store_true", help="fewer samples and smaller sizes")
    add_peers_option(parser)
    options = parser.parse_args(arguments)
    flags = ["--quick"] * options.quick
    if options.peers:
        flags += ["--peers", ",".join(sorted(options.peers))]
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        failed = run_all(list(known_benchmarks()), options.folder, flags, run=run)
        has_page = _report(options.folder, failed)
    except OSError as error:
        parser.error(str(error))
    return 0 if has_page and not failed else 1


def run_all(
    names: Sequence[str], folder: Path, flags: Sequence[str], *, run: RunCommand
) -> dict[str, int]:
    """Run the benchmarks in order; return the exit status of those that failed.

    What an earlier run left of one that fails is gone.
    """
    failed = {}
    for number, name in enumerate(names, start=1):
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        print(f"\n[{number}/{len(names)}] {name}", flush=True)
        begin = time.monotonic()
        status = run([sys.executable, "-m", "benchmarks", name, *flags, "--json", str(path)])
        if status:
            failed[name] = status
        outcome = f"failed with status {status}" if status else "done"
        print(f"[{number}/{len(names)}] {name} {outcome} in {time.monotonic() - begin:.0f} s")
    return failed


def _report(folder: Path, failed: Mapping[str, int]) -> bool:
    """Say what failed and what has changed since stored runs; write the page if that can be."""
    page = folder / "report.html"
    for name, status in failed.items():
        print(f"{name} failed with status {status}", file=sys.stderr)
    try:
        # Among some hundred figures a few are beyond their noise by chance, and a shared machine
        # has bad hours: changes are for people to look at, and no failure.
        print("\nbeside stored runs of this kind of machine:")
        print(format_changes(compare_all(read_runs(folder))))
        print(f"to store these results for later runs: python -m benchmarks history add {folder}")
        write_page(folder, page, failed=failed)
    except ValueError as error:
        print(f"there is no page: {error}", file=sys.stderr)
        return False
    print(page)
    return True
