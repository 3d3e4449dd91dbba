"""The command line: parses arguments, calls, and turns errors into exit statuses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hicache import __version__
from hicache.errors import HiCacheError
from hicache.layout import HostLayout
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0 done, 1 the thing checked failed, 2 wrong usage or configuration.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HiCacheError as error:
        _say(f"hicache: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hicache",
        description="A KV cache for LLM serving: device (L1), host (L2) and storage (L3).",
    )
    parser.add_argument("--version", action="version", version=f"hicache {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_simulate(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="serve real conversations over L1, L2 and L3 and check every answer",
        description=(
            "Six people ask a code assistant about source files, turn by turn. L1 is too small for "
            "their conversations and so is L2; then the process ends and a new one goes on from "
            "L3. Every answer is computed again without a cache and must be equal, token for token."
        ),
        epilog="Exit status: 0 all answers equal, 1 one differs, 2 an option cannot work.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--model",
        choices=("smollm2", "random"),
        default="smollm2",
        help="SmolLM2-135M-Instruct (fetches 93 MB once), or a tiny model with random weights",
    )
    demo.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of weights, activations and KV; equal answers are promised for float32",
    )
    demo.add_argument(
        "--storage",
        metavar="URL",
        help="where L3 is, as file:DIRECTORY; it is kept (default: a temporary directory)",
    )
    demo.add_argument("--write-policy", choices=_values(WritePolicy), default="write_through")
    demo.add_argument("--prefetch-policy", choices=_values(PrefetchPolicy), default="wait_complete")
    demo.add_argument("--layout", choices=_values(HostLayout), default="page_first_direct")
    demo.add_argument(
        "--page-size", type=int, default=16, metavar="TOKENS", help="tokens in a page"
    )
    demo.add_argument("--seed", type=int, default=0, help="decides files, questions and order")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    demo.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    demo.set_defaults(run=_run_demo)


def _run_demo(arguments: argparse.Namespace) -> int:
    # Here, because only the demo needs torch models and its extra.
    from hicache.engine.demo import DemoArguments, run_demo

    return run_demo(
        DemoArguments(
            model=arguments.model,
            dtype=arguments.dtype,
            storage=arguments.storage,
            write_policy=arguments.write_policy,
            prefetch_policy=arguments.prefetch_policy,
            layout=arguments.layout,
            page_size=arguments.page_size,
            seed=arguments.seed,
            json_path=arguments.json,
            html_path=arguments.html,
        ),
        say=_say,
    )


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run a whole rank with injected faults on simulated time and check every step",
        description=(
            "Random requests meet copies and storage that fail, hang and come too late, on a "
            "simulated clock with simulated streams and workers. Every invariant is checked after "
            "every step, and how often each fault met each state of each movement is counted."
        ),
        epilog=(
            "Exit status: 0 all well, 1 an invariant is broken or a long run has not seen all that "
            "it must see, 2 an option cannot work."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    simulate.add_argument("--seed", type=int, default=0, help="everything follows from it")
    simulate.add_argument("--steps", type=int, default=20_000, metavar="N", help="how many steps")
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the counts as JSON")
    simulate.set_defaults(run=_run_simulate)


def _run_simulate(arguments: argparse.Namespace) -> int:
    # Here, because nothing else needs what makes a rank.
    from hicache.sim.command import SimulateArguments, run_simulate

    return run_simulate(
        SimulateArguments(seed=arguments.seed, steps=arguments.steps, json_path=arguments.json),
        say=_say,
    )


def _values(enum: type[WritePolicy] | type[PrefetchPolicy] | type[HostLayout]) -> list[str]:
    return [member.value for member in enum]


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
