"""Acceptance cases: what the routes that change a cache let through, and what they say."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from http_rig import STORAGE, HttpRig
from scripted_parts import InjectedFactory, faulty_storage

from hicache.controller import AttachmentState
from hicache.errors import ConfigError, StorageError
from hicache.server import AdminKey
from hicache.storage.memory import MemoryPages, MemoryStorage
from hicache.testing.faulty_storage import Fault, Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache.storage import HiCacheStorageConfig
    from hicache.types import PageHash

KEY = "the key of this test"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
MEMORY = {"hicache_storage_backend": "memory"}
EXTRA = "hicache_storage_backend_extra_config_json"
PASSWORD, TOKEN = "hunter2-and-more", "tok-5f2a91"
SECRETS = {"address": f"redis://me:{PASSWORD}@host", "nested": {"token": TOKEN}}


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer another key of this"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", STORAGE), ("DELETE", STORAGE), ("POST", f"{STORAGE}/clear")],
)
def test_without_the_right_key_no_route_changes_anything(
    method: str, path: str, headers: dict[str, str]
) -> None:
    """C119: neither does any other method."""
    with HttpRig(admin_key=AdminKey(KEY)) as rig:
        rig.call("PUT", STORAGE, MEMORY, WITH_KEY)
        rig.run(1)
        answer = rig.call(method, path, {**MEMORY, "hicache_write_policy": "write_back"}, headers)
        assert answer.status == (403 if headers else 401)
        for other in {"GET", "HEAD", "PUT", "POST", "DELETE", "PATCH", "OPTIONS"} - {method}:
            assert rig.call(other, path, headers=headers).status in (401, 403, 405)
        status = rig.call("GET", STORAGE, headers=WITH_KEY).json
        assert (status["state"], status["hicache_write_policy"]) == ("attached", "write_through")
        cleared = rig.call("POST", f"{STORAGE}/clear", headers=WITH_KEY)
        assert cleared.json["done"] == "removed 6 page(s)"


DYNAMIC = [
    {"module_path": "os", "class_name": "getcwd"},
    {"module_path": "collections", "class_name": "OrderedDict"},
    {"module_path": "hicache.storage.base", "class_name": "HiCacheStorage"},
    {"module_path": "no.such.module", "class_name": "Any"},
]


@pytest.mark.parametrize("names", DYNAMIC, ids=lambda names: names["class_name"])
def test_only_a_backend_can_be_attached_and_only_with_a_key_can_code_be_named(
    names: dict[str, str],
) -> None:
    """C121."""
    options = {"backend_name": "mine", **names}
    plain = {"hicache_storage_backend": "dynamic", EXTRA: options}
    hidden = {
        "hicache_storage_backend": "tiered",
        EXTRA: json.dumps({"tiers": [{"backend": "dynamic", "extra_config": options}]}),
    }
    with HttpRig() as rig:
        for body in (plain, hidden):
            answer = rig.call("PUT", STORAGE, body)
            assert (answer.status, "needs an admin key" in answer.json["error"]) == (403, True)
    with HttpRig(admin_key=AdminKey(KEY)) as rig:
        for body in (plain, hidden):
            answer = rig.call("PUT", STORAGE, body, WITH_KEY)
            assert (answer.status, "'mine'" in answer.json["error"]) == (400, True)
            assert "Traceback" not in answer.json["error"]
        assert rig.cache.controller.storage_state is AttachmentState.DETACHED


DYNAMIC_MARKER = {"backend_name": "m", "module_path": "marker_module", "class_name": "Any"}
PAGES = {"eviction_policy": "marker_module:Any"}


def tiers(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"tiers": [{"backend": backend, "extra_config": options}]}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("dynamic", DYNAMIC_MARKER),
        ("file", PAGES),
        ("tiered", tiers("file", PAGES)),
        ("tiered", tiers("tiered", tiers("file", PAGES))),
    ],
)
def test_a_module_with_a_side_effect_is_not_even_imported_without_a_key(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, backend: str, options: dict[str, Any]
) -> None:
    """C121: with a key it is, and is refused for what it is."""
    (tmp_path / "marker_module.py").write_text("import sys; sys.marker.ran = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "marker_module", raising=False)
    marker = types.SimpleNamespace(ran=False)
    monkeypatch.setattr(sys, "marker", marker, raising=False)
    text = json.dumps(options).replace('{"eviction', f'{{"path": "{tmp_path}/store", "eviction')
    body = {"hicache_storage_backend": backend, EXTRA: text}
    with HttpRig() as rig:
        answer = rig.call("PUT", STORAGE, body)
        assert (answer.status, "needs an admin key" in answer.json["error"]) == (403, True)
    assert not marker.ran
    assert "marker_module" not in sys.modules
    with HttpRig(admin_key=AdminKey(KEY)) as rig:
        assert rig.call("PUT", STORAGE, body, WITH_KEY).status == 400
    assert marker.ran


class Talkative(MemoryStorage):
    """Says its options in every error."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(dataclasses.replace(config, extra_config={}))
        self.options = config.extra_config

    def batch_exists(self, keys: Sequence[PageHash]) -> int:
        raise StorageError(f"cannot ask with {dict(self.options)}")

    def clear(self) -> int:
        raise StorageError(f"cannot clear with {dict(self.options)}")


class Refusing(Talkative):
    """Says them when it is opened."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        raise ConfigError(f"cannot log in with {PASSWORD} and {dict(self.options)}")


@pytest.mark.parametrize("backend", [Talkative, Refusing])
def test_no_secret_is_said_whatever_a_backend_says(
    backend: type[Talkative],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """C123: in answers, status, metrics, errors and the log."""
    caplog.set_level(logging.DEBUG)
    body = {"hicache_storage_backend": "injected", EXTRA: SECRETS}
    with HttpRig(factory=InjectedFactory(backend)) as rig:
        answers = [rig.call("PUT", STORAGE, body)]
        assert answers[0].status == (400 if backend is Refusing else 200)
        rig.run(1)
        rig.drop_memory()
        rig.run(1)
        for method, path in [
            ("GET", STORAGE),
            ("POST", f"{STORAGE}/clear"),
            ("PUT", STORAGE),
            ("GET", "/health"),
            ("GET", "/metrics"),
            ("DELETE", STORAGE),
        ]:
            answers.append(rig.call(method, path, {**body, EXTRA: {**SECRETS, "x": 1}}))
    said = [answer.body.decode() for answer in answers] + [caplog.text, *capfd.readouterr()]
    for text in said:
        assert PASSWORD not in text
        assert TOKEN not in text
    if backend is Talkative:
        assert "cannot ask with" in answers[1].json["last_error"]
        assert answers[1].json["hicache_storage_backend_extra_config"] == {
            "address": "***",
            "nested": {"token": "***"},
        }
        assert "cannot clear with" in answers[2].json["error"]
    else:
        assert "cannot log in with *** and " in answers[0].json["error"]


def test_a_store_that_fails_turns_the_health_degraded_and_serving_goes_on() -> None:
    create = faulty_storage(MemoryPages(), faults={Verb.SET: [Fault.RAISE] * 99})
    with HttpRig(factory=InjectedFactory(create)) as rig:
        rig.call("PUT", STORAGE, {"hicache_storage_backend": "injected"})
        assert rig.run(1).output_ids
        health = rig.call("GET", "/health")
        assert (health.status, health.json["status"]) == (200, "degraded")
        assert health.json["reasons"][0] == "calls to storage backend 'injected' fail"
        status = rig.call("GET", STORAGE).json
        assert (status["healthy"], status["last_error"][:24]) == (False, "batch_set: InjectedFault")
