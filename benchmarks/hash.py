"""Page hashes: a whole prompt at once, and only the new pages when a cached prefix grows.

Checked against hashes made here from the token list, and by a prefix whose stored hash is replaced:
what is computed from the replacement has not looked at the prefix again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness import Bar, Result, Step, alternate, check, summarise, time_calls
from benchmarks.peers.sglang_process import pack
from benchmarks.peers.sglang_rows import steps_beside
from hicache.hashing import hash_pages
from hicache.radix import RadixKey, RadixTree
from hicache.types import PageHash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.peers.sglang_process import SglangProcess

    Hasher = Callable[[bytes, int, bytes], list[PageHash]]

__all__ = ["Sizes", "steps"]

_VOCABULARY = 128_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        tokens: length of the prompt; whole pages.
        page_size: tokens in a page.
        samples: timed calls.
    """

    tokens: int = 32_768
    page_size: int = 64
    samples: int = 2_000


def steps(
    *,
    quick: bool,
    peers: frozenset[str] = frozenset(),
    sizes: Sizes | None = None,
    hasher: Hasher = hash_pages,
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: fewer samples.
        peers: systems to run beside.
        sizes: instead of those that `quick` means.
        hasher: what is measured by the first part.
    """
    sizes = sizes or Sizes(samples=500 if quick else 2_000)
    parts = [
        Step("hash_pages", partial(_whole_prompt, sizes, hasher)),
        Step("page_hashes of an extension", partial(_extension, sizes)),
    ]
    if "sglang" in peers:
        parts += steps_beside(("hash",), partial(_beside_sglang, sizes, hasher))
    return parts


def _whole_prompt(sizes: Sizes, hasher: Hasher) -> list[Result]:
    tokens = _tokens(sizes.tokens)
    data = RadixKey(tokens).data
    for prior in (b"", bytes(range(32))):
        expected = _chain(tokens, sizes.page_size, prior)
        check(hasher(data, sizes.page_size, prior) == expected, "hash_pages gives other hashes")
    times = time_calls(lambda: hasher(data, sizes.page_size, b""), samples=sizes.samples)
    params = {"tokens": sizes.tokens, "page_size": sizes.page_size}
    return [summarise("hash_pages", times, params=params, bars=(Bar(320),))]


def _beside_sglang(sizes: Sizes, hasher: Hasher, peer: SglangProcess) -> list[Result]:
    """Time the whole prompt beside SGLang's extension in C++."""
    tokens, page_size = _tokens(sizes.tokens), sizes.page_size
    data = RadixKey(tokens).data
    expected = [one.hex() for one in _chain(tokens, page_size, b"")]
    hashes = [one.hex() for one in hasher(data, page_size, b"")]
    check(hashes == expected, "hash_pages gives other hashes")

    def theirs(samples: int) -> list[float]:
        answer = peer.call("hash", tokens=pack(tokens), page_size=page_size, samples=samples)
        check(answer["hashes"] == expected, f"{peer.name} gives other hashes")
        return list(answer["times"])

    mine, others = alternate(
        lambda samples: time_calls(lambda: hasher(data, page_size, b""), samples=samples),
        theirs,
        samples=sizes.samples,
    )
    params = {"tokens": sizes.tokens, "page_size": page_size}
    return [summarise("hash_pages", mine, params=params).beside(peer.name, others)]


def _extension(sizes: Sizes) -> list[Result]:
    """Time the hash of one page below a cached prompt whose own hashes are known."""
    page_size, num_pages = sizes.page_size, sizes.tokens // sizes.page_size
    tokens = _tokens(sizes.tokens)
    prompt = RadixKey(tokens)
    tree = RadixTree(page_size)
    pages = np.arange(num_pages + sizes.samples, dtype=np.int64)
    prefix = tree.insert(prompt, pages[:num_pages]).node
    check(
        tree.page_hashes(prefix) == _chain(tokens, page_size, b""), "page_hashes gives other hashes"
    )
    # A hash that no tokens have: only one who does not compute it again can chain from it.
    marker = PageHash(b"\xff" * 32)
    assert prefix.page_hashes is not None
    prefix.page_hashes[-1] = marker
    times = []
    for index in range(sizes.samples):
        tail = [_VOCABULARY + index] * page_size
        new_pages = np.append(pages[:num_pages], pages[num_pages + index])
        node = tree.insert(prompt.extend(tail), new_pages).node
        begin = time.perf_counter_ns()
        hashes = tree.page_hashes(node)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        expected = _chain(tail, page_size, marker)
        check(hashes == expected, "extending a cached prefix hashed more than the new page")
    params = {"tokens": page_size, "cached_tokens": sizes.tokens, "page_size": page_size}
    return [summarise("page_hashes", times, params=params)]


def _chain(tokens: Sequence[int], page_size: int, prior: bytes) -> list[bytes]:
    """Return the chained page hashes by their definition, from the numbers instead of a key."""
    hashes = []
    for start in range(0, len(tokens), page_size):
        words = struct.pack(f"<{page_size}I", *tokens[start : start + page_size])
        prior = hashlib.sha256(prior + words).digest()
        hashes.append(prior)
    return hashes


def _tokens(count: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
