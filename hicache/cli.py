"""The command line: parses arguments, calls, and turns errors into exit statuses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hicache import __version__
from hicache.errors import ConfigError, HiCacheError
from hicache.layout import HostLayout
from hicache.replay.arguments import add_replay
from hicache.types import PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.engine.demo import DemoArguments
    from hicache.replay.arguments import ReplayArguments

__all__ = ["main"]

_INTERRUPTED = 130
"""As shells say it: 128 and the number of SIGINT."""

_SERVING = {"host": "127.0.0.1", "port": 0, "admin_key_file": None, "rounds": None, "pause": 2.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0 done, 1 the thing checked failed, 2 wrong usage or configuration, 130 ended by Ctrl-C.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HiCacheError as error:
        _say(f"hicache: {error}")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hicache",
        description="A KV cache for LLM serving: device (L1), host (L2) and storage (L3).",
    )
    parser.add_argument("--version", action="version", version=f"hicache {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_simulate(commands)
    add_replay(commands, run=_run_replay)
    _add_storage(commands)
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
        epilog=(
            "Exit status: 0 all answers equal, 1 one differs, 2 an option cannot work, 130 Ctrl-C "
            "half way."
        ),
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
        help=(
            "where L3 is, as file:DIRECTORY; it is kept (default: a folder in ~/.cache/hicache, "
            "removed at the end; after a run that was killed the next one with the same options "
            "goes on from it)"
        ),
    )
    demo.add_argument("--write-policy", choices=_values(WritePolicy), default="adaptive")
    demo.add_argument(
        "--prefetch-policy",
        choices=_values(PrefetchPolicy),
        help="by default adaptive, and wait_complete for the random model",
    )
    demo.add_argument(
        "--eviction-policy",
        default="adaptive",
        metavar="NAME",
        help="see docs/policies.md (default: %(default)s)",
    )
    demo.add_argument(
        "--layout",
        choices=_values(HostLayout),
        help="of L2 and L3 (default: page_head if ranks change, else page_first_direct)",
    )
    demo.add_argument(
        "--page-size", type=int, default=16, metavar="TOKENS", help="tokens in a page"
    )
    demo.add_argument("--seed", type=int, default=0, help="decides files, questions and order")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    demo.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    _add_ranks(demo)
    _add_serving(demo)
    demo.set_defaults(run=_run_demo, **_SERVING)


def _add_ranks(demo: argparse.ArgumentParser) -> None:
    ranks = demo.add_argument_group(
        "ranks",
        "The model is spread over processes, each with its own part of every page and of L2, that "
        "agree on what is cached. Answers are compared with those of the same ranks without a "
        "cache.",
    )
    ranks.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    ranks.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    ranks.add_argument(
        "--restart-tp",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks after the restart; another number reads the same L3 by head",
    )


def _add_serving(demo: argparse.ArgumentParser) -> None:
    serving = demo.add_argument_group(
        "serving",
        "With --serve the conversations go on round after round in one process, without the check "
        "of the answers, next to an HTTP app: storage is attached, detached and cleared at "
        "/hicache/storage-backend between two rounds; /health and /metrics tell how it goes.",
    )
    serving.add_argument("--serve", action="store_true", help="serve until Ctrl-C, and HTTP")
    serving.add_argument("--host", help="another than this needs a key")
    serving.add_argument("--port", type=int, help="0 takes one that is free")
    serving.add_argument(
        "--admin-key-file", type=Path, metavar="FILE", help="holds the key that changes need"
    )
    serving.add_argument("--rounds", type=int, metavar="N", help="stop after N rounds")
    serving.add_argument("--pause", type=float, metavar="SECONDS", help="between two rounds")


def _run_demo(arguments: argparse.Namespace) -> int:
    # Here, because only the demo needs torch models and its extra.
    from hicache.engine.demo import DemoArguments, run_demo

    chosen = DemoArguments(
        model=arguments.model,
        dtype=arguments.dtype,
        storage=arguments.storage,
        write_policy=arguments.write_policy,
        prefetch_policy=arguments.prefetch_policy,
        eviction_policy=arguments.eviction_policy,
        layout=arguments.layout,
        page_size=arguments.page_size,
        seed=arguments.seed,
        tp=arguments.tp,
        pp=arguments.pp,
        restart_tp=arguments.restart_tp,
        json_path=arguments.json,
        html_path=arguments.html,
    )
    if arguments.serve:
        return _serve_demo(chosen, arguments)
    for name, default in _SERVING.items():
        if getattr(arguments, name) != default:
            raise ConfigError(f"--{name.replace('_', '-')} says how to serve; give --serve as well")
    return run_demo(chosen, say=_say)


def _serve_demo(chosen: DemoArguments, arguments: argparse.Namespace) -> int:
    if chosen.json_path is not None or chosen.html_path is not None:
        raise ConfigError("--json and --html report on a whole run; leave them out with --serve")
    if (chosen.tp, chosen.pp, chosen.restart_tp) != (1, 1, 1):
        raise ConfigError("--serve runs on one rank; leave out --tp, --pp and --restart-tp")
    try:
        from hicache.server.serving_demo import ServeArguments, run_serving_demo
    except ModuleNotFoundError as error:
        raise ConfigError(f"--serve needs {error.name}: pip install 'hicache[server]'") from error

    return run_serving_demo(
        chosen,
        ServeArguments(
            host=arguments.host,
            port=arguments.port,
            admin_key_file=arguments.admin_key_file,
            num_rounds=arguments.rounds,
            pause_seconds=arguments.pause,
        ),
        say=_say,
    )


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run whole ranks with injected faults on simulated time and check every step",
        description=(
            "Random requests meet copies and storage that fail, hang and come too late, on a "
            "simulated clock with simulated streams and workers. Every invariant is checked after "
            "every step, and how often each fault met each state of each movement is counted."
        ),
        epilog=(
            "A run follows from its seed and its numbers of steps and ranks alone: the same three "
            "show the same failure again. Exit status: 0 all well, 1 an invariant is broken or a "
            "long run has not seen all that it must see, 2 an option cannot work."
        ),
    )
    seeds = simulate.add_mutually_exclusive_group()
    seeds.add_argument(
        "--seed", type=int, default=0, help="of the first run (default: %(default)s)"
    )
    seeds.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=(
            "instead, run after run with a fresh seed each, printed before it begins, until S "
            "seconds have passed or one fails; the last run is finished"
        ),
    )
    simulate.add_argument(
        "--steps", type=int, default=20_000, metavar="N", help="of each run (default: %(default)s)"
    )
    simulate.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs, of N seeds (default: %(default)s)"
    )
    simulate.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="R",
        help="that hold equal trees, each with faults of its own (default: %(default)s)",
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the counts as JSON")
    simulate.set_defaults(run=_run_simulate)


def _run_simulate(arguments: argparse.Namespace) -> int:
    # Here, because nothing else needs what makes a rank.
    from hicache.sim.command import SimulateArguments, run_simulate

    return run_simulate(
        SimulateArguments(
            seed=arguments.seed,
            num_seeds=arguments.seeds,
            steps=arguments.steps,
            ranks=arguments.ranks,
            seconds=arguments.seconds,
            json_path=arguments.json,
        ),
        say=_say,
    )


def _run_replay(chosen: ReplayArguments) -> int:
    # Here, because only this reads traces.
    from hicache.replay.command import run_replay

    return run_replay(chosen, write=_print, say=_say)


def _add_storage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    storage = commands.add_parser(
        "storage",
        help="look into a page store (L3), verify, repair and measure it",
        description=(
            "Works on the directory of a store, also while engines use it. LOCATION is DIRECTORY "
            "or file:DIRECTORY."
        ),
        epilog="Exit status: 0 done, 1 pages are damaged, 2 there is no such store.",
    )
    actions = storage.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, text in _STORAGE_ACTIONS.items():
        action = actions.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        action.add_argument("location", metavar="LOCATION", help="DIRECTORY or file:DIRECTORY")
        action.add_argument("--json", type=Path, metavar="FILE", help="write the answer as JSON")
        action.set_defaults(run=_run_storage, action=name)
        if name == "ls":
            action.add_argument("--pages", action="store_true", help="list pages, not namespaces")
            action.add_argument(
                "--namespace",
                default="",
                metavar="DIGEST",
                help="only pages of namespaces whose digest begins so",
            )
        elif name == "verify":
            action.add_argument(
                "--repair",
                action="store_true",
                help="forget damaged pages, so that the next write of each repairs it",
            )
            action.add_argument(
                "--rebuild",
                action="store_true",
                help="make the index anew from the pages' headers; nobody may have it open",
            )
        elif name == "bench":
            action.add_argument("--page-bytes", type=int, default=128 << 10, metavar="N")
            action.add_argument("--total-bytes", type=int, default=256 << 20, metavar="N")
            action.add_argument("--threads", type=int, default=1, metavar="N")
            action.add_argument(
                "--direct-io", action="store_true", help="bypass the kernel's page cache"
            )


_STORAGE_ACTIONS = {
    "ls": "list the namespaces of a store, or its pages",
    "stat": "say how large a store is, what bounds it and who has it open",
    "verify": "read every page and compare it with its checksum",
    "gc": "give space of dead processes and removed pages back to the file system",
    "bench": "write pages of a namespace of its own, read them back, compare, remove them",
}


def _run_storage(arguments: argparse.Namespace) -> int:
    # Here, because only this needs the page store.
    from hicache.tools import storage_command

    chosen = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("run", "action", "json", "location")
    }
    return storage_command.run_storage(
        storage_command.StorageArguments(
            action=storage_command.StorageAction(arguments.action),
            location=arguments.location,
            json_path=arguments.json,
            **chosen,
        ),
        write=_print,
    )


def _values(enum: type[WritePolicy] | type[PrefetchPolicy] | type[HostLayout]) -> list[str]:
    return [member.value for member in enum]


def _print(text: str) -> None:
    sys.stdout.write(text)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
