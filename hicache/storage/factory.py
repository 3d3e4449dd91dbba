"""From the name of a backend to the backend."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import ConfigError, HiCacheError
from hicache.storage.answers import error_text
from hicache.storage.base import HiCacheStorage
from hicache.storage.checked import CheckedStorage
from hicache.storage.pagewise import PagewiseStorage
from hicache.storage.plugins import find_plugin, plugin_names
from hicache.storage.tier_options import open_tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache.storage.base import HiCacheStorageConfig

__all__ = ["StorageBackendFactory"]

_TIERED = "tiered"
_DYNAMIC = "dynamic"
_DYNAMIC_OPTIONS = ("backend_name", "module_path", "class_name")
_OPTION_OF_SGLANG = "interface_v1"
"""Chooses there between two generations of an interface of which there is one here."""

_BASES = (HiCacheStorage, CheckedStorage, PagewiseStorage)
"""What a backend of somebody else may build on, each with methods that are left to it."""


class _ClassPath(NamedTuple):
    module_path: str
    class_name: str


class StorageBackendFactory:
    """Builds storage backends by name; a module is imported when its backend is first asked for.

    A name is looked for among those that are registered, and only then among the entry points of
    installed distributions (group `hicache.storage`): a plugin never takes the place of a backend
    that has the name already. Two names stand for something else:

    - `tiered` for several backends as one; see `hicache.storage.tier_options.open_tiers`;
    - `dynamic` for a class that is named in `extra_config` by `backend_name`, `module_path` and
      `class_name`; the backend gets the other options, but for SGLang's `interface_v1`.

    To import a module is to run it, so plugins must be installed, and the `extra_config` of
    `dynamic` must come, from whoever may run code in this process.
    """

    def __init__(self) -> None:
        self._class_paths: dict[str, _ClassPath] = {}

    @classmethod
    def default(cls) -> StorageBackendFactory:
        """Return a new factory that knows the backends of hicache."""
        factory = cls()
        factory.register_backend("file", "hicache.storage.page_store", "PageStore")
        factory.register_backend("memory", "hicache.storage.memory", "MemoryStorage")
        return factory

    @property
    def backend_names(self) -> list[str]:
        """Every name that `create_backend` takes without a plugin, sorted."""
        return sorted([*self._class_paths, _DYNAMIC, _TIERED])

    def register_backend(self, name: str, module_path: str, class_name: str) -> None:
        """Make `name` stand for a class, which is not imported yet.

        Raises:
            ConfigError: the name is taken.
        """
        if name in self.backend_names:
            raise ConfigError(f"storage backend {name!r} is registered already; use another name")
        self._class_paths[name] = _ClassPath(module_path, class_name)

    def create_backend(self, name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
        """Return a new backend.

        Raises:
            ConfigError: the name is unknown or several plugins offer it, its module cannot be
                imported, the class is not a complete `HiCacheStorage` or was written for another
                version of it, or the backend refuses the config or cannot be opened.
        """
        if name == _TIERED:
            return open_tiers(config, self.create_backend)
        if name == _DYNAMIC:
            name, class_path, config = _split_dynamic(config)
            return _open(repr(name), class_path, config)
        if name in self._class_paths:
            return _open(repr(name), self._class_paths[name], config)
        plugin = find_plugin(name)
        if plugin is not None:
            class_path = _ClassPath(plugin.module_path, plugin.class_name)
            return _open(f"{name!r} of the plugin {plugin.distribution}", class_path, config)
        raise ConfigError(
            f"no storage backend {name!r}; known: {', '.join(self.backend_names)}; plugins: "
            f"{', '.join(plugin_names()) or 'none'}"
        )


def _split_dynamic(
    config: HiCacheStorageConfig,
) -> tuple[str, _ClassPath, HiCacheStorageConfig]:
    """Return the name, the class and the config without the options that name them."""
    options = dict(config.extra_config)
    values: list[str] = []
    for option in _DYNAMIC_OPTIONS:
        value = options.pop(option, None)
        if not isinstance(value, str):
            raise ConfigError(
                f"storage backend {_DYNAMIC!r} needs the strings {', '.join(_DYNAMIC_OPTIONS)} in "
                f"its extra_config; {option!r} is missing or not a string"
            )
        values.append(value)
    options.pop(_OPTION_OF_SGLANG, None)
    name, module_path, class_name = values
    return (
        name,
        _ClassPath(module_path, class_name),
        dataclasses.replace(config, extra_config=options),
    )


def _open(name: str, class_path: _ClassPath, config: HiCacheStorageConfig) -> HiCacheStorage:
    backend_class = _load_class(name, class_path)
    try:
        return backend_class(config)
    except HiCacheError:
        raise
    except Exception as error:
        raise ConfigError(
            f"storage backend {name} cannot be opened ({error_text(error)})"
        ) from error


def _load_class(name: str, class_path: _ClassPath) -> type[HiCacheStorage]:
    module_path, class_name = class_path
    if not all(part.isidentifier() for part in module_path.split(".")):
        raise ConfigError(
            f"storage backend {name}: {module_path!r} is not an absolute module path like 'a.b'"
        )
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # To import is to run, so anything can go wrong.
        raise ConfigError(
            f"storage backend {name}: cannot import {module_path!r} ({error_text(error)}); install "
            "what is missing or choose another backend"
        ) from error
    backend_class = getattr(module, class_name, None)
    if not (isinstance(backend_class, type) and issubclass(backend_class, HiCacheStorage)):
        raise ConfigError(
            f"storage backend {name}: {module_path}.{class_name} must be a subclass of "
            "hicache.storage.HiCacheStorage"
        )
    if inspect.isabstract(backend_class):
        missing = ", ".join(sorted(backend_class.__abstractmethods__))
        raise ConfigError(
            f"storage backend {name}: {module_path}.{class_name} does not implement {missing}"
        )
    misfits = "; ".join(_misfits(backend_class))
    if misfits:
        raise ConfigError(
            f"storage backend {name}: {module_path}.{class_name} is of another version of the "
            f"contract; let {misfits}"
        )
    return backend_class


def _misfits(backend_class: type[HiCacheStorage]) -> Iterator[str]:
    """Yield each method that cannot be called as hicache calls it, and how that is."""
    for base in _BASES:
        if base not in backend_class.__mro__:
            continue
        for name in sorted(base.__abstractmethods__ & vars(base).keys()):
            declared = vars(base)[name]
            if inspect.isfunction(declared) and not _takes(getattr(backend_class, name), declared):
                _, *parameters = inspect.signature(declared).parameters.values()
                bare = [one.replace(annotation=one.empty) for one in parameters]
                yield f"{name} take {inspect.Signature(bare)}"


def _takes(method: Callable[..., object], declared: Callable[..., object]) -> bool:
    """Return whether a method can be called with arguments for all parameters of another."""
    parameters = inspect.signature(declared).parameters.values()
    by_name = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    by_place = [None] * (len(parameters) - len(by_name))
    try:
        signature = inspect.signature(method)
    except ValueError:  # It is compiled, and does not say.
        return True
    try:
        signature.bind(*by_place, **by_name)
    except TypeError:
        return False
    return True
