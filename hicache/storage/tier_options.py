"""The backend `tiered`: tiers that are named in `extra_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hicache.errors import ConfigError
from hicache.storage.tiered import DEFAULT_MAX_FILL_PAGES, BackendTier, TieredStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.storage.base import HiCacheStorage, HiCacheStorageConfig

__all__ = ["open_tiers"]

_KNOWN = {"tiers": list, "write_to": int, "max_fill_pages": int}
_KNOWN_OF_TIER: Mapping[str, type] = {
    "backend": str,
    "extra_config": Mapping,
    "required": bool,
}


def open_tiers(
    config: HiCacheStorageConfig, create: Callable[[str, HiCacheStorageConfig], HiCacheStorage]
) -> TieredStorage:
    """Return a tiered storage with a backend for each tier.

    Options in `extra_config`:

    - `tiers` (list): fast ones first; each a mapping with `backend`, a name, `extra_config`, the
      options of that backend, and `required` (bool), whether a page counts as stored only when
      this tier has it. By default the last tier that is written to is required: the others
      are filled from it.
    - `write_to` (int): how many tiers, from the first on, are written to; all by default.
    - `max_fill_pages` (int): see `TieredStorage`.

    Args:
        config: for all tiers, but for `extra_config`.
        create: returns a backend for a name.

    Raises:
        ConfigError: an option is unknown or cannot work, or `create` raised it. No backend is left
            open.
    """
    options = _checked_options(config)
    tiers = [_checked_tier(tier) for tier in options.get("tiers", [])]
    num_written = options.get("write_to", len(tiers))
    if not 1 <= num_written <= len(tiers):
        raise ConfigError(
            f"storage backend 'tiered' has {len(tiers)} tiers and writes to {num_written}; name "
            "at least one in 'tiers', and 'write_to' of them are written to, by default all"
        )
    with ExitStack() as undo:
        opened: list[BackendTier] = []
        for index, tier in enumerate(tiers):
            tier_config = dataclasses.replace(config, extra_config=tier.get("extra_config", {}))
            storage = create(tier["backend"], tier_config)
            undo.callback(storage.close)
            opened.append(
                BackendTier(
                    name=f"{index} ({tier['backend']})",
                    storage=storage,
                    written=index < num_written,
                    required=tier.get("required", index == num_written - 1),
                )
            )
        tiered = TieredStorage(
            opened,
            config=config,
            max_fill_pages=options.get("max_fill_pages", DEFAULT_MAX_FILL_PAGES),
        )
        undo.pop_all()
    return tiered


def _checked_options(config: HiCacheStorageConfig) -> dict[str, Any]:
    tiers = config.extra_config.get("tiers")
    # A frozen configuration has tuples where its source had lists.
    listed = {"tiers": list(tiers)} if isinstance(tiers, tuple) else {}
    return dataclasses.replace(
        config, extra_config={**config.extra_config, **listed}
    ).checked_extra_config("tiered", _KNOWN)


def _checked_tier(tier: object) -> Mapping[str, Any]:
    """Return `tier` after refusing what no tier has; values are not named, they can be secrets."""
    if not isinstance(tier, Mapping) or not isinstance(tier.get("backend"), str):
        raise ConfigError(
            "each of the 'tiers' of storage backend 'tiered' must be a mapping with the name of a "
            "'backend'"
        )
    for option, value in tier.items():
        if not isinstance(value, _KNOWN_OF_TIER.get(option, ())):
            raise ConfigError(
                f"a tier of storage backend 'tiered' has {option!r} of type {type(value).__name__};"
                " it may have 'backend' (a text), 'extra_config' (a mapping) and 'required' (true "
                "or false)"
            )
    return tier
