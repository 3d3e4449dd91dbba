"""The other end of `process.PeerProcess`: answers lines of JSON, whatever the peer prints."""

from __future__ import annotations

import json
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Worker", "serve"]


class Worker(Protocol):
    """What answers: each public method one kind of line."""

    def version(self) -> str:
        """Return the version of the peer, which is the first line written."""


def serve(create: Callable[[], Worker]) -> None:
    """Answer each line `{"do": METHOD, ...arguments}` with one line until there are no more.

    Ends the process.

    Args:
        create: imports the peer; nothing of it may have been imported before.
    """
    # What the peer prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _attempt(create)
    answer = worker if isinstance(worker, dict) else worker.version()
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        request = json.loads(line)
        answer = _attempt(partial(getattr(worker, request.pop("do")), **request))
    # Threads of its libraries would keep the process.
    os._exit(0)


def _attempt(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, or the error that it raises, as an answer."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - the boundary of a process: the other one reports it
        return {"error": traceback.format_exc()}
