"""What a person asks for who attaches a store, in the words of SGLang."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hicache.class_paths import is_class_path
from hicache.config import HiCacheConfig, load_mapping
from hicache.controller import StoragePolicies
from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache.config import StorageConfig

__all__ = ["AttachRequest"]

_BACKEND = "hicache_storage_backend"
_EXTRA_CONFIG = "hicache_storage_backend_extra_config_json"
_POLICIES = {
    "hicache_storage_prefetch_policy": "prefetch_policy",
    "hicache_write_policy": "write_policy",
}
_FIELDS = (_BACKEND, _EXTRA_CONFIG, *_POLICIES)

_PREFETCH_OPTIONS = {
    "prefetch_threshold": "threshold_tokens",
    "prefetch_timeout_base": "timeout_base_seconds",
    "prefetch_timeout_per_ki_token": "timeout_per_ki_token_seconds",
}
"""Options that SGLang's users write among those of the backend, and what they are called here."""

_WITHOUT_EFFECT = "hicache_storage_pass_prefix_keys"
"""A backend of hicache always gets the keys of parents."""

_RUNS_CODE = "dynamic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachRequest:
    """A store and the policies that come with it.

    Attributes:
        backend: its name.
        extra_config: its options; empty when none are given.
        policies: changes of `HiCacheConfig`.
        prefetch: changes of `PrefetchConfig`.
    """

    backend: str
    extra_config: Mapping[str, object]
    policies: Mapping[str, object]
    prefetch: Mapping[str, object]

    @classmethod
    def from_json(cls, body: bytes) -> AttachRequest:
        """Read a request.

        Raises:
            ConfigError: it is no JSON mapping, a field is unknown or missing, or has another type.
                The message repeats no value.
        """
        fields = _read_fields(body)
        unknown = sorted(fields.keys() - set(_FIELDS))
        if unknown:
            raise ConfigError(f"there is no field {unknown[0]!r}; known: {', '.join(_FIELDS)}")
        backend = fields.get(_BACKEND)
        if not isinstance(backend, str) or not backend:
            raise ConfigError(f"{_BACKEND} must be the name of a storage backend")
        extra_config = _read_extra_config(fields.get(_EXTRA_CONFIG))
        prefetch = {
            option: extra_config.pop(name)
            for name, option in _PREFETCH_OPTIONS.items()
            if name in extra_config
        }
        policies = {
            option: fields[name]
            for name, option in _POLICIES.items()
            if fields.get(name) is not None
        }
        return cls(backend=backend, extra_config=extra_config, policies=policies, prefetch=prefetch)

    @property
    def runs_code(self) -> bool:
        """Whether it names code to be run, which is: to be imported.

        Any text in it may, at any depth, whatever option it stands for: which options are class
        paths is for each backend to say, and this must hold for those that are yet to be written.
        """
        said = [self.backend, self.extra_config, self.policies, self.prefetch]
        return any(text == _RUNS_CODE or is_class_path(text) for text in _texts(said))

    def storage_config(
        self, attached: StorageConfig | None, started_with: StorageConfig
    ) -> StorageConfig:
        """Return the store that is meant.

        What a request does not say comes from the store of this name that is attached, or else
        from what the process was started with; options of another backend never do.
        """
        base = started_with
        if attached is not None and attached.backend == self.backend:
            base = attached
        extra_config = self.extra_config
        if not extra_config and base.backend == self.backend:
            extra_config = base.extra_config
        return dataclasses.replace(base, backend=self.backend, extra_config=extra_config)

    def policies_in(self, config: HiCacheConfig) -> StoragePolicies:
        """Return the policies of `config` after the changes; a `ConfigError` when one cannot be."""
        mapping = config.to_mapping()
        prefetch = {**config.prefetch.to_mapping(), **self.prefetch}
        changed = HiCacheConfig.from_mapping({**mapping, **self.policies, "prefetch": prefetch})
        return StoragePolicies.of(changed)


def _read_fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the body is not JSON ({type(error).__name__}); send a mapping such as "
            f'{{"{_BACKEND}": "file"}}'
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"the body must be a JSON mapping with {_BACKEND}")
    return fields


def _read_extra_config(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if isinstance(value, str) and not value.startswith("@"):
        try:
            value = load_mapping(value, name=_EXTRA_CONFIG)
        except RecursionError as error:
            raise ConfigError(f"{_EXTRA_CONFIG} is nested too deeply") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{_EXTRA_CONFIG} must be a mapping, or a text that holds one as JSON")
    return {name: inner for name, inner in value.items() if name != _WITHOUT_EFFECT}


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a nest of options, their names too."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
