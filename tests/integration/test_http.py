"""Attach, status, detach and clear over HTTP, beside an engine that serves requests."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from http_rig import GUARD_SECONDS, STORAGE, HttpRig
from scripted_parts import Barrier, InjectedFactory, faulty_storage

from hicache.controller import AttachmentState
from hicache.errors import ConfigError
from hicache.server import AdminKey, HttpServer
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from http_rig import Answer
    from starlette.applications import Starlette

    from hicache.storage import HiCacheStorageConfig

MEMORY = {"hicache_storage_backend": "memory"}
INJECTED = {"hicache_storage_backend": "injected"}
KEY = "k" * 40
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


def attach(rig: HttpRig, body: object = MEMORY, **headers: str) -> Answer:
    return rig.call("PUT", STORAGE, body, headers)


def status(rig: HttpRig) -> Any:
    answer = rig.call("GET", STORAGE)
    assert answer.status == 200
    return answer.json


def test_a_store_comes_and_goes_while_the_engine_lives_and_hits_with_it() -> None:
    with HttpRig() as rig:
        assert status(rig)["state"] == "detached"
        attached = attach(rig)
        assert (attached.status, attached.json["state"]) == (200, "attached")
        assert attached.json["done"] == "attached storage backend 'memory'"
        first = rig.run(1)
        rig.drop_memory()
        again = rig.run(1)
        assert again.storage_hit_tokens == 96
        assert again.output_ids == first.output_ids

        detached = rig.call("DELETE", STORAGE)
        assert (detached.status, detached.json["state"]) == (200, "detached")
        assert detached.json["done"] == "detached storage backend 'memory'"
        rig.drop_memory()
        assert rig.run(1).storage_hit_tokens == 0
        assert rig.call("DELETE", STORAGE).json["done"] == "nothing was attached"
        assert attach(rig).status == 200


def test_while_a_request_runs_everything_but_questions_is_refused_with_the_reason() -> None:
    with HttpRig() as rig:
        assert attach(rig).status == 200
        rig.engine.submit(rig.request(1))
        rig.engine.step()
        for method, path, verb in (
            ("PUT", STORAGE, "attach"),
            ("DELETE", STORAGE, "detach"),
            ("POST", f"{STORAGE}/clear", "clear"),
        ):
            answer = rig.call(method, path, MEMORY)
            assert answer.status == 400
            assert answer.json["error"] == (
                f"cannot {verb} a storage backend while 1 request(s) run; try again afterwards"
            )
        assert status(rig)["reasons"][0] == "1 request(s) run"
        assert rig.call("GET", "/health").status == 200
        assert rig.call("GET", "/metrics").status == 200
        assert rig.cache.controller.storage_state is AttachmentState.ATTACHED
        rig.finish()
        assert rig.call("DELETE", STORAGE).status == 200


def test_the_policies_of_an_attached_store_change_and_its_pages_stay() -> None:
    with HttpRig() as rig:
        assert attach(rig).status == 200
        rig.run(1)
        body = {
            **MEMORY,
            "hicache_storage_prefetch_policy": "timeout",
            "hicache_write_policy": "write_back",
            "hicache_storage_backend_extra_config_json": '{"prefetch_threshold": 64, '
            '"prefetch_timeout_base": 2, "hicache_storage_pass_prefix_keys": true}',
        }
        answer = attach(rig, body)
        assert answer.status == 200
        assert answer.json["done"].startswith("changed the policies; ")
        assert answer.json["hicache_storage_prefetch_policy"] == "timeout"
        assert answer.json["hicache_write_policy"] == "write_back"
        assert answer.json["prefetch_threshold"] == 64
        assert rig.cache.config.prefetch.timeout_base_seconds == 2
        assert attach(rig, body).json["done"].startswith("nothing was to do; ")
        assert rig.call("POST", f"{STORAGE}/clear").json["done"] == "removed 6 page(s)"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 60_000, "not JSON"),
        (b"[]", "must be a JSON mapping"),
        (b"{}", "must be the name of a storage backend"),
        ({"hicache_storage_backend": 3}, "must be the name of a storage backend"),
        ({"hicache_storage_backend": "nowhere"}, "no storage backend 'nowhere'"),
        ({**MEMORY, "speed": 3}, "no field 'speed'; known: hicache_storage_backend, "),
        ({**MEMORY, "hicache_write_policy": "sometimes"}, "write_policy must be one of"),
        ({**MEMORY, "hicache_storage_prefetch_policy": 3}, "prefetch_policy must be one of"),
        ({**MEMORY, "hicache_storage_backend_extra_config_json": "@/etc/hostname"}, "holds one"),
        ({**MEMORY, "hicache_storage_backend_extra_config_json": "{"}, "not inline JSON"),
        ({**MEMORY, "hicache_storage_backend_extra_config_json": "3"}, "must be a mapping"),
        ({**MEMORY, "hicache_storage_backend_extra_config_json": {"x": 1}}, "no option 'x'"),
        (
            {**MEMORY, "hicache_storage_backend_extra_config_json": {"prefetch_threshold": -1}},
            "threshold_tokens must be a whole number of tokens, at least 0",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_attached_is_refused_with_the_reason_and_changes_nothing(
    body: object, reason: str
) -> None:
    with HttpRig() as rig:
        before = rig.cache.config
        answer = attach(rig, body)
        assert (answer.status, rig.cache.config) == (400, before)
        assert reason in answer.json["error"]
        assert "Traceback" not in answer.json["error"]
        assert status(rig)["state"] == "detached"
        assert attach(rig).status == 200


def test_a_body_is_read_only_so_far() -> None:
    with HttpRig() as rig:
        assert attach(rig, b" " * 70_000).status == 413
        # Chunked: its length is not known before.
        address = urlsplit(rig.server.url)
        with socket.create_connection((address.hostname, address.port), GUARD_SECONDS) as one:
            head = f"PUT {STORAGE} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            one.sendall(head.encode() + b"11170\r\n" + b" " * 70_000 + b"\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 413 ")


def test_another_store_has_to_be_detached_first() -> None:
    with HttpRig() as rig:
        assert attach(rig).status == 200
        answer = attach(rig, {**MEMORY, "hicache_storage_backend_extra_config_json": '{"x": 1}'})
        assert answer.status == 400
        assert answer.json["error"].endswith("is attached with other options; detach it first")
        assert status(rig)["state"] == "attached"


def test_clear_says_how_many_pages_it_removed() -> None:
    """C077: and that there is no store is an error."""
    with HttpRig() as rig:
        assert rig.call("POST", f"{STORAGE}/clear").status == 400
        attach(rig)
        rig.run(1)
        assert rig.call("POST", f"{STORAGE}/clear").json["done"] == "removed 6 page(s)"
        assert rig.call("POST", f"{STORAGE}/clear").json["done"] == "removed 0 page(s)"


def test_a_detach_that_meets_a_hung_call_is_accepted_and_completed_by_a_later_one() -> None:
    """C073: requests are served meanwhile, and the health says what is wrong."""
    get = Barrier()
    factory = InjectedFactory(faulty_storage(MemoryPages(), gates={Verb.GET: get}))
    with HttpRig(factory=factory) as rig:
        rig.gates.append(get)
        assert attach(rig, INJECTED).status == 200
        first = rig.run(1)
        rig.drop_memory()
        get.shut()
        rig.run(1)
        assert get.entered.is_set()

        answer = rig.call("DELETE", STORAGE)
        assert (answer.status, answer.json["state"]) == (202, "detaching")
        assert "a call to it still runs; detach again when it has returned" in answer.json["done"]
        assert answer.json["num_abandoned_calls"] == 1
        assert attach(rig, INJECTED).status == 400
        health = rig.call("GET", "/health")
        assert (health.status, health.json["status"]) == (200, "degraded")
        assert "is detaching: a call to it hangs" in health.json["reasons"][0]
        assert rig.run(2).storage_hit_tokens == 0
        assert rig.call("DELETE", STORAGE).status == 202

        get.open()
        rig.engine.settle()
        assert rig.call("DELETE", STORAGE).json["state"] == "detached"
        assert rig.call("GET", "/health").json == {"status": "ok", "reasons": []}
        attach(rig, INJECTED)
        rig.drop_memory()
        again = rig.run(1)
        assert (again.storage_hit_tokens, again.output_ids) == (96, first.output_ids)


# -- who may ------------------------------------------------------------------------------

CHANGES = [("PUT", STORAGE), ("DELETE", STORAGE), ("POST", f"{STORAGE}/clear"), ("GET", STORAGE)]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Basic a2V5"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 403),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 403),
        ({"Authorization": "Bearer \xe4"}, 403),
    ],
    ids=str,
)
def test_with_a_key_nothing_is_told_or_done_without_it(
    headers: dict[str, str], expected: int
) -> None:
    with HttpRig(admin_key=AdminKey(KEY)) as rig:
        for method, path in CHANGES:
            answer = rig.call(method, path, MEMORY, headers)
            assert answer.status == expected
            assert ("www-authenticate" in answer.headers) == (expected == 401)
        assert rig.cache.controller.storage_state is AttachmentState.DETACHED
        assert rig.call("GET", "/health").status == 200
        assert rig.call("GET", "/metrics").status == 200
        for method, path in [*CHANGES, ("GET", STORAGE)]:
            if method != "POST":
                assert rig.call(method, path, MEMORY, WITH_KEY).status == 200


def test_without_a_key_a_page_in_a_browser_may_change_nothing() -> None:
    with HttpRig() as rig:
        for method, path in CHANGES:
            answer = rig.call(method, path, MEMORY, {"Origin": "http://127.0.0.1:80"})
            assert answer.status == 403
        assert rig.cache.controller.storage_state is AttachmentState.DETACHED


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_without_a_key_only_this_machine_can_be_listened_to(host: str, app: Starlette) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        HttpServer(app, host=host, port=0, admin_key=None)
    HttpServer(app, host=host, port=0, admin_key=AdminKey(KEY))


def test_an_address_that_cannot_be_had_is_named(app: Starlette) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = HttpServer(app, host="127.0.0.1", port=port, admin_key=None)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            server.__enter__()


@pytest.fixture
def app() -> Starlette:
    from starlette.applications import Starlette

    return Starlette()


# -- the scheduler's thread ---------------------------------------------------------------


def test_a_scheduler_that_does_not_answer_is_a_503_and_nothing_is_done_later() -> None:
    with HttpRig(deadline_seconds=0.1) as rig:
        pending = rig.send("PUT", STORAGE, MEMORY)
        answer = pending.result(GUARD_SECONDS)
        assert answer.status == 503
        assert answer.json["error"].endswith("not answered within 0.1 s; nothing was done")
        health = rig.send("GET", "/health").result(GUARD_SECONDS)
        assert (health.status, health.json["status"]) == (503, "unavailable")
        assert "has not answered within 0.1 s" in health.json["reasons"][0]
        rig.mailbox.serve()
        assert rig.cache.controller.storage_state is AttachmentState.DETACHED


def test_a_command_that_takes_longer_than_the_deadline_says_that_it_goes_on() -> None:
    opened = threading.Event()

    def create(config: Any) -> Any:
        assert opened.wait(GUARD_SECONDS)
        return faulty_storage(MemoryPages())(config)

    with HttpRig(factory=InjectedFactory(create), deadline_seconds=0.2) as rig:
        pending = rig.send("PUT", STORAGE, INJECTED)
        pending.add_done_callback(lambda _: opened.set())
        answer = rig.serve(pending)
        assert answer.status == 503
        assert answer.json["error"].endswith("is still at it; ask later what came of it")
        assert status(rig)["state"] == "attached"


def test_no_more_commands_wait_than_the_mailbox_holds() -> None:
    with HttpRig(max_commands=2, deadline_seconds=0.5) as rig:
        waiting = [rig.send("GET", STORAGE) for _ in range(4)]
        errors = [one.result(GUARD_SECONDS).json["error"] for one in waiting]
        assert sum("2 commands wait" in error for error in errors) == 2
        assert sum("within 0.5 s" in error for error in errors) == 2


def test_a_plugin_that_breaks_is_an_error_for_who_asked_and_for_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C121: no traceback goes out, and no secret into the log."""

    class Broken(MemoryStorage):
        def __init__(self, config: HiCacheStorageConfig) -> None:
            super().__init__(dataclasses.replace(config, extra_config={}))
            self.password = config.extra_config["password"]

        def register_memory(self, regions: Sequence[tuple[int, int]]) -> None:
            raise TypeError(f"cannot log in with {self.password}")

    with HttpRig(factory=InjectedFactory(Broken)) as rig:
        extra = {"password": "s3cr3t-word"}
        body = {**INJECTED, "hicache_storage_backend_extra_config_json": extra}
        answer = attach(rig, body)
        assert (answer.status, answer.json["error"]) == (
            500,
            "failed with TypeError; the log says where",
        )
        assert "TypeError" in caplog.text
        assert "s3cr3t" not in caplog.text
        assert status(rig)["state"] == "detached"
        assert rig.run(1).output_ids


def test_unknown_paths_and_methods_are_said_in_json() -> None:
    with HttpRig() as rig:
        assert rig.call("GET", "/nowhere").json == {"error": "Not Found"}
        assert rig.call("POST", STORAGE).status == 405
        assert rig.call("GET", f"{STORAGE}/clear").status == 405
