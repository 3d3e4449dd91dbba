"""Under what a page is stored: the digest of its namespace and the hash of its tokens and names."""

from __future__ import annotations

import dataclasses

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache.hashing import StorageNamespace, hash_pages, namespace_seed

NAMESPACE = StorageNamespace(
    model="org/model",
    weights_revision="1",
    dtype="float16",
    layout="page_first",
    page_size=16,
    kv_shape="mha:layers=2,heads=2,head_dim=8",
)
TOKENS = bytes(4)


def named(model: str, shard: str = "tp0of1") -> StorageNamespace:
    return dataclasses.replace(NAMESPACE, model=model, shard=shard)


namespaces = st.builds(
    StorageNamespace,
    model=st.text(min_size=1, max_size=300),
    weights_revision=st.text(max_size=8),
    dtype=st.sampled_from(["float16", "bfloat16", "fp8_e4m3"]),
    layout=st.sampled_from(["page_first", "layer_first"]),
    page_size=st.sampled_from([1, 16, 64]),
    kv_shape=st.text(min_size=1, max_size=8),
    shard=st.text(min_size=1, max_size=8),
    format_version=st.integers(1, 3),
)
names = st.none() | st.text(max_size=8)
requests = st.tuples(names, names)
Request = tuple[str | None, str | None]


def page_name(namespace: StorageNamespace, request: Request) -> tuple[bytes, bytes]:
    extra_key, cache_salt = request
    (page_hash,) = hash_pages(TOKENS, page_size=1, prior=namespace_seed(extra_key, cache_salt))
    return namespace.digest, page_hash


@settings(deadline=None)
@given(first=namespaces, second=namespaces, adapter=requests, other=requests)
@example(named("org/a-SEP-b"), named("org/a/b"), ("l", "s"), ("l", "s"))
@example(named("a_1", "tp0of2"), named("a", "1_tp0of2"), ("l", "s"), ("l", "s"))
@example(named("m_0"), named("m", "0"), (None, None), (None, None))
@example(named("model_"), named("model"), ("a_", "b"), ("a", "_b"))
@example(named("Model"), named("model"), ("A", None), ("a", None))
@example(named("\u00e9"), named("e\u0301"), ("\u00e9", None), ("e\u0301", None))
@example(named("m"), named("m"), (None, "a"), ("a", None))
@example(named("m"), named("m"), (None, ""), (None, None))
def test_different_names_of_model_rank_adapter_or_tenant_never_meet(
    first: StorageNamespace, second: StorageNamespace, adapter: Request, other: Request
) -> None:
    """C040."""
    stored = {page_name(first, adapter), page_name(second, other)}
    assert len(stored) == len({(first, adapter), (second, other)})
