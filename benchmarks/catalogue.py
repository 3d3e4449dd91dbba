"""Which benchmarks there are."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["known_benchmarks"]


def known_benchmarks() -> dict[str, str]:
    """Return what each benchmark says about itself, by name; imports none of them.

    The first line says what is measured, what follows how the work is checked.
    """
    known = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(part, ast.FunctionDef) and part.name == "steps" for part in module.body):
            known[path.stem] = ast.get_docstring(module) or ""
    return known
