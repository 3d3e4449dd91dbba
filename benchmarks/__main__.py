"""The command line of the benchmark suite."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import CheckFailed, describe_noise, format_table, run_steps, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness import Step

__all__ = ["known_benchmarks", "main", "report"]

_EPILOG = """\
benchmarks:
{benchmarks}

Prints every figure with the bar that it has to reach; the garbage collector is on, times are
medians and p99 of single calls. Only ratios of figures of one run say much on a shared machine.

exit status: 0 done, 1 the work that was measured was not right, 2 wrong usage. A bar that is
missed is reported and does not change it.

examples:
  python -m benchmarks tree --quick
  python -m benchmarks hash --json build/bench/hash.json
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
    """Run the benchmark that `arguments` (by default the command line's) name.

    Returns:
        The exit status: 0 done, 1 a check failed. Wrong usage raises `SystemExit(2)`.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
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
    return report(options.name, module.steps(quick=options.quick), json_path=target)


def report(benchmark: str, steps: Sequence[Step], *, json_path: Path | None = None) -> int:
    """Run `steps`, print the table and write the JSON; return the exit status of `main`."""
    print(f"before: {describe_noise()}", flush=True)
    try:
        results = run_steps(steps, watch=sys.stderr)
    except CheckFailed as error:
        print(f"{benchmark}: check failed: {error}", file=sys.stderr)
        return 1
    print(f"after:  {describe_noise()}\n\n{format_table(results)}")
    if json_path is not None:
        text = json.dumps(to_json(benchmark, results), indent=2)
        json_path.write_text(text + "\n", encoding="utf-8")
    return 0


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
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
