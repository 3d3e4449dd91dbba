"""A process that answers calls, run by the interpreter of another system's environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["PeerFailed", "PeerProcess", "peers_home"]

_ROOT = Path(__file__).parents[2]


class PeerFailed(Exception):
    """A peer could not be started or did not do what it was asked; the message says why."""

    @property
    def reason(self) -> str:
        """The last line of the message, which of a traceback is the error."""
        return str(self).strip().rpartition("\n")[2]


def peers_home() -> Path:
    """Return where peers are installed: `$HICACHE_PEERS_HOME`, or `~/.cache/hicache-peers`."""
    return Path(os.environ.get("HICACHE_PEERS_HOME") or "~/.cache/hicache-peers").expanduser()


class PeerProcess:
    """A process that does what it is told, one call at a time, in lines of JSON.

    Starting takes some seconds, because the peer is imported; `close` ends it.

    Args:
        python: interpreter of the peer's environment.
        module: module of this package that it runs; see `worker.serve`.
        arguments: command line of the module.

    Attributes:
        version: what the peer says first about itself.

    Raises:
        PeerFailed: it does not start; the message has what it last wrote.
    """

    def __init__(self, python: Path, module: str, *arguments: str) -> None:
        command = [str(python), "-W", "ignore", "-m", f"{__package__}.{module}", *arguments]
        self._command = " ".join(command)
        self._process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What it says besides is not kept: errors of calls come as answers.
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.version = str(self._answer())
        except BaseException:
            self.close()
            raise

    def call(self, do: str, /, **arguments: object) -> Any:
        """Return the answer of the method `do`.

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
