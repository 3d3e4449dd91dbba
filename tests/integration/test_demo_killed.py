"""A demo that is killed half way, and started again on what it left in storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from hicache.storage.page_store import summarize, verify_pages
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from pathlib import Path

GUARD_SECONDS = 120.0
WANTED_PAGES = 100


def command(storage: Path, report: Path) -> list[str]:
    options = ["--model", "random", "--storage", f"file:{storage}", "--json", str(report)]
    return [sys.executable, "-m", "hicache.cli", "demo", *options]


def num_stored_pages(storage: Path) -> int:
    if not (storage / "FORMAT").exists():
        return 0
    return sum(namespace.num_pages for namespace in summarize(str(storage)).namespaces)


def test_killed_half_way_it_goes_on_from_storage_with_equal_answers(tmp_path: Path) -> None:
    """The whole group of processes gets SIGKILL while pages are being written."""
    storage, report = tmp_path / "l3", tmp_path / "report.json"
    process = subprocess.Popen(
        command(storage, report), stderr=subprocess.DEVNULL, start_new_session=True
    )
    end = time.monotonic() + GUARD_SECONDS
    try:
        while num_stored_pages(storage) < WANTED_PAGES:
            assert process.poll() is None, "the demo ended before it could be killed"
            assert time.monotonic() < end, "the demo stores too little"
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not report.exists()

    outcomes = [page.outcome for page in verify_pages(str(storage))]
    assert len(outcomes) >= WANTED_PAGES
    assert set(outcomes) == {PageOutcome.OK}

    again = subprocess.run(
        command(storage, report), stderr=subprocess.PIPE, text=True, timeout=GUARD_SECONDS
    )
    assert again.returncode == 0, again.stderr
    found = json.loads(report.read_text())
    assert found["answers_equal"] is True
    first = [turn for turn in found["turns"] if turn["turn"] == 0]
    assert sum(turn["storage_hit_tokens"] for turn in first) > 0
