"""A request says what is to be different; everything else comes from what there is."""

from __future__ import annotations

import json

import pytest

from hicache.config import HiCacheConfig, PrefetchConfig, StorageConfig
from hicache.errors import ConfigError
from hicache.server.attach_request import AttachRequest
from hicache.types import PrefetchPolicy, WritePolicy

STARTED_WITH = StorageConfig(
    backend="file",
    extra_config={"path": "started"},
    model_name="model",
    weights_revision="7",
    num_workers=3,
)
EXTRA = "hicache_storage_backend_extra_config_json"


def read(**fields: object) -> AttachRequest:
    body = {"hicache_storage_backend": "file", **fields}
    return AttachRequest.from_json(json.dumps(body).encode())


@pytest.mark.parametrize("extra", [{"path": "other"}, '{"path": "other"}'])
def test_options_come_as_a_mapping_or_as_sglang_writes_them(extra: object) -> None:
    storage = read(**{EXTRA: extra}).storage_config(None, STARTED_WITH)
    assert storage.extra_config == {"path": "other"}
    assert (storage.model_name, storage.weights_revision) == ("model", "7")
    assert storage.num_workers == 3


@pytest.mark.parametrize("extra", [None, {}, "{}", '{"prefetch_threshold": 5}'])
def test_without_options_of_the_backend_those_of_the_same_backend_stay(extra: object) -> None:
    request = read(**{EXTRA: extra})
    assert request.storage_config(None, STARTED_WITH) == STARTED_WITH
    attached = StorageConfig(
        backend="file", extra_config={"path": "now"}, model_name="m", weights_revision="8"
    )
    assert request.storage_config(attached, STARTED_WITH) == attached


def test_another_backend_gets_none_of_the_options() -> None:
    request = read(hicache_storage_backend="memory")
    storage = request.storage_config(STARTED_WITH, STARTED_WITH)
    assert (storage.backend, dict(storage.extra_config)) == ("memory", {})
    assert storage.model_name == "model"


def test_policies_that_are_not_named_stay() -> None:
    config = HiCacheConfig(
        write_policy=WritePolicy.WRITE_BACK, prefetch=PrefetchConfig(max_inflight_pages=9)
    )
    before = read().policies_in(config)
    assert before.applied_to(config) == config
    options = {"prefetch_threshold": 64, "prefetch_timeout_per_ki_token": 3}
    after = read(hicache_storage_prefetch_policy="timeout", **{EXTRA: options}).policies_in(config)
    assert after.write_policy is WritePolicy.WRITE_BACK
    assert after.prefetch_policy is PrefetchPolicy.TIMEOUT
    assert after.prefetch == PrefetchConfig(
        max_inflight_pages=9, threshold_tokens=64, timeout_per_ki_token_seconds=3
    )


@pytest.mark.parametrize(
    ("fields", "runs_code"),
    [
        ({}, False),
        ({"hicache_storage_backend": "dynamic"}, True),
        ({EXTRA: {"tiers": [{"backend": "file"}, {"backend": "dynamic"}]}}, True),
        ({EXTRA: {"tiers": [{"extra_config": {"tiers": [{"backend": "dynamic"}]}}]}}, True),
        ({EXTRA: {"path": "dynamically"}}, False),
        ({EXTRA: {"eviction_policy": "package.module:Class"}}, True),
        ({EXTRA: '{"eviction_policy": "module:Class"}'}, True),
        ({EXTRA: {"tiers": [{"extra_config": {"eviction_policy": "module:Class"}}]}}, True),
        ({EXTRA: {"tiers": [{"extra_config": {"tiers": [[{"any": "module:Class"}]]}}]}}, True),
        ({EXTRA: {"option": {"module:Class": {}}}}, True),
        ({"hicache_storage_backend": "module:Class"}, True),
        ({"hicache_write_policy": "module:Class"}, True),
        ({EXTRA: {"prefetch_threshold": "module:Class"}}, True),
    ],
)
def test_a_request_that_names_code_is_known_however_deep_it_stands(
    fields: dict[str, object], runs_code: bool
) -> None:
    """C121."""
    assert read(**fields).runs_code is runs_code


@pytest.mark.parametrize(
    "value",
    [
        "/var/lib/hicache",
        "./a:b",
        "file:/x",
        "file:///x",
        "redis://me:word@host:6379/0",
        "host:6379",
        "[::1]:6379",
        r"C:\hicache",
        "C:/hicache",
        "12:30:00",
        "a:b:c",
        "adaptive",
        ":",
        "module:",
        ":Class",
        7,
        None,
    ],
)
def test_places_and_addresses_name_no_code(value: object) -> None:
    """C121."""
    assert not read(**{EXTRA: {"path": value, "tiers": [{"extra_config": {"x": value}}]}}).runs_code


def test_no_nesting_is_too_deep_for_the_look_at_it() -> None:
    """C121."""
    value: object = "module:Class"
    for _ in range(5000):
        value = [value]
    request = AttachRequest(backend="file", extra_config={"tiers": value}, policies={}, prefetch={})
    assert request.runs_code


def test_errors_repeat_no_value() -> None:
    """C123."""
    for extra in ('{"password": "hunter2"', '["hunter2"]', "@hunter2", "hunter2", ["hunter2"]):
        with pytest.raises(ConfigError) as caught:
            read(**{EXTRA: extra})
        assert "hunter2" not in str(caught.value)
