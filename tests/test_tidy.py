"""The code base keeps its own rules."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
PYTHON = [ROOT / name for name in TRACKED if name.endswith(".py") and (ROOT / name).exists()]
PACKAGE = [path for path in PYTHON if path.is_relative_to(ROOT / "hicache")]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_FILE_BYTES = 1 << 20

BANNED = {
    "a promise instead of code": r"\b(TODO|FIXME|XXX)\b|NotImplementedError",
    "a path of one machine": r"(?<![\w.])/(work|root|farm|opt/wheels)/",
    "a second generation of a name": r"\bdef (batch|get|set|load|write)\w*_v[2-9]\b",
}
ENTRY_POINTS = {"hicache.cli", "hicache.engine.demo_phase"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_files_and_functions_fit(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for function in functions(ast.parse(text)):
        assert function.end_lineno is not None
        num_lines = function.end_lineno - function.lineno + 1
        assert num_lines <= MAX_FUNCTION_LINES, f"{function.name} has {num_lines} lines"


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_nothing_banned_is_written(path: Path) -> None:
    if path == Path(__file__):
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for what, pattern in BANNED.items():
            assert not re.search(pattern, line), f"{relative(path)}:{number}: {what}"


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_a_module_says_what_it_is_and_what_it_offers(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    offered = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    public = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    if not offered:
        assert not public or path.name == "__main__.py", "public names without __all__"
        return
    names = offered[0]
    if path.name != "__init__.py":
        assert set(public) - {"main"} <= set(names), set(public) - set(names)


def test_every_module_is_used() -> None:
    imported = set()
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module)
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Backends are named, not imported.
                imported.add(node.value)
    for path in PACKAGE:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        assert module in imported | ENTRY_POINTS | {"hicache"}, f"nothing imports {module}"


@pytest.mark.parametrize("name", TRACKED)
def test_no_large_file_is_tracked(name: str) -> None:
    path = ROOT / name
    assert not path.exists() or path.stat().st_size <= MAX_FILE_BYTES


def test_changelog_names_the_version() -> None:
    from hicache import __version__

    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
