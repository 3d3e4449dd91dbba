"""What a person asks for who pins a prefix."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from hicache.errors import ConfigError
from hicache.radix import RadixKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PinRequest"]

_FIELDS = ("input_ids", "text", "ttl_seconds", "extra_key", "cache_salt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PinRequest:
    """A prefix, and for how long it is pinned.

    Attributes:
        input_ids: its tokens; None when the text is given.
        text: its text; None when the tokens are given.
        ttl_seconds: for how long.
        extra_key, cache_salt: see `RadixKey`.
    """

    input_ids: Sequence[int] | None
    text: str | None
    ttl_seconds: float
    extra_key: str | None
    cache_salt: str | None

    @classmethod
    def from_json(cls, body: bytes) -> PinRequest:
        """Read a request.

        Raises:
            ConfigError: it is no JSON mapping, a field is unknown or missing, or has another type.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"the body is not JSON ({type(error).__name__}); send a mapping such as "
                '{"text": "You are", "ttl_seconds": 600}'
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(f"the body must be a JSON mapping of {', '.join(_FIELDS)}")
        unknown = sorted(fields.keys() - set(_FIELDS))
        if unknown:
            raise ConfigError(f"there is no field {unknown[0]!r}; known: {', '.join(_FIELDS)}")
        texts = {name: fields.get(name) for name in ("text", "extra_key", "cache_salt")}
        for name, value in texts.items():
            if not isinstance(value, str | None):
                raise ConfigError(f"{name} must be a text")
        tokens, seconds = fields.get("input_ids"), fields.get("ttl_seconds")
        if (tokens is None) == (texts["text"] is None):
            raise ConfigError("give the prefix once: either as input_ids or as text")
        if tokens is not None and not _is_token_list(tokens):
            raise ConfigError("input_ids must be a list of whole numbers")
        if not isinstance(seconds, int | float) or isinstance(seconds, bool):
            raise ConfigError("ttl_seconds must be a number of seconds")
        return cls(input_ids=tokens, ttl_seconds=seconds, **texts)

    def key(self, encode: Callable[[str], Sequence[int]] | None) -> RadixKey:
        """Return the key of the prefix.

        Args:
            encode: text to token ids; None where nobody can tell.

        Raises:
            ConfigError: a text was given, and there is no tokeniser; or a token does not fit.
        """
        tokens = self.input_ids
        if tokens is None:
            if encode is None:
                raise ConfigError("there is no tokeniser here; give the prefix as input_ids")
            tokens = encode(self.text or "")
        return RadixKey(tokens, extra_key=self.extra_key, cache_salt=self.cache_salt)


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)
