"""What the documentation shows is run; what it names exists."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if match.group(1) == language:
                found.append((f"{page.name}-{number}", match.group(2)))
    return found


@pytest.mark.parametrize(("name", "code"), blocks("python"), ids=lambda value: value[:40])
def test_python_snippets_run(name: str, code: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_there_are_snippets_to_run() -> None:
    assert blocks("python")
    assert blocks("sh")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(("name", "code"), blocks("sh"), ids=lambda value: value[:40])
def test_commands_in_the_documentation_exist(name: str, code: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in code.splitlines():
        command = line.split("#")[0].split()
        if not command:
            continue
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, re.MULTILINE), f"{name}: {line}"
        elif command[0] == "hicache" or command[:3] == ["python", "-m", "benchmarks"]:
            module = ["-m", "hicache.cli"] if command[0] == "hicache" else ["-m", "benchmarks"]
            arguments = command[1:] if command[0] == "hicache" else command[3:]
            # `--help` parses what stands before it and does nothing.
            result = subprocess.run(
                [sys.executable, *module, *arguments, "--help"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            assert result.returncode == 0, f"{name}: {line}: {result.stderr}"
        else:
            assert command[0] in ("git", "cd", "pip", "xdg-open"), f"{name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
