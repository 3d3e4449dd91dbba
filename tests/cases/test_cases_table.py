"""docs/cases.md names every acceptance case once, with tests that exist and stand for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
CASE = re.compile(r"\bC(?:0\d\d|1[0-3]\d)\b")
ROW = re.compile(r"^\| (C\d{3}) \| ([^|]+) \| (\S.*) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py::\w+)`")


def cases_by_test() -> dict[str, set[str]]:
    """Return the cases that the docstring of each test, or class of tests, names."""
    cases = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                named = set(CASE.findall(ast.get_docstring(node) or ""))
                cases[f"{path.relative_to(TESTS)}::{node.name}"] = named
    return cases


def rows() -> list[tuple[str, str]]:
    """Return number and last cell of each case in the table."""
    text = (TESTS.parent / "docs" / "cases.md").read_text(encoding="utf-8")
    return [(number, cell) for number, _, cell in ROW.findall(text)]


def test_every_case_is_in_the_table_once_and_in_order() -> None:
    assert [number for number, _ in rows()] == [f"C{number:03}" for number in range(1, 134)]


def test_the_tests_in_the_table_exist_and_name_their_case() -> None:
    cases = cases_by_test()
    for number, cell in rows():
        for test in TEST.findall(cell):
            assert number in cases.get(test, set()), f"{test} does not stand for {number}"


def test_every_case_that_a_test_names_has_a_test_in_the_table() -> None:
    tested = {number for number, cell in rows() if TEST.search(cell)}
    named = set().union(*cases_by_test().values())
    assert named == tested
