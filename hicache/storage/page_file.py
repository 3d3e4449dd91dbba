"""The format of a page file: one header block, then the page's bytes.

| offset | bytes | field |
|---|---|---|
| 0 | 8 | magic |
| 8 | 4 | format version |
| 12 | 4 | length of the parent key: 0 or 32 |
| 16 | 8 | length of the payload in bytes |
| 24 | 32 | namespace digest |
| 56 | 32 | page key |
| 88 | 32 | parent key, zeros if there is none |
| 120 | 16 | xxh3-128 of the payload |
| 136 | 3952 | zeros |
| 4088 | 8 | xxh3-64 of all bytes of the header before it |

Integers are little endian. The header has 4,096 bytes because that is the block size of common
file systems: payloads are multiples of it in practice, so a smaller header would cost a block as
well, and this way the payload begins on a block, as direct I/O and mappings need it.
"""

from __future__ import annotations

import dataclasses
import struct

import xxhash

from hicache.types import PageHash, PageOutcome

__all__ = ["FORMAT_VERSION", "HEADER_BYTES", "PageFormat"]

FORMAT_VERSION = 1
HEADER_BYTES = 4096

_MAGIC = b"HICACHE\x00"
_FIELDS = struct.Struct("<8sIIQ32s32s32s16s")
_SEAL = struct.Struct("<Q")
_SEAL_OFFSET = HEADER_BYTES - _SEAL.size


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """Headers of the page files of one namespace.

    Attributes:
        namespace_digest: 32 bytes that name the namespace.
        page_bytes: length of every payload.
    """

    namespace_digest: bytes
    page_bytes: int

    @property
    def file_bytes(self) -> int:
        """Length of every page file."""
        return HEADER_BYTES + self.page_bytes

    def encode(self, key: PageHash, parent_key: bytes, payload_checksum: bytes) -> bytes:
        """Return the header block of a page."""
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            len(parent_key),
            self.page_bytes,
            self.namespace_digest,
            key,
            parent_key,
            payload_checksum,
        )
        block = fields.ljust(_SEAL_OFFSET, b"\x00")
        return block + _SEAL.pack(xxhash.xxh3_64_intdigest(block))

    def check(self, block: bytes | bytearray, key: PageHash) -> PageOutcome:
        """Return what a header block says about the file it was read from.

        Returns:
            `OK`: the header of this very page. `CORRUPT`: the bytes of the header changed.
            `FOREIGN`: a sound header of something else, or no header of hicache at all.
        """
        magic, version, _, page_bytes, digest, stored_key, _, _ = _FIELDS.unpack_from(block)
        if magic != _MAGIC:
            return PageOutcome.FOREIGN
        (seal,) = _SEAL.unpack_from(block, _SEAL_OFFSET)
        if xxhash.xxh3_64_intdigest(memoryview(block)[:_SEAL_OFFSET]) != seal:
            return PageOutcome.CORRUPT
        found = (version, page_bytes, digest, stored_key)
        if found != (FORMAT_VERSION, self.page_bytes, self.namespace_digest, key):
            return PageOutcome.FOREIGN
        return PageOutcome.OK

    def payload_checksum(self, block: bytes | bytearray) -> bytes:
        """Return the payload's checksum from a header that `check` found `OK`."""
        checksum: bytes = _FIELDS.unpack_from(block)[-1]
        return checksum
