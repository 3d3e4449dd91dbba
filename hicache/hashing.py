"""What a page is called: the chained page hash and the namespace of stored bytes.

A page's hash depends on its tokens and on every token before it, so equal hashes mean equal
prefixes. The bytes hashed are those of SGLang's HiCache (`sha256(prior digest || tokens as uint32
little endian)`, the first page of a named request seeded), so that page keys agree with its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, cast

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache.types import PageHash

__all__ = ["TOKEN_BYTES", "StorageNamespace", "hash_pages", "namespace_seed"]

TOKEN_BYTES = 4
"""Size of one token id in a key: int32, little endian."""

_SEED_TAG = b"sglang-cache-namespace-v1"


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return the digest that seeds a named request's hash chain, or `b""` when nothing is named.

    Injective: each part is framed by a presence byte and its length, so no choice of one part can
    imitate another.

    Args:
        extra_key: what else the KV depends on, such as a LoRA id or the hash of an image.
        cache_salt: the tenant.
    """
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(_SEED_TAG)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            raw = part.encode()
            digest.update(b"\x01" + len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def hash_pages(tokens: bytes, page_size: int, prior: bytes = b"") -> list[PageHash]:
    """Return the chained hash of each full page of `tokens`; a tail below a page is ignored.

    Prefix-stable: the hashes of a prefix are a prefix of the hashes.

    Args:
        tokens: token ids as int32, little endian.
        page_size: tokens in a page.
        prior: hash of the page before the first one, or the request's `namespace_seed`.
    """
    step = page_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - step + 1, step):
        prior = sha256(prior + tokens[start : start + step]).digest()
        hashes.append(prior)
    # One cast for all: naming each hash costs a tenth of the whole.
    return cast("list[PageHash]", hashes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageNamespace:
    """Everything besides the tokens that stored bytes depend on: a matter of engine and rank.

    Two engines share pages in storage exactly when their namespaces are equal. What depends on the
    request (tenant, LoRA) is part of the page hash instead.

    Attributes:
        model: name of the model.
        weights_revision: which weights of that model; any string that changes when they do.
        dtype: element type of the KV, such as `float32`.
        layout: order of the bytes inside a page.
        page_size: tokens in a page.
        kv_shape: what the bytes of one page are, such as `mha:layers=30,heads=3,head_dim=64`.
        shard: which part of the model this rank holds, such as `tp0of2`, or `replicated`.
        format_version: version of the page's own format.
    """

    model: str
    weights_revision: str
    dtype: str
    layout: str
    page_size: int
    kv_shape: str
    shard: str = "tp0of1"
    format_version: int = 1

    def __post_init__(self) -> None:
        for field in ("model", "dtype", "layout", "kv_shape", "shard"):
            if not getattr(self, field):
                raise ConfigError(f"StorageNamespace.{field} must not be empty")

    def describe(self) -> Mapping[str, str | int]:
        """Return the fields by name, for people and for `digest`."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> bytes:
        """32 bytes that differ for different namespaces."""
        canonical = json.dumps(self.describe(), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(canonical.encode()).digest()
