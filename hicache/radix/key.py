"""The key of a prefix: its tokens as bytes and the namespace they live in."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from hicache.errors import ConfigError
from hicache.hashing import TOKEN_BYTES, namespace_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["RadixKey"]


class RadixKey:
    """An immutable sequence of token ids with the names that its KV depends on.

    Built once per request and extended as tokens arrive: turning a list into bytes is the most
    expensive part of a look-up.

    Attributes:
        data: token ids as int32 in native (little endian) order.
        extra_key: what else the KV depends on (LoRA id, hash of an image), or None.
        cache_salt: the tenant, or None. Equal tokens under different names never meet.
        namespace: digest of both names, empty when there are none; seeds the page hashes.
    """

    __slots__ = ("cache_salt", "data", "extra_key", "namespace")

    def __init__(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Copy `tokens`; a token outside int32 is a `ConfigError`."""
        self.data = _token_bytes(tokens)
        self.extra_key = extra_key
        self.cache_salt = cache_salt
        self.namespace = namespace_seed(extra_key, cache_salt)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.data) // TOKEN_BYTES

    def __repr__(self) -> str:
        names = f", extra_key={self.extra_key!r}, cache_salt={self.cache_salt!r}"
        return f"RadixKey({len(self)} tokens{names if self.namespace else ''})"

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> RadixKey:
        """Return a key with `tokens` appended; this key stays as it is."""
        return self._with_data(self.data + _token_bytes(tokens))

    def prefix(self, num_tokens: int) -> RadixKey:
        """Return a key of the first `num_tokens` tokens (all of them if there are fewer)."""
        return self._with_data(self.data[: max(0, num_tokens) * TOKEN_BYTES])

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return the token ids as a read-only array over the key's bytes."""
        return np.frombuffer(self.data, dtype=np.int32)

    def _with_data(self, data: bytes) -> RadixKey:
        key = object.__new__(RadixKey)
        key.data = data
        key.extra_key = self.extra_key
        key.cache_salt = self.cache_salt
        key.namespace = self.namespace
        return key


def _token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    if isinstance(tokens, np.ndarray):
        narrow = tokens.astype(np.int32)
        if not np.array_equal(narrow, tokens):
            raise ConfigError("token ids must fit into int32; hash larger ids before use")
        return narrow.tobytes()
    try:
        # Unsigned takes half the time of signed, and ids are hardly ever negative.
        raw = array("I", tokens).tobytes()
        if not raw or np.frombuffer(raw, dtype=np.int32).min() >= 0:
            return raw
        raise ConfigError("token ids must fit into int32; hash larger ids before use")
    except (OverflowError, TypeError):
        pass
    try:
        return array("i", tokens).tobytes()
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers that fit into int32: {error}") from error
