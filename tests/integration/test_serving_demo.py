"""The demo that serves HTTP: a store goes and comes back between its rounds."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from hicache.cli import main
from hicache.engine.demo import DemoArguments
from hicache.server.serving_demo import ServeArguments, run_serving_demo

if TYPE_CHECKING:
    from pathlib import Path

GUARD_SECONDS = 30.0
pytestmark = pytest.mark.usefixtures("own_cache")
KEY = "a key of this test"


class Person:
    """Reads what the demo says, and uses curl."""

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.storage_hits: list[int] = []
        self.refusals: list[str] = []
        self.states: list[str] = []
        self.errors: list[BaseException] = []

    def hear(self, text: str) -> None:
        for line in text.splitlines():
            self.lines.put(line)

    def read(self, pattern: str) -> re.Match[str]:
        """Return the first match in what is said from now on."""
        end = time.monotonic() + GUARD_SECONDS
        while True:
            found = re.search(pattern, self.lines.get(timeout=max(0.0, end - time.monotonic())))
            if found is not None:
                return found

    def read_round(self) -> None:
        self.storage_hits.append(int(self.read(r"round .* L3 (\d+)%.*; L3 (\w+)$").group(1)))

    def try_it(self) -> None:
        try:
            url = self.read(r"  curl (http://.*)/health").group(1)
            self.ask(url, "DELETE", wanted=400)
            self.read_round()
            self.ask(url, "DELETE", wanted=200)
            self.read_round()
            self.ask(url, "PUT", b'{"hicache_storage_backend": "file"}', wanted=200)
            self.read_round()
        except (AssertionError, OSError, queue.Empty) as error:
            self.errors.append(error)

    def ask(self, url: str, method: str, body: bytes | None = None, *, wanted: int) -> None:
        """Ask again while the answer is that something is going on."""
        end = time.monotonic() + GUARD_SECONDS
        status, answer = self.curl(url, method, body)
        while status != wanted:
            assert status == 400, answer
            assert time.monotonic() < end, answer
            status, answer = self.curl(url, method, body)
        if status == 200:
            self.states.append(answer["state"])
        else:
            self.refusals.append(answer["error"])

    def curl(self, url: str, method: str, body: bytes | None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(
            f"{url}/hicache/storage-backend", body, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=GUARD_SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


def test_hits_in_storage_go_with_the_store_and_come_back_with_it(tmp_path: Path) -> None:
    """While conversations run both are refused with the reason."""
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    person = Person()
    thread = threading.Thread(target=person.try_it)
    thread.start()
    status = run_serving_demo(
        DemoArguments(model="random"),
        ServeArguments(num_rounds=3, pause_seconds=0.7, admin_key_file=key_file),
        say=person.hear,
    )
    thread.join(GUARD_SECONDS)
    assert status == 0
    assert not thread.is_alive()
    assert person.errors == []
    assert len(person.refusals) == 1
    assert re.fullmatch(
        r"cannot detach a storage backend while conversations are served \(\d request\(s\) run, "
        r"\d wait\); try again afterwards",
        person.refusals[0],
    )
    assert person.states == ["detached", "attached"]
    # The first round computes everything once; nothing is evicted and asked for again.
    assert person.storage_hits[:2] == [0, 0]
    assert person.storage_hits[2] > 0
    assert not [one for one in threading.enumerate() if one.name.startswith("hicache")]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--port", "70000"], "a port is 0 to 65535, not 70000"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--pause", "-1"], "pause must be 0 to 3600 seconds"),
        (["--json", "report.json"], "leave them out with --serve"),
        (["--admin-key-file", "{short}"], "at least 16 characters"),
        (["--admin-key-file", "{nothing}"], "cannot read the admin key"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_option_that_cannot_work_is_refused_with_the_reason(
    arguments: list[str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short").write_text("secret")
    paths = {"{short}": tmp_path / "short", "{nothing}": tmp_path / "nothing"}
    given = [str(paths.get(one, one)) for one in arguments]
    assert main(["demo", "--serve", "--model", "random", *given]) == 2
    said = capfd.readouterr().err
    assert reason in said
    assert "secret" not in said


def test_how_to_serve_is_of_no_use_without_serving(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "random", "--rounds", "2"]) == 2
    assert "--rounds says how to serve; give --serve as well" in capfd.readouterr().err
