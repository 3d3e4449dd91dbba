"""The command line of the benchmark suite."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import CheckFailed, describe_noise, run_steps
from benchmarks.peers.process import peers_home
from benchmarks.peers.sglang_process import find_sglang
from benchmarks.peers.store_process import find_lmcache
from benchmarks.table import Run, format_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.harness import Step

__all__ = ["known_benchmarks", "main", "report"]

_PEERS: Mapping[str, Callable[[Path], Sequence[object]]] = {
    "lmcache": find_lmcache,
    "sglang": find_sglang,
}

_EPILOG = """\
benchmarks:
{benchmarks}

Prints every figure with the bar that it has to reach; the garbage collector is on, times are
medians and p99 of single calls. Only ratios of figures of one run say much on a shared machine.

peers are looked for in $HICACHE_PEERS_HOME, or ~/.cache/hicache-peers; docs/benchmarks.md tells
what has to be there. One that is not is named once and left out.

`python -m benchmarks report DIR --html FILE` makes one page of all results in a folder.

exit status: 0 done, 1 the work that was measured was not right, 2 wrong usage. A bar that is
missed is reported and does not change it.

examples:
  python -m benchmarks tree --quick
  python -m benchmarks hash --peers sglang --json build/bench/hash.json
  python -m benchmarks store --peers sglang,lmcache
  python -m benchmarks report build/bench --html build/bench/report.html
"""


def known_benchmarks() -> dict[str, str]:
    """Return what each benchmark measures, by name; imports none of them."""
    known = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "steps" for part in module.body):
            known[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return known


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what `arguments` (by default the command line's) say: run a benchmark, or make the page.

    Returns:
        The exit status: 0 done, 1 a check failed. Wrong usage raises `SystemExit(2)`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["report"]:
        # Only the page needs matplotlib and Jinja2.
        page = importlib.import_module("benchmarks.report")
        page.main(given[1:])
        return 0
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
    steps = module.steps(quick=options.quick, peers=_installed(options.peers))
    command = shlex.join(["python", "-m", "benchmarks", *given])
    return report(options.name, steps, command=command, json_path=target)


def report(
    benchmark: str, steps: Sequence[Step], *, command: str = "", json_path: Path | None = None
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
        Run(benchmark=benchmark, command=command, noise=noise, results=results).write(json_path)
    return 0


def _installed(names: frozenset[str]) -> frozenset[str]:
    """Return those of `names` that are installed; say which are not."""
    home = peers_home()
    missing = {name for name in names if not _PEERS[name](home)}
    for name in sorted(missing):
        print(f"{name} is not installed in {home}; going on without it", file=sys.stderr)
    return names - missing


def _peer_names(text: str) -> frozenset[str]:
    names = frozenset(filter(None, text.split(",")))
    if unknown := names - _PEERS.keys():
        known = ", ".join(sorted(_PEERS))
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; known: {known}")
    return names


def _parser() -> argparse.ArgumentParser:
    known = known_benchmarks()
    width = max(map(len, known))
    listed = "\n".join(f"  {name:<{width}}  {about}" for name, about in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure one part of hicache and check that it did the work right.",
        epilog=_EPILOG.format(benchmarks=listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=list(known), help="what to measure")
    parser.add_argument("--quick", action="store_true", help="fewer samples and smaller sizes")
    parser.add_argument(
        "--peers", metavar="NAMES", type=_peer_names, default=frozenset(),
        help=f"also run beside these, separated by commas: {', '.join(_PEERS)}",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
