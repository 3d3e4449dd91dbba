"""From the name of a backend to the backend."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import ConfigError
from hicache.storage.base import HiCacheStorage

if TYPE_CHECKING:
    from hicache.storage.base import HiCacheStorageConfig

__all__ = ["StorageBackendFactory"]

_DYNAMIC = "dynamic"
_DYNAMIC_OPTIONS = ("backend_name", "module_path", "class_name")


class _ClassPath(NamedTuple):
    module_path: str
    class_name: str


class StorageBackendFactory:
    """Builds storage backends by name; a module is imported when its backend is first asked for.

    The name `dynamic` stands for a class that is named in `extra_config` by `backend_name`,
    `module_path` and `class_name`; the backend gets the other options. To import a module is to
    run it, so this `extra_config` must come from whoever may run code in this process.
    """

    def __init__(self) -> None:
        self._class_paths: dict[str, _ClassPath] = {}

    @classmethod
    def default(cls) -> StorageBackendFactory:
        """Return a new factory that knows the backends of hicache."""
        factory = cls()
        factory.register_backend("file", "hicache.storage.file", "FileStorage")
        factory.register_backend("memory", "hicache.storage.memory", "MemoryStorage")
        return factory

    @property
    def backend_names(self) -> list[str]:
        """Every name that `create_backend` takes, sorted."""
        return sorted([*self._class_paths, _DYNAMIC])

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
            ConfigError: the name is unknown, its module cannot be imported, the class is not a
                complete `HiCacheStorage`, or the backend refuses the config.
        """
        if name == _DYNAMIC:
            name, class_path, config = _split_dynamic(config)
        elif name in self._class_paths:
            class_path = self._class_paths[name]
        else:
            raise ConfigError(
                f"no storage backend {name!r}; known: {', '.join(self.backend_names)}"
            )
        return _load_class(name, class_path)(config)


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
    name, module_path, class_name = values
    return (
        name,
        _ClassPath(module_path, class_name),
        dataclasses.replace(config, extra_config=options),
    )


def _load_class(name: str, class_path: _ClassPath) -> type[HiCacheStorage]:
    module_path, class_name = class_path
    if not all(part.isidentifier() for part in module_path.split(".")):
        raise ConfigError(
            f"storage backend {name!r}: {module_path!r} is not an absolute module path like 'a.b'"
        )
    try:
        module = importlib.import_module(module_path)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load.
        raise ConfigError(
            f"storage backend {name!r}: cannot import {module_path!r} ({error}); install what is "
            "missing or choose another backend"
        ) from error
    backend_class = getattr(module, class_name, None)
    if not (isinstance(backend_class, type) and issubclass(backend_class, HiCacheStorage)):
        raise ConfigError(
            f"storage backend {name!r}: {module_path}.{class_name} must be a subclass of "
            "hicache.storage.HiCacheStorage"
        )
    if inspect.isabstract(backend_class):
        missing = ", ".join(sorted(backend_class.__abstractmethods__))
        raise ConfigError(
            f"storage backend {name!r}: {module_path}.{class_name} does not implement {missing}"
        )
    return backend_class
