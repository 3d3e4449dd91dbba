"""Backends of installed distributions are found by name, and keep the storage contract."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hicache.clock import ManualClock
from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace
from hicache.storage import HiCacheStorage, HiCacheStorageConfig, StorageBackendFactory
from hicache.storage.memory import MemoryStorage
from hicache.testing.storage_contract import StorageContract

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

DISTRIBUTION = Path(__file__).parent.parent / "plugin_distribution"


def install(
    site: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]]
) -> None:
    """Leave in `site` what an installer leaves there of a distribution, but for its modules."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed distributions; modules can be written there as well."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def dict_plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution beside this directory, installed."""
    project: Any = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["version"], project["entry-points"])
    monkeypatch.syspath_prepend(DISTRIBUTION)


@pytest.fixture
def config() -> HiCacheStorageConfig:
    namespace = StorageNamespace(
        model="model",
        weights_revision="1",
        dtype="float16",
        layout="page_first",
        page_size=16,
        kv_shape="mha:layers=2,heads=2,head_dim=8",
    )
    return HiCacheStorageConfig(namespace=namespace, page_bytes=100, clock=ManualClock())


def create(name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
    return StorageBackendFactory.default().create_backend(name, config)


class TestPluginOfADistribution(StorageContract):
    @pytest.fixture(autouse=True)
    def _start_empty(self, dict_plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hicache_dict.SERVER", {})

    def make_backend(self, config: HiCacheStorageConfig) -> HiCacheStorage:
        return create("dict", config)


def test_a_plugin_is_imported_when_its_backend_is_first_asked_for(
    site: Path, config: HiCacheStorageConfig
) -> None:
    (site / "lazy_plugin.py").write_text("from hicache.storage.memory import MemoryStorage as M\n")
    install(site, "lazy", "1", {"hicache.storage": {"lazy": "lazy_plugin:M", "more": "none:M"}})
    create("memory", config)
    assert "lazy_plugin" not in sys.modules
    assert isinstance(create("lazy", config), MemoryStorage)
    del sys.modules["lazy_plugin"]


@pytest.mark.parametrize("name", StorageBackendFactory.default().backend_names)
def test_plugins_are_not_looked_for_when_a_backend_has_the_name(
    monkeypatch: pytest.MonkeyPatch, config: HiCacheStorageConfig, name: str
) -> None:
    def find_plugin(_name: str) -> None:
        raise AssertionError("the installed distributions were read")

    monkeypatch.setattr("hicache.storage.factory.find_plugin", find_plugin)
    # Some need options, and say so.
    with contextlib.suppress(ConfigError):
        create(name, config).close()


def test_a_plugin_does_not_replace_a_backend_that_has_the_name(
    site: Path, config: HiCacheStorageConfig
) -> None:
    install(site, "impostor", "1", {"hicache.storage": {"memory": "no_such_module:Impostor"}})
    assert isinstance(create("memory", config), MemoryStorage)


def test_a_name_that_two_distributions_offer_is_refused_with_both(
    site: Path, config: HiCacheStorageConfig
) -> None:
    for name in ("first", "second"):
        install(site, name, "2.1", {"hicache.storage": {"both": f"{name}:Storage"}})
    with pytest.raises(ConfigError, match=r"several distributions: first 2\.1, second 2\.1"):
        create("both", config)


@pytest.mark.parametrize(
    ("value", "code", "reason"),
    [
        ("broken_plugin:Storage", "import no_such_client", "ModuleNotFoundError.*no_such_client"),
        ("broken_plugin:Storage", "1 / 0", "ZeroDivisionError"),
        ("broken_plugin:Storage [extra]", "", "broken_plugin.Storage must be a subclass"),
        ("broken_plugin:Storage", "Storage = int", "must be a subclass"),
        ("broken_plugin", "", "must be a subclass"),
        ("broken plugin:Storage", "", "not an absolute module path"),
        (
            "broken_plugin:Storage",
            "from hicache.storage import HiCacheStorage\n"
            "class Storage(HiCacheStorage):\n"
            "    def clear(self): return 0\n",
            "does not implement .*batch_get",
        ),
        (
            "broken_plugin:Storage",
            "from hicache.storage.memory import MemoryStorage\n"
            "class Storage(MemoryStorage):\n"
            "    def __init__(self, config): raise TimeoutError('no answer')\n",
            r"cannot be opened \(TimeoutError: no answer\)",
        ),
    ],
)
def test_a_broken_plugin_is_refused_with_its_distribution_and_its_error(
    site: Path,
    config: HiCacheStorageConfig,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    code: str,
    reason: str,
) -> None:
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    (site / "broken_plugin.py").write_text(code)
    install(site, "acme-storage", "0.3", {"hicache.storage": {"acme": value}})
    with pytest.raises(ConfigError, match=rf"'acme' of the plugin acme-storage 0\.3.*{reason}"):
        create("acme", config)


def test_an_unknown_name_is_refused_with_the_plugins_that_there_are(
    dict_plugin: None, config: HiCacheStorageConfig
) -> None:
    with pytest.raises(ConfigError, match=r"no storage backend 'dikt'; known: .*; plugins: dict"):
        create("dikt", config)


def test_a_tier_can_be_a_plugin(dict_plugin: None, config: HiCacheStorageConfig) -> None:
    tiers = {"tiers": [{"backend": "memory"}, {"backend": "dict"}]}
    storage = create("tiered", dataclasses.replace(config, extra_config=tiers))
    assert storage.batch_exists([]) == 0
