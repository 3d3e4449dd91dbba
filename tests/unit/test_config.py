"""Laws of the options: what is accepted, and what is refused with which words."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.config import (
    HiCacheConfig,
    HostPoolConfig,
    PrefetchConfig,
    StorageConfig,
    options,
)
from hicache.errors import ConfigError
from hicache.layout import HostLayout
from hicache.types import IoBackend, PrefetchPolicy, StorageAdmission, WritePolicy

SECTIONS: dict[str, type[Any]] = {
    "host": HostPoolConfig,
    "storage": StorageConfig,
    "prefetch": PrefetchConfig,
}
REQUIRED: dict[str, Any] = {"backend": "file", "model_name": "smollm2", "weights_revision": "r1"}

NOT_WHOLE: list[object] = ["64", 1.5, True, None, [1], float("nan")]
NOT_POSITIVE: list[object] = [0, -1.5, float("inf"), float("nan"), "2", True, 10**400]
NOT_TEXT: list[object] = ["", None, 7]

BAD_VALUES: dict[str, list[Any]] = {
    "page_size": [0, -64, *NOT_WHOLE],
    "write_policy": ["sometimes", "", None, 1, ["write_back"], IoBackend.DIRECT],
    "pinned_share": [-0.1, 1.1, "much", None],
    "write_watermark": [-0.1, 1.1, "much", None],
    "write_by_layer": [0, 1, "true", None],
    "prefetch_policy": ["never", None, {}],
    "eviction_policy": [None, 1, {}],
    "io_backend": ["kernel", None, True],
    "load_back_threshold_tokens": [-1, *NOT_WHOLE],
    "load_cost_estimate": [0, 1, "true", None],
    "num_load_slots": [0, *NOT_WHOLE],
    "host.layout": ["row_first", None, 0],
    "host.ratio": NOT_POSITIVE,
    "host.size_bytes": [0, -1, 1e9, "1GB", False],
    "host.huge_pages": [0, 1, "true", None],
    "storage.backend": NOT_TEXT,
    "storage.extra_config": [None, [], "{}", {1: "a"}, {"a": {"b": [object()]}}, {"a": 1e999}],
    "storage.model_name": NOT_TEXT,
    "storage.weights_revision": NOT_TEXT,
    "storage.admission": ["some", "", None, True],
    "storage.tp_lcm_size": [0, -1, 2.0, "8", True],
    "storage.num_workers": [0, 33, *NOT_WHOLE],
    "storage.batch_pages": [0, -1, 2.0, "8", True],
    "storage.call_timeout_seconds": [None, *NOT_POSITIVE],
    "storage.open_timeout_seconds": [None, *NOT_POSITIVE],
    "storage.refresh_seconds": [None, *NOT_POSITIVE],
    "storage.max_inflight_persist_operations": [0, *NOT_WHOLE],
    "storage.retry_attempts": [-1, *NOT_WHOLE],
    "storage.breaker_failures": [-1, *NOT_WHOLE],
    "storage.breaker_cooldown_seconds": [None, *NOT_POSITIVE],
    "prefetch.threshold_tokens": [-1, *NOT_WHOLE],
    "prefetch.cost_estimate": [0, 1, "true", None],
    "prefetch.timeout_base_seconds": [-1, "long", None],
    "prefetch.timeout_per_ki_token_seconds": [-0.5, "long", None],
    "prefetch.max_inflight_pages": [0, -1, 2.0, "8", True],
}


def all_paths() -> list[str]:
    nested = [f"{name}.{f.name}" for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
    own = [f.name for f in dataclasses.fields(HiCacheConfig) if f.name not in SECTIONS]
    return own + nested


def mapping_with(path: str, value: object) -> dict[str, object]:
    section, _, name = path.rpartition(".")
    if not section:
        return {name: value}
    return {section: {**(REQUIRED if section == "storage" else {}), name: value}}


positive = st.integers(1, 1 << 50)
natural = st.integers(0, 1 << 50)
above_zero = st.floats(0, 1e12, exclude_min=True)
texts = st.text(min_size=1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
hosts = st.builds(
    HostPoolConfig,
    layout=st.sampled_from(HostLayout),
    ratio=above_zero,
    huge_pages=st.booleans(),
) | st.builds(HostPoolConfig, size_bytes=positive)
storages = st.builds(
    StorageConfig,
    backend=texts,
    extra_config=st.dictionaries(st.text(), plain, max_size=3),
    model_name=texts,
    weights_revision=texts,
    admission=st.sampled_from(StorageAdmission),
    tp_lcm_size=st.none() | positive,
    num_workers=st.integers(1, 32),
    batch_pages=st.none() | positive,
    call_timeout_seconds=above_zero,
    open_timeout_seconds=above_zero,
    refresh_seconds=above_zero,
    max_inflight_persist_operations=positive,
    retry_attempts=natural,
    breaker_failures=natural,
    breaker_cooldown_seconds=above_zero,
)
configs = st.builds(
    HiCacheConfig,
    page_size=positive,
    write_policy=st.sampled_from(WritePolicy),
    pinned_share=st.floats(0, 1),
    write_watermark=st.floats(0, 1),
    write_by_layer=st.booleans(),
    prefetch_policy=st.sampled_from(PrefetchPolicy),
    io_backend=st.sampled_from(IoBackend),
    load_back_threshold_tokens=natural,
    load_cost_estimate=st.booleans(),
    num_load_slots=positive,
    host=hosts,
    storage=st.none() | storages,
    prefetch=st.builds(
        PrefetchConfig, threshold_tokens=natural, max_inflight_pages=st.none() | positive
    ),
)


@given(configs)
@settings(max_examples=50)
def test_a_configuration_survives_its_mapping_json_and_pickle(config: HiCacheConfig) -> None:
    mapping = config.to_mapping()
    assert HiCacheConfig.from_mapping(mapping) == config
    assert HiCacheConfig.from_mapping(json.loads(json.dumps(mapping, allow_nan=False))) == config
    assert HiCacheConfig.from_mapping(mapping).to_mapping() == mapping
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert hash(HiCacheConfig.from_mapping(mapping)) == hash(config)


def test_there_is_a_bad_value_for_every_option() -> None:
    assert sorted(BAD_VALUES) == sorted(all_paths())


@pytest.mark.parametrize(
    ("path", "bad"), [(path, bad) for path, values in BAD_VALUES.items() for bad in values]
)
def test_a_bad_value_is_refused_with_the_name_of_its_option(path: str, bad: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        HiCacheConfig.from_mapping(mapping_with(path, bad))
    assert path in str(refused.value)

    section, _, name = path.rpartition(".")
    cls = SECTIONS.get(section, HiCacheConfig)
    with pytest.raises(ConfigError) as refused:
        cls(**{**(REQUIRED if cls is StorageConfig else {}), name: bad})
    assert path in str(refused.value)


def test_a_refusal_says_what_is_allowed() -> None:
    with pytest.raises(
        ConfigError, match=r"^page_size must be a whole number of tokens, at least 1"
    ):
        HiCacheConfig(page_size=0)
    with pytest.raises(ConfigError, match=r"one of write_through, .*adaptive; it is 'never'$"):
        HiCacheConfig.from_mapping({"write_policy": "never"})
    with pytest.raises(ConfigError, match=r"above 0, or none; it is -1$"):
        HostPoolConfig(ratio=-1)
    with pytest.raises(ConfigError, match=r"storage.extra_config.tls.ca\[0\] .* convert it"):
        StorageConfig(**REQUIRED, extra_config={"tls": {"ca": [sys]}})


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_an_unknown_key_is_refused_with_its_section_and_the_keys_like_it(section: str) -> None:
    known = [path.rpartition(".")[2] for path in all_paths() if path.rpartition(".")[0] == section]
    misspelt = known[-1] + "s"
    mapping = mapping_with(f"{section}.{misspelt}".lstrip("."), 1)
    with pytest.raises(ConfigError) as refused:
        HiCacheConfig.from_mapping(mapping)
    message = str(refused.value)
    assert repr(misspelt) in message
    assert section in message
    assert f"did you mean {known[-1]!r}" in message
    assert all(name in message for name in known)


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_required_key_that_is_missing_is_named(missing: str) -> None:
    given_keys = {key: value for key, value in REQUIRED.items() if key != missing}
    with pytest.raises(ConfigError, match=f"storage.{missing} is missing"):
        HiCacheConfig.from_mapping({"storage": given_keys})


@pytest.mark.parametrize("bad", [None, [], "host", 3, [("page_size", 3)]])
def test_a_section_must_be_a_mapping(bad: Any) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        HiCacheConfig.from_mapping(bad)
    with pytest.raises(ConfigError, match="host must be a mapping"):
        HiCacheConfig.from_mapping({"host": bad})


def test_plain_values_become_the_declared_types() -> None:
    config = HiCacheConfig.from_mapping(
        {"write_policy": "write_back", "host": {"ratio": 3, "layout": "layer_first"}}
    )
    assert config.write_policy is WritePolicy.WRITE_BACK
    assert config.host.layout is HostLayout.LAYER_FIRST
    assert type(config.host.ratio) is float
    assert config == HiCacheConfig(
        write_policy=WritePolicy.WRITE_BACK,
        host=HostPoolConfig(ratio=3.0, layout=HostLayout.LAYER_FIRST),
    )


def test_a_configuration_and_its_extra_options_cannot_be_changed() -> None:
    given_options: dict[str, Any] = {"path": "/data", "tls": {"ca": ["a"]}}
    storage: Any = StorageConfig(**REQUIRED, extra_config=given_options)
    given_options["path"] = "/elsewhere"
    given_options["tls"]["ca"].append("b")
    assert dict(storage.extra_config) == {"path": "/data", "tls": {"ca": ("a",)}}
    for mapping in (storage.extra_config, storage.extra_config["tls"]):
        with pytest.raises(TypeError):
            mapping["path"] = "/elsewhere"
    with pytest.raises(dataclasses.FrozenInstanceError):
        storage.backend = "memory"
    storage_mapping: Any = HiCacheConfig(storage=storage).to_mapping()["storage"]
    storage_mapping["extra_config"]["tls"]["ca"].append("c")
    assert storage.extra_config["tls"] == {"ca": ("a",)}


def test_tp_lcm_size_may_stand_in_extra_config_and_is_taken_out_of_it() -> None:
    """SGLang's users write it there, and no backend knows it."""
    written = StorageConfig(**REQUIRED, extra_config={"path": "/kv", "tp_lcm_size": 4})
    assert written == StorageConfig(**REQUIRED, extra_config={"path": "/kv"}, tp_lcm_size=4)
    assert (written.tp_lcm_size, dict(written.extra_config)) == (4, {"path": "/kv"})
    assert pickle.loads(pickle.dumps(written)) == written
    assert StorageConfig.from_mapping(written.to_mapping()) == written
    absent = StorageConfig(**REQUIRED, extra_config={"tp_lcm_size": None})
    assert absent == StorageConfig(**REQUIRED)
    twice = StorageConfig(**REQUIRED, extra_config={"tp_lcm_size": 4}, tp_lcm_size=4)
    assert twice.tp_lcm_size == 4


@pytest.mark.parametrize("value", [0, -1, 2.0, "4", True, [4]])
def test_a_tp_lcm_size_in_extra_config_that_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"extra_config.tp_lcm_size must be an int"):
        StorageConfig(**REQUIRED, extra_config={"tp_lcm_size": value})


def test_two_different_tp_lcm_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_lcm_size is 2 in storage and 4 in .*give it once"):
        StorageConfig(**REQUIRED, extra_config={"tp_lcm_size": 4}, tp_lcm_size=2)


def test_exactly_one_option_gives_the_size_of_the_host_pool() -> None:
    assert (HostPoolConfig().ratio, HostPoolConfig().size_bytes) == (2.0, None)
    assert HostPoolConfig(size_bytes=4096).ratio is None
    assert HostPoolConfig(ratio=0.5).size_bytes is None
    with pytest.raises(ConfigError, match=r"host.ratio .* host.size_bytes .* give one"):
        HostPoolConfig(ratio=2.0, size_bytes=4096)


def test_a_layout_that_the_io_backend_cannot_copy_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for io_backend, layout in itertools.product(IoBackend, HostLayout):
        HiCacheConfig(io_backend=io_backend, host=HostPoolConfig(layout=layout))
    monkeypatch.setattr(
        options, "_COPYABLE_LAYOUTS", {IoBackend.DIRECT: frozenset({HostLayout.LAYER_FIRST})}
    )
    with pytest.raises(
        ConfigError, match=r"direct cannot copy .* page_first_direct; it .* layer_first"
    ):
        HiCacheConfig()
