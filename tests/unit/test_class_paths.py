"""What a configuration names is found by its short name or by its path, or is refused by name."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from hicache.class_paths import find_class, is_class_path
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = {"first": 1, "second": 2}


def test_short_names_come_before_paths_and_what_a_path_names_is_returned_as_it_is() -> None:
    assert find_class("second", KNOWN, what="thing") == 2
    assert find_class("hicache.class_paths:find_class", KNOWN, what="thing") is find_class
    assert find_class("a:b", {"a:b": 3}, what="thing") == 3


@pytest.mark.parametrize(
    "name",
    ["third", "third:", ":Third", "", ".:Third", "a..b:C", "a:b:c", "a:b.c", " a:b", "a/b:c"],
)
def test_an_unknown_name_is_refused_with_those_there_are(name: str) -> None:
    assert not is_class_path(name)
    with pytest.raises(ConfigError, match=f"no thing '{name}'; give one of first, second, or mod"):
        find_class(name, KNOWN, what="thing")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("", "AttributeError"),
    ],
)
def test_whatever_a_module_does_when_it_is_imported_is_a_refusal_with_its_reason(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "somebodys_things.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somebodys_things", raising=False)
    assert is_class_path("somebodys_things:Thing")
    with pytest.raises(ConfigError, match=f"'somebodys_things:Thing' cannot be imported.*{reason}"):
        find_class("somebodys_things:Thing", KNOWN, what="thing")
