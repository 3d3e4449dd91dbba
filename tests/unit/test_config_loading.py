"""Laws of loading a configuration: which sources there are, what they mean, and who wins."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from hicache.config import (
    HiCacheConfig,
    HostPoolConfig,
    PrefetchConfig,
    StorageConfig,
    describe_options,
    load_config,
    load_mapping,
)
from hicache.errors import ConfigError
from hicache.layout import HostLayout
from hicache.types import IoBackend, PrefetchPolicy, StorageAdmission, WritePolicy

if TYPE_CHECKING:
    from pathlib import Path

SECTIONS: dict[str, type[Any]] = {
    "host": HostPoolConfig,
    "storage": StorageConfig,
    "prefetch": PrefetchConfig,
}
REQUIRED: dict[str, Any] = {"backend": "file", "model_name": "smollm2", "weights_revision": "r1"}

BASE: dict[str, object] = {
    "page_size": 8,
    "write_policy": "write_through",
    "prefetch_policy": "best_effort",
    "eviction_policy": "lru",
    "io_backend": "direct",
    "load_back_threshold_tokens": 11,
    "load_cost_estimate": False,
    "pinned_share": 0.3,
    "write_watermark": 0.2,
    "write_by_layer": False,
    "num_load_slots": 2,
    "host.layout": "page_first",
    "host.ratio": 1.5,
    "host.size_bytes": None,
    "host.huge_pages": True,
    "storage.backend": "file",
    "storage.extra_config": {"path": "/old"},
    "storage.model_name": "old",
    "storage.weights_revision": "old",
    "storage.admission": "all",
    "storage.tp_lcm_size": 2,
    "storage.num_workers": 1,
    "storage.batch_pages": 1,
    "storage.call_timeout_seconds": 1.0,
    "storage.open_timeout_seconds": 200.0,
    "storage.refresh_seconds": 1.0,
    "storage.max_inflight_persist_operations": 1,
    "storage.retry_attempts": 1,
    "storage.breaker_failures": 1,
    "storage.breaker_cooldown_seconds": 1.0,
    "prefetch.threshold_tokens": 1,
    "prefetch.cost_estimate": False,
    "prefetch.timeout_base_seconds": 2.0,
    "prefetch.timeout_per_ki_token_seconds": 0.5,
    "prefetch.max_inflight_pages": 1,
}

# What a variable of the environment says, and what it means.
VARIABLES: dict[str, tuple[str, object]] = {
    "page_size": ("16", 16),
    "write_policy": ("write_back", WritePolicy.WRITE_BACK),
    "prefetch_policy": ("wait_complete", PrefetchPolicy.WAIT_COMPLETE),
    "eviction_policy": ("adaptive", "adaptive"),
    "io_backend": ("direct", IoBackend.DIRECT),
    "load_back_threshold_tokens": ("0", 0),
    "load_cost_estimate": ("true", True),
    "pinned_share": ("0.75", 0.75),
    "write_watermark": ("0.25", 0.25),
    "write_by_layer": ("false", False),
    "num_load_slots": ("3", 3),
    "host.layout": ("layer_first", HostLayout.LAYER_FIRST),
    "host.ratio": ("3", 3.0),
    "host.size_bytes": ("1073741824", 1 << 30),
    "host.huge_pages": ("false", False),
    "storage.backend": ("memory", "memory"),
    "storage.extra_config": ('{"path": "/new", "n": [1]}', {"path": "/new", "n": (1,)}),
    "storage.model_name": ("12", "12"),
    "storage.weights_revision": ("true", "true"),
    "storage.admission": ("adaptive", StorageAdmission.ADAPTIVE),
    "storage.tp_lcm_size": ("8", 8),
    "storage.num_workers": ("4", 4),
    "storage.batch_pages": ("32", 32),
    "storage.call_timeout_seconds": ("0.5", 0.5),
    "storage.open_timeout_seconds": ("7", 7.0),
    "storage.refresh_seconds": ("7", 7.0),
    "storage.max_inflight_persist_operations": ("7", 7),
    "storage.retry_attempts": ("0", 0),
    "storage.breaker_failures": ("0", 0),
    "storage.breaker_cooldown_seconds": ("0.5", 0.5),
    "prefetch.threshold_tokens": ("64", 64),
    "prefetch.cost_estimate": ("false", False),
    "prefetch.timeout_base_seconds": ("0.5", 0.5),
    "prefetch.timeout_per_ki_token_seconds": ("0", 0.0),
    "prefetch.max_inflight_pages": ("100", 100),
}  # fmt: skip


def all_paths() -> list[str]:
    nested = [f"{name}.{f.name}" for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)]
    own = [f.name for f in dataclasses.fields(HiCacheConfig) if f.name not in SECTIONS]
    return own + nested


def variable_of(path: str) -> str:
    return "HICACHE_" + path.replace(".", "_").upper()


def value_at(config: object, path: str) -> object:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def mapping_with(path: str, value: object) -> dict[str, object]:
    section, _, name = path.rpartition(".")
    if not section:
        return {name: value}
    return {section: {**(REQUIRED if section == "storage" else {}), name: value}}


TOML = """
page_size = 32
write_policy = "write_back"

[host]
ratio = 4
huge_pages = false

[storage]
backend = "file"
model_name = "smollm2"
weights_revision = "r1"
extra_config = { path = "/data", levels = [1, 2] }
"""
MAPPING: dict[str, object] = {
    "page_size": 32,
    "write_policy": "write_back",
    "host": {"ratio": 4, "huge_pages": False},
    "storage": {**REQUIRED, "extra_config": {"path": "/data", "levels": [1, 2]}},
}


def test_json_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    texts_by_name = {
        "a.json": json.dumps(MAPPING),
        "a.toml": TOML,
        "a.yaml": yaml.safe_dump(MAPPING),
        "a.YML": yaml.safe_dump(MAPPING),
    }
    for name, text in texts_by_name.items():
        (tmp_path / name).write_text(text)
    loaded = [load_config(f"@{tmp_path / name}") for name in texts_by_name]
    assert [*loaded, load_config(json.dumps(MAPPING))] == [HiCacheConfig.from_mapping(MAPPING)] * 5


def test_an_empty_source_gives_the_defaults(tmp_path: Path) -> None:
    for name in ("a.toml", "a.yaml"):
        (tmp_path / name).write_text("")
        assert load_config(f"@{tmp_path / name}") == HiCacheConfig()
    assert load_config() == load_config("{}") == HiCacheConfig()


def test_there_is_a_variable_for_every_option() -> None:
    assert sorted(VARIABLES) == sorted(BASE) == sorted(all_paths())


@pytest.mark.parametrize("path", VARIABLES)
def test_a_variable_goes_over_the_source_which_goes_over_the_default(path: str) -> None:
    text, meant = VARIABLES[path]
    source = json.dumps(mapping_with(path, BASE[path]))
    assert value_at(load_config(source), path) == BASE[path]
    overridden = load_config(source, environ={variable_of(path): text, "PATH": "/bin"})
    assert value_at(overridden, path) == meant
    assert overridden == HiCacheConfig.from_mapping(mapping_with(path, meant))


def test_variables_alone_can_make_a_section() -> None:
    environ = {variable_of(f"storage.{key}"): value for key, value in REQUIRED.items()}
    assert load_config(environ=environ).storage == StorageConfig(**REQUIRED)
    with pytest.raises(ConfigError, match=r"storage\.model_name is missing"):
        load_config(environ={"HICACHE_STORAGE_BACKEND": "file"})


def test_an_empty_variable_takes_an_option_back() -> None:
    source = '{"host": {"size_bytes": 4096}, "prefetch": {"max_inflight_pages": 5}}'
    environ = {
        "HICACHE_HOST_SIZE_BYTES": "",
        "HICACHE_HOST_RATIO": "3",
        "HICACHE_PREFETCH_MAX_INFLIGHT_PAGES": "",
    }
    config = load_config(source, environ=environ)
    assert config.host == HostPoolConfig(ratio=3.0)
    assert config.prefetch.max_inflight_pages is None


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HICACHE_PAGE_SIZE", "many"),
        ("HICACHE_PAGE_SIZE", ""),
        ("HICACHE_PAGE_SIZE", "64.0"),
        ("HICACHE_HOST_RATIO", "NaN"),
        ("HICACHE_HOST_HUGE_PAGES", "1"),
        ("HICACHE_STORAGE_EXTRA_CONFIG", "[1]"),
        ("HICACHE_STORAGE_BACKEND", ""),
        ("HICACHE_WRITE_POLICY", "never"),
    ],
)
def test_a_bad_variable_is_refused_with_its_own_name(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} must be"):
        load_config(environ={variable: text})


def test_a_misspelt_variable_is_refused_and_a_foreign_one_is_not() -> None:
    with pytest.raises(
        ConfigError, match=r"HICACHE_HOST_RATOI .* did you mean 'HICACHE_HOST_RATIO"
    ):
        load_config(environ={"HICACHE_HOST_RATOI": "3"})
    foreign = {"HICACHE_LOG": "debug", "HICACHE_MODELS": "/m", "HICACHE_STORAGE_URL": "x"}
    assert load_config(environ=foreign) == HiCacheConfig()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "cannot read"),
        ("a.toml", "page_size = ", "cannot read"),
        ("a.yaml", "a: [", "cannot read"),
        ("a.ini", "", ".json, .toml, .yaml, .yml"),
        ("a", "{}", ".json, .toml, .yaml, .yml"),
        ("a.json", "[1]", "mapping"),
        ("a.yaml", "only words", "mapping"),
        ("a.json", '{"page_size": 0}', "page_size"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(f"@{tmp_path / name}")
    assert str(tmp_path / name) in str(refused.value)
    assert words in str(refused.value)


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    for source in ("", "hicache.toml", "{", "[]", "null"):
        with pytest.raises(ConfigError, match="mapping"):
            load_config(source)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(f"@{tmp_path / 'absent.toml'}")
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(ConfigError, match=r"latin\.json"):
        load_config(f"@{tmp_path / 'latin.json'}")


EXTRA = {
    "a.json": '{"path": "/data", "tls": {"ca": ["a"]}}',
    "a.toml": 'path = "/data"\n[tls]\nca = ["a"]\n',
    "a.yaml": "path: /data\ntls:\n  ca: [a]\n",
}


def test_extra_config_can_be_a_text_or_a_file_of_its_own(tmp_path: Path) -> None:
    sources = [EXTRA["a.json"]]
    for name, text in EXTRA.items():
        (tmp_path / name).write_text(text)
        sources.append(f"@{tmp_path / name}")
    expected = StorageConfig(**REQUIRED, extra_config={"path": "/data", "tls": {"ca": ["a"]}})
    required = {variable_of(f"storage.{key}"): value for key, value in REQUIRED.items()}
    for source in sources:
        assert (
            load_mapping(source, name="extra config") == dict(expected.to_mapping())["extra_config"]
        )
        environ = {**required, "HICACHE_STORAGE_EXTRA_CONFIG": source}
        assert load_config(environ=environ).storage == expected
        config = json.dumps({"storage": {**REQUIRED, "extra_config": source}})
        assert load_config(config).storage == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("s3cr3t", "extra config is not inline JSON"),
        ('"s3cr3t"', "extra config must be a mapping"),
        ('["s3cr3t"]', "extra config must be a mapping"),
        ("@{path}/none.json", "cannot read .*none.json"),
        ("@{path}/list.json", "extra config in .*list.json must be a mapping .* not a list"),
        ("@{path}/broken.yaml", "no YAML in line 2"),
        ("@{path}/broken.toml", "line 1"),
        ("@{path}/list.ini", "no known kind"),
    ],
)
def test_free_options_that_cannot_be_read_are_refused_without_repeating_them(
    tmp_path: Path, source: str, words: str
) -> None:
    (tmp_path / "list.json").write_text('["s3cr3t"]')
    (tmp_path / "broken.yaml").write_text("key: s3cr3t\ns3cr3t: [")
    (tmp_path / "broken.toml").write_text("key = s3cr3t")
    with pytest.raises(ConfigError, match=words) as refused:
        load_mapping(source.format(path=tmp_path), name="extra config")
    assert "s3cr3t" not in str(refused.value)


def test_yaml_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.yaml").write_text("page_size: 32")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"pip install 'hicache\[yaml\]'"):
        load_config(f"@{tmp_path / 'a.yaml'}")


def test_the_description_names_every_option_with_its_variable_default_and_values() -> None:
    lines = describe_options().splitlines()
    heads, meanings = lines[::2], lines[1::2]
    assert [head.split()[0] for head in heads] == all_paths()
    for path, head, meaning in zip(all_paths(), heads, meanings, strict=True):
        assert variable_of(path) in head
        assert "default" in head or "required" in head
        assert meaning.startswith("    ")
        assert meaning.endswith("]")
