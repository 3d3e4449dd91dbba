"""A demo that is killed half way, and started again on what it left in storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from hicache.storage.page_store import summarize, verify_pages
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GUARD_SECONDS = 120.0
WANTED_PAGES = 100


class Person:
    """Runs the demo in a home of their own, as `make demo` does but with the tiny model."""

    def __init__(self, home: Path) -> None:
        self.cache = home / "cache" / "hicache"
        self.temporary = home / "tmp"
        self.temporary.mkdir()
        self._reports = home / "reports"
        self._environment = os.environ | {
            "HOME": str(home),
            "XDG_CACHE_HOME": str(self.cache.parent),
            "TMPDIR": str(self.temporary),
        }

    def start(self, name: str, *options: str) -> subprocess.Popen[str]:
        report = ["--json", str(self.report_file(name))]
        return subprocess.Popen(
            [sys.executable, "-m", "hicache.cli", "demo", "--model", "random", *report, *options],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=self._environment,
        )

    def run(self, name: str, *options: str) -> str:
        """Return what a run that ends well says."""
        return said_by(self.start(name, *options))

    def report_file(self, name: str) -> Path:
        return self._reports / f"{name}.json"

    def report(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report_file(name).read_text())
        return found

    def stop_half_way(self, name: str, number: signal.Signals) -> Path:
        """Stop a run while it stores pages; return where they are."""
        process = self.start(name)
        try:
            wait_until(process, lambda: len(self.stores()) == 1)
            (store,) = self.stores()
            wait_until(process, lambda: num_stored_pages(store) >= WANTED_PAGES)
        finally:
            said = stop(process, number)
        assert not self.report_file(name).exists()
        if number == signal.SIGINT:
            assert process.returncode == 128 + number, said
            assert f"L3 stays in {store}" in said
        return store

    def stores(self) -> list[Path]:
        return list(self.cache.glob("*/storage"))

    def leaves_nothing(self) -> bool:
        return not [*self.cache.iterdir(), *self.temporary.iterdir()]


@pytest.fixture
def person(tmp_path: Path) -> Person:
    return Person(tmp_path)


def said_by(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=GUARD_SECONDS)
    assert process.returncode == 0, said
    return said


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_SECONDS
    while not condition():
        assert process.poll() is None, "the demo ended before it could be stopped"
        assert time.monotonic() < end, "the demo stores too little"
        time.sleep(0.05)


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal to the whole group, as a terminal does; return what is said from then on."""
    os.killpg(process.pid, number)
    return process.communicate(timeout=GUARD_SECONDS)[1]


def num_stored_pages(storage: Path) -> int:
    if not (storage / "FORMAT").exists():
        return 0
    return sum(namespace.num_pages for namespace in summarize(str(storage)).namespaces)


def first_hits(report: dict[str, Any]) -> int:
    """Tokens of first prompts found in L3: only an earlier run can have stored them."""
    return sum(turn["storage_hit_tokens"] for turn in report["turns"] if turn["turn"] == 0)


def test_killed_half_way_it_goes_on_from_storage_with_equal_answers(
    person: Person, tmp_path: Path
) -> None:
    """The whole group of processes gets SIGKILL while pages are being written."""
    storage = tmp_path / "l3"
    chosen = ["--storage", f"file:{storage}"]
    process = person.start("killed", *chosen)
    try:
        wait_until(process, lambda: num_stored_pages(storage) >= WANTED_PAGES)
    finally:
        stop(process, signal.SIGKILL)
    assert not person.report_file("killed").exists()

    outcomes = [page.outcome for page in verify_pages(str(storage))]
    assert len(outcomes) >= WANTED_PAGES
    assert set(outcomes) == {PageOutcome.OK}

    said = person.run("again", *chosen)
    assert f"L3 stays in {storage}" in said
    found = person.report("again")
    assert found["answers_equal"] is True
    assert first_hits(found) > 0
    assert num_stored_pages(storage) >= len(outcomes)
    assert person.leaves_nothing()


def test_killed_with_its_own_store_the_next_run_goes_on_and_leaves_nothing(person: Person) -> None:
    """As `make demo` runs it: nobody has said where L3 is."""
    store = person.stop_half_way("killed", signal.SIGKILL)
    num_pages = num_stored_pages(store)

    said = person.run("again")
    assert f"has stored: {num_pages:,} pages" in said
    assert f"removed {store}" in said
    assert f"L3 had {num_pages:,} pages" in said
    found = person.report("again")
    assert found["answers_equal"] is True
    assert found["num_pages_at_start"] == num_pages >= WANTED_PAGES
    assert first_hits(found) > 0
    assert person.leaves_nothing()


def test_of_two_at_once_one_goes_on_from_what_ctrl_c_left_and_neither_takes_the_others_pages(
    person: Person,
) -> None:
    store = person.stop_half_way("stopped", signal.SIGINT)

    runs = {name: person.start(name) for name in ("one", "other")}
    said = {name: said_by(process) for name, process in runs.items()}
    (first,) = (name for name in runs if f"removed {store}" in said[name])
    (second,) = runs.keys() - {first}
    assert "going on from what" in said[first]
    assert first_hits(person.report(first)) > 0
    assert "going on from what" not in said[second]
    assert "removed " in said[second]
    assert person.report(second)["num_pages_at_start"] == 0
    assert first_hits(person.report(second)) == 0
    assert all(person.report(name)["answers_equal"] for name in runs)
    assert person.leaves_nothing()
