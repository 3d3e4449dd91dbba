"""SGLang's trees and page hashes, each driven in a process of its own, and where they are."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["PeerFailed", "SglangCore", "SglangProcess", "find_sglang", "pack", "peers_home"]

_SCRIPT = Path(__file__).with_name("sglang_tree.py")
_NEWER = "sglang-0.5.23"
"""A release unpacked beside the one that is installed, to be imported in its place."""


class PeerFailed(Exception):
    """A peer could not be started or did not do what it was asked; the message says why."""


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


def peers_home() -> Path:
    """Return where peers are installed: `$HICACHE_PEERS_HOME`, or `~/.cache/hicache-peers`."""
    return Path(os.environ.get("HICACHE_PEERS_HOME") or "~/.cache/hicache-peers").expanduser()


def find_sglang(home: Path) -> list[SglangCore]:
    """Return what of SGLang is installed below `home`, the Python trees first."""
    python = home / "venv-sglang" / "bin" / "python"
    if not python.exists():
        return []
    found = [SglangCore(core, python, None) for core in ("radix", "hiradix", "unified-rust")]
    newer = python.parents[1] / _NEWER
    if (newer / "sglang" / "__init__.py").exists():
        found.append(SglangCore("unified-rust", python, newer))
    return [*found, SglangCore("hash", python, found[-1].source)]


class SglangProcess:
    """A process that does to an SGLang tree what it is told, one call at a time.

    Starting takes some seconds, because SGLang is imported; `close` ends it.

    Args:
        core: what to run.

    Attributes:
        name: how results name it, such as `sglang-0.5.23-unified-rust`.

    Raises:
        PeerFailed: it does not start; the message has what it last wrote.
    """

    def __init__(self, core: SglangCore) -> None:
        command = [str(core.python), "-W", "ignore", str(_SCRIPT), core.core]
        if core.source is not None:
            command.append(str(core.source))
        self._command = " ".join(command)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What it says besides is not kept: errors of calls come as answers.
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            version = self._answer()
        except BaseException:
            self.close()
            raise
        self.name = f"sglang-{version}-{core.core}"

    def call(self, do: str, /, **arguments: object) -> Any:
        """Return the answer of the method `do`; arrays of tokens go as `pack` packs them.

        Raises:
            PeerFailed: the method raised, or the process has ended.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise PeerFailed("the peer's process has ended") from error
        return self._answer()

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self._process.communicate()

    def _answer(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise PeerFailed(f"{self._command} ended without an answer")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer


def pack(tokens: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """Return token ids as a line of JSON carries them: int32 in base64."""
    return base64.b64encode(np.asarray(tokens, dtype=np.int32).tobytes()).decode("ascii")
