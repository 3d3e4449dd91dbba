"""Which other systems can be run, by the names that `--peers` takes."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from benchmarks.peers.process import peers_home
from benchmarks.peers.sglang_process import find_sglang
from benchmarks.peers.store_process import find_lmcache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["add_peers_option", "installed_peers"]

_PEERS: Final[Mapping[str, Callable[[Path], Sequence[object]]]] = {
    "lmcache": find_lmcache,
    "sglang": find_sglang,
}


def add_peers_option(parser: argparse.ArgumentParser) -> None:
    """Let `parser` take `--peers NAMES`, a set of names; an unknown one is wrong usage."""
    parser.add_argument(
        "--peers", metavar="NAMES", type=_names, default=frozenset(),
        help=f"also run beside these, separated by commas: {', '.join(_PEERS)}",
    )  # fmt: skip


def installed_peers(names: frozenset[str]) -> frozenset[str]:
    """Return those of `names` that are installed; say on stderr which are not."""
    home = peers_home()
    missing = {name for name in names if not _PEERS[name](home)}
    for name in sorted(missing):
        print(f"{name} is not installed in {home}; going on without it", file=sys.stderr)
    return names - missing


def _names(text: str) -> frozenset[str]:
    names = frozenset(filter(None, text.split(",")))
    if unknown := names - _PEERS.keys():
        known = ", ".join(sorted(_PEERS))
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; known: {known}")
    return names
