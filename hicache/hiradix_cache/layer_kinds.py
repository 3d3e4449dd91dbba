"""Which kinds of layers a cache can restore a prefix for."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LayerKind", "require_restorable"]


class LayerKind(str, Enum):
    """What a layer remembers of the tokens before, by the names that model configurations use.

    A prefix is a hit only where every layer can be restored. An unknown name is a `ConfigError`.
    """

    FULL_ATTENTION = "full_attention"
    SLIDING_ATTENTION = "sliding_attention"
    """Looks at a window. Its KV is kept for all tokens like that of any other layer, so that a
    prefix may end anywhere; an engine that frees what has left the window is not supported."""
    CHUNKED_ATTENTION = "chunked_attention"
    """Looks at the chunk that a token is in; else as `SLIDING_ATTENTION`."""
    LINEAR_ATTENTION = "linear_attention"
    """Keeps one state for a whole sequence, as the two below do. Pages of tokens cannot bring it
    back: not supported."""
    MAMBA = "mamba"
    RECURRENT = "recurrent"

    @classmethod
    def _missing_(cls, value: object) -> LayerKind:
        known = ", ".join(kind.value for kind in cls)
        raise ConfigError(f"unknown kind of layer {value!r}; known kinds: {known}")


_RESTORABLE = (
    LayerKind.FULL_ATTENTION,
    LayerKind.SLIDING_ATTENTION,
    LayerKind.CHUNKED_ATTENTION,
)


def require_restorable(kinds: Iterable[LayerKind | str]) -> None:
    """Refuse a model that has layers which no page of tokens can restore.

    Args:
        kinds: of the model's layers, in any order.

    Raises:
        ConfigError: a kind is unknown or not supported; the message names it.
    """
    refused = sorted(
        {LayerKind(kind).value for kind in kinds if LayerKind(kind) not in _RESTORABLE}
    )
    if refused:
        supported = ", ".join(kind.value for kind in _RESTORABLE)
        raise ConfigError(
            f"layers of kind {', '.join(refused)} keep one state for a whole sequence, which pages "
            f"of tokens cannot bring back; supported are {supported}. Serve this model without a "
            "cache of prefixes"
        )
