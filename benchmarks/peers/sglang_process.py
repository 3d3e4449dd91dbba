"""SGLang's trees and page hashes, each driven in a process of its own, and where they are."""

from __future__ import annotations

import base64
import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.process import PeerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["SglangCore", "SglangProcess", "find_sglang", "pack"]

_NEWER = "sglang-0.5.23"
"""A release unpacked beside the one that is installed, to be imported in its place."""


@dataclasses.dataclass(frozen=True)
class SglangCore:
    """One thing of one release that can be measured.

    Attributes:
        core: `radix`, `hiradix`, `unified-rust` or `hash`.
        python: interpreter of SGLang's environment.
        source: folder with the release; None for the one installed in the environment.
    """

    core: str
    python: Path
    source: Path | None


def find_sglang(home: Path) -> list[SglangCore]:
    """Return what of SGLang is installed below `home`: the Python trees first, the newest last."""
    python = home / "venv-sglang" / "bin" / "python"
    if not python.exists():
        return []
    found = [SglangCore(core, python, None) for core in ("radix", "hiradix", "unified-rust")]
    newer = python.parents[1] / _NEWER
    if (newer / "sglang" / "__init__.py").exists():
        found.append(SglangCore("unified-rust", python, newer))
    return [*found, SglangCore("hash", python, found[-1].source)]


class SglangProcess(PeerProcess):
    """A process that does to an SGLang tree what it is told; arrays of tokens go as `pack` packs.

    Args:
        core: what to run.

    Attributes:
        name: how results name it, such as `sglang-0.5.23-unified-rust`.

    Raises:
        PeerFailed: it does not start; the message has what it last wrote.
    """

    def __init__(self, core: SglangCore) -> None:
        source = [] if core.source is None else [str(core.source)]
        super().__init__(core.python, "sglang_tree", core.core, *source)
        self.name = f"sglang-{self.version}-{core.core}"


def pack(tokens: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """Return token ids as a line of JSON carries them: int32 in base64."""
    return base64.b64encode(np.asarray(tokens, dtype=np.int32).tobytes()).decode("ascii")
