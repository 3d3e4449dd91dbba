"""Backends by name."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from hicache.errors import ConfigError
from hicache.hashing import StorageNamespace
from hicache.storage import HiCacheStorageConfig, StorageBackendFactory
from hicache.storage.memory import MemoryStorage
from hicache.storage.page_store import PageStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache.storage import Page
    from hicache.types import PageHash, PageOutcome

NAMESPACE = StorageNamespace(
    model="model",
    weights_revision="1",
    dtype="float16",
    layout="page_first",
    page_size=16,
    kv_shape="mha:layers=2,heads=2,head_dim=8",
)


def make_config(**extra_config: object) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(namespace=NAMESPACE, page_bytes=100, extra_config=extra_config)


class PluginStorage(MemoryStorage):
    """A backend of somebody else."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        self.config = config


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a module outside of hicache that has `PluginStorage`."""
    module = types.ModuleType("plugin_of_a_test")
    vars(module)["PluginStorage"] = PluginStorage
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def dynamic(module_path: str, class_name: str, **options: object) -> HiCacheStorageConfig:
    return make_config(
        backend_name="plugin", module_path=module_path, class_name=class_name, **options
    )


def test_hicaches_own_backends_are_known(tmp_path: Path) -> None:
    factory = StorageBackendFactory.default()
    assert factory.backend_names == ["dynamic", "file", "memory", "tiered"]
    assert isinstance(factory.create_backend("memory", make_config()), MemoryStorage)
    storage = factory.create_backend("file", make_config(path=str(tmp_path)))
    assert isinstance(storage, PageStore)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="no storage backend 'fiel'; known: dynamic, file, mem"):
        StorageBackendFactory.default().create_backend("fiel", make_config())


def test_a_registered_backend_is_built_with_the_config_as_it_is(plugin: str) -> None:
    factory = StorageBackendFactory()
    factory.register_backend("plugin", plugin, "PluginStorage")
    config = make_config(max_bytes=1000)
    storage = factory.create_backend("plugin", config)
    assert isinstance(storage, PluginStorage)
    assert storage.config == config


@pytest.mark.parametrize("name", ["memory", "dynamic", "tiered"])
def test_a_name_is_given_once(name: str, plugin: str) -> None:
    with pytest.raises(ConfigError, match="registered already"):
        StorageBackendFactory.default().register_backend(name, plugin, "PluginStorage")


def test_factories_know_nothing_of_each_other(plugin: str) -> None:
    StorageBackendFactory.default().register_backend("plugin", plugin, "PluginStorage")
    assert "plugin" not in StorageBackendFactory.default().backend_names


def test_a_dynamic_backend_gets_the_options_that_do_not_name_it(plugin: str) -> None:
    config = dynamic(plugin, "PluginStorage", max_bytes=1000)
    storage = StorageBackendFactory.default().create_backend("dynamic", config)
    assert isinstance(storage, PluginStorage)
    assert storage.config == dataclasses.replace(config, extra_config={"max_bytes": 1000})


def test_what_sglang_chooses_an_interface_with_is_not_an_option_of_the_backend(plugin: str) -> None:
    config = dynamic(plugin, "PluginStorage", max_bytes=1000, interface_v1=1)
    storage = StorageBackendFactory.default().create_backend("dynamic", config)
    assert isinstance(storage, PluginStorage)
    assert storage.config.extra_config == {"max_bytes": 1000}


@pytest.mark.parametrize("missing", ["backend_name", "module_path", "class_name"])
def test_a_dynamic_backend_must_be_named_completely(plugin: str, missing: str) -> None:
    options = dict(dynamic(plugin, "PluginStorage").extra_config)
    del options[missing]
    with pytest.raises(ConfigError, match=f"'{missing}' is missing"):
        StorageBackendFactory.default().create_backend("dynamic", make_config(**options))


@pytest.mark.parametrize(
    ("module_path", "class_name", "reason"),
    [
        ("os", "system", "must be a subclass of hicache.storage.HiCacheStorage"),
        ("collections", "OrderedDict", "must be a subclass"),
        ("os", "no_such_name", "must be a subclass"),
        ("hicache.storage.base", "HiCacheStorage", "does not implement .*batch_get"),
        ("no_such_module.at_all", "Storage", "cannot import 'no_such_module.at_all'.*install"),
        ("", "Storage", "not an absolute module path"),
        (".relative", "Storage", "not an absolute module path"),
        ("/tmp/file.py", "Storage", "not an absolute module path"),
    ],
)
def test_what_is_not_a_backend_is_refused(module_path: str, class_name: str, reason: str) -> None:
    """Cases C102 and C121."""
    with pytest.raises(ConfigError, match=reason):
        StorageBackendFactory.default().create_backend("dynamic", dynamic(module_path, class_name))


class StorageOfBefore(MemoryStorage):
    def batch_get(  # type: ignore[override]
        self, keys: Sequence[PageHash], pages: Sequence[Page], *, deadline: float
    ) -> list[PageOutcome]:
        raise AssertionError("was opened")


class BatchesOfBefore(MemoryStorage):
    def _read_pages(  # type: ignore[override]
        self, keys: Sequence[PageHash], pages: Sequence[Page], deadline: float
    ) -> list[PageOutcome]:
        raise AssertionError("was opened")


class AnyArguments(MemoryStorage):
    def batch_get(self, *args: Any, **kwargs: Any) -> list[PageOutcome]:
        return super().batch_get(*args, **kwargs)


@pytest.mark.parametrize(
    ("backend_class", "reason"),
    [
        (StorageOfBefore, r"batch_get take \(keys, parent_keys, pages, \*, deadline\)"),
        (BatchesOfBefore, r"_read_pages take \(keys, parent_keys, pages, deadline\)"),
    ],
)
def test_a_backend_that_was_written_for_another_contract_is_refused_with_what_to_change(
    plugin: str, backend_class: type, reason: str
) -> None:
    """When it is opened, instead of failing with every call."""
    vars(sys.modules[plugin])["Storage"] = backend_class
    with pytest.raises(ConfigError, match=f"is of another version of the contract; let {reason}"):
        StorageBackendFactory.default().create_backend("dynamic", dynamic(plugin, "Storage"))


def test_a_backend_may_take_more_than_it_is_given(plugin: str) -> None:
    vars(sys.modules[plugin])["Storage"] = AnyArguments
    storage = StorageBackendFactory.default().create_backend("dynamic", dynamic(plugin, "Storage"))
    assert storage.batch_get([], [], [], deadline=0.0) == []


def test_a_backend_without_its_client_library_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C102."""
    (tmp_path / "backend_with_a_client.py").write_text("import a_client_library_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    factory = StorageBackendFactory.default()
    factory.register_backend("remote", "backend_with_a_client", "RemoteStorage")
    with pytest.raises(ConfigError, match="'a_client_library_not_installed'"):
        factory.create_backend("remote", make_config())
    assert isinstance(factory.create_backend("memory", make_config()), MemoryStorage)


class UnreachableStorage(MemoryStorage):
    def __init__(self, config: HiCacheStorageConfig) -> None:
        raise ConnectionRefusedError("port 6379")


def test_a_backend_that_cannot_be_opened_is_refused_with_its_error(plugin: str) -> None:
    vars(sys.modules[plugin])["UnreachableStorage"] = UnreachableStorage
    with pytest.raises(
        ConfigError, match=r"'plugin' cannot be opened \(ConnectionRefusedError: po"
    ):
        StorageBackendFactory.default().create_backend(
            "dynamic", dynamic(plugin, "UnreachableStorage")
        )


@pytest.mark.parametrize("code", ["raise RuntimeError('no licence')", "1 / 0", "def"])
def test_a_module_that_cannot_be_imported_is_refused_whatever_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "module_that_raises.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot import 'module_that_raises' \(\w+Error: "):
        StorageBackendFactory.default().create_backend(
            "dynamic", dynamic("module_that_raises", "Storage")
        )
