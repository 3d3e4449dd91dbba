"""Prefixes are pinned, listed and unpinned over HTTP, while requests run."""

from __future__ import annotations

import pytest
from http_rig import PAGE, STORAGE, HttpRig

from hicache.server import AdminKey

PINS = "/hicache/pins"
KEY = "k" * 40


def prompt(rig: HttpRig, seed: int) -> list[int]:
    return rig.request(seed).prompt_ids


def test_a_pinned_prompt_is_found_after_many_others_and_listed_until_it_is_unpinned() -> None:
    with HttpRig() as rig:
        first = rig.run(1)
        pinned = rig.call("POST", PINS, {"input_ids": first.prompt_ids, "ttl_seconds": 600})
        assert pinned.status == 200
        assert pinned.json["num_tokens"] == pinned.json["held_tokens"] == 96
        for seed in range(2, 30):
            rig.run(seed)
        again = rig.run(1)
        assert again.device_hit_tokens + again.host_hit_tokens == 96
        assert again.output_ids == first.output_ids

        listed = rig.call("GET", PINS).json["pins"]
        assert [one["pin_id"] for one in listed] == [pinned.json["pin_id"]]
        assert 0 < listed[0]["seconds_left"] < 600
        assert rig.call("GET", STORAGE).json["num_pins"] == 1
        path = f"{PINS}/{pinned.json['pin_id']}"
        assert rig.call("DELETE", path).json == {"done": "unpinned"}
        assert rig.call("DELETE", path).status == 404
        assert rig.call("GET", PINS).json == {"pins": []}
        for seed in range(2, 30):
            rig.run(seed)
        assert rig.run(1).computed_tokens == 100


def test_a_prefix_can_be_pinned_while_requests_run() -> None:
    with HttpRig() as rig:
        rig.engine.submit(rig.request(1))
        rig.engine.step()
        body = {"input_ids": prompt(rig, 1), "ttl_seconds": 60}
        assert rig.call("POST", PINS, body).status == 200
        rig.finish()
        assert rig.call("GET", PINS).json["pins"][0]["held_tokens"] == 96


def test_text_is_pinned_where_there_is_a_tokeniser() -> None:
    body = {"text": "x" * 2 * PAGE, "ttl_seconds": 60}
    with HttpRig() as rig:
        answer = rig.call("POST", PINS, body)
        assert (answer.status, "give the prefix as input_ids" in answer.json["error"]) == (
            400,
            True,
        )
    with HttpRig(encode=lambda text: list(text.encode())) as rig:
        assert rig.call("POST", PINS, body).json["num_tokens"] == 2 * PAGE


def test_a_long_prefix_may_have_a_long_body() -> None:
    with HttpRig() as rig:
        body = {"input_ids": [100_000] * 20_000, "ttl_seconds": 60}
        assert "of the device pool" in rig.call("POST", PINS, body).json["error"]
        assert rig.call("POST", PINS, b" " * (1024 * 1024 + 1)).status == 413


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be a JSON mapping"),
        ({"ttl_seconds": 1}, "give the prefix once"),
        ({"text": "a", "input_ids": [1], "ttl_seconds": 1}, "give the prefix once"),
        ({"text": 3, "ttl_seconds": 1}, "text must be a text"),
        ({"input_ids": [1], "cache_salt": 3, "ttl_seconds": 1}, "cache_salt must be a text"),
        ({"input_ids": "1", "ttl_seconds": 1}, "list of whole numbers"),
        ({"input_ids": [1.5], "ttl_seconds": 1}, "list of whole numbers"),
        ({"input_ids": [True], "ttl_seconds": 1}, "list of whole numbers"),
        ({"input_ids": [1 << 40], "ttl_seconds": 1}, "fit into int32"),
        ({"input_ids": [1] * 16}, "ttl_seconds must be a number"),
        ({"input_ids": [1] * 16, "ttl_seconds": True}, "ttl_seconds must be a number"),
        ({"input_ids": [1] * 16, "ttl_seconds": 0}, "a pin lasts for"),
        (b'{"input_ids": [1], "ttl_seconds": NaN}', "only whole pages"),
        ({"input_ids": [1] * 16, "ttl_seconds": 1, "x": 2}, "no field 'x'; known: input_ids, "),
        ({"input_ids": [1] * 16 * 20, "ttl_seconds": 1}, "320 tokens would be pinned"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_pinned_is_refused_with_the_reason(body: object, reason: str) -> None:
    with HttpRig() as rig:
        answer = rig.call("POST", PINS, body)
        assert answer.status == 400
        assert reason in answer.json["error"]
        assert rig.call("GET", PINS).json == {"pins": []}


def test_pins_need_the_admin_key() -> None:
    with HttpRig(admin_key=AdminKey(KEY)) as rig:
        for method, path in (("POST", PINS), ("GET", PINS), ("DELETE", f"{PINS}/00")):
            assert rig.call(method, path).status == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            assert rig.call(method, path, headers=headers).status in (200, 400, 404)
