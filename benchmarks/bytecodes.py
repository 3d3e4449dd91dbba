"""Counts the bytecodes that a call runs: a measure of Python code that no noise moves."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    T = TypeVar("T")

__all__ = ["count_bytecodes"]


def count_bytecodes(call: Callable[[], T]) -> tuple[T, int]:
    """Return what `call` returns, and how many bytecodes it and all that it calls have run.

    Only those of this thread, and of Python: a function in C is the one bytecode that calls it,
    whatever it does. The same work on the same minor version of Python gives the same number. The
    garbage collector does not run meanwhile; a debugger that traces this thread sees nothing of it.
    """
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        return note

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return note

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(enter)
    try:
        result = call()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return result, count
