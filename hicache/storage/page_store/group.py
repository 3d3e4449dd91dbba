"""A group: the pages that one write put down together, and the header that describes them.

A group holds pages of one prefix, each chained from the one before, so that one header names them
all and one look-up finds them all. Its pages lie one after the other over its extents, each on a
block boundary.

| offset | bytes | field |
|---|---|---|
| 0 | 8 | magic |
| 8 | 2 | format version |
| 10 | 2 | serialisation of the payloads: 0, the bytes as they are |
| 12 | 4 | length of the header |
| 16 | 8 | group id |
| 24 | 8 | segment and block that the header itself is written to |
| 32 | 8 | payload bytes of each page |
| 40 | 2 | number of pages |
| 42 | 2 | length of the parent key: 0 or 32 |
| 44 | 4 | number of extents |
| 48 | 32 | namespace digest |
| 80 | 32 | what the first page is chained from, zeros if nothing |
| 112 | 16 | zeros; a reader ignores them |
| 128 | 32 a page | page keys |
| | 16 a page | xxh3-128 of each payload |
| | 12 an extent | segment, first block, number of blocks |
| | 16 | xxh3-128 of all bytes of the header before it |

Integers are little endian. The header is on the disk, from where an index can be rebuilt, and in
the index, which reads are verified against; its seal guards both.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from hicache.storage.page_memory import CHECKSUM_BYTES
from hicache.storage.page_store.blocks import BLOCK_BYTES, Extent
from hicache.storage.page_store.layout import PageLayout

__all__ = [
    "CHECKSUM_BYTES",
    "FORMAT_VERSION",
    "KEYS_OFFSET",
    "KEY_BYTES",
    "MAX_PAGES",
    "Group",
    "fits_a_block",
]

FORMAT_VERSION = 1
MAX_PAGES = 64
"""Pages of a group at most: which of them are still stored fits one 64-bit word."""
KEY_BYTES = 32
KEYS_OFFSET = 128

_MAGIC = b"HICACHEG"
_RAW_BYTES = 0
_FIELDS = struct.Struct("<8sHHIQIIQHHI32s32s16x")
_EXTENT = struct.Struct("<III")
_SEAL_BYTES = 16

assert _FIELDS.size == KEYS_OFFSET


class Group(NamedTuple):
    """What a header says.

    Attributes:
        group_id: never used twice in a store, and larger than that of any group whose blocks this
            one reuses.
        segment: number of the header segment that the header is written to.
        block: where in that segment.
        namespace_digest: 32 bytes that name the namespace.
        page_bytes: payload of each page.
        parent_key: what the first page is chained from; empty if nothing.
        keys: keys of the pages, one after the other.
        checksums: xxh3-128 of the payloads, one after the other.
        extents: where the pages lie, one after the other.
    """

    group_id: int
    segment: int
    block: int
    namespace_digest: bytes
    page_bytes: int
    parent_key: bytes
    keys: bytes
    checksums: bytes
    extents: tuple[Extent, ...]

    @property
    def num_pages(self) -> int:
        """Pages described."""
        return len(self.keys) // KEY_BYTES

    @property
    def layout(self) -> PageLayout:
        """Where the pages lie."""
        return PageLayout(self.page_bytes, self.extents)

    @property
    def header_extent(self) -> Extent:
        """Where the header lies."""
        return Extent(self.segment, self.block, 1)

    def key(self, position: int) -> bytes:
        """Return the key of one page."""
        return self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def names(self, prefix: bytes) -> list[bytes]:
        """Return the keys of all pages, each behind `prefix`."""
        keys = self.keys
        return [prefix + keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def parent_of(self, position: int) -> bytes:
        """Return what one page is chained from."""
        return self.key(position - 1) if position else self.parent_key

    def encode(self) -> bytes:
        """Return the header."""
        num_pages, num_extents = self.num_pages, len(self.extents)
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            _RAW_BYTES,
            _header_bytes(num_pages, num_extents),
            self.group_id,
            self.segment,
            self.block,
            self.page_bytes,
            num_pages,
            len(self.parent_key),
            num_extents,
            self.namespace_digest,
            self.parent_key,
        )
        extents = b"".join(_EXTENT.pack(*extent) for extent in self.extents)
        header = fields + self.keys + self.checksums + extents
        return header + xxhash.xxh3_128_digest(header)

    @classmethod
    def decode(cls, data: bytes) -> Group | None:
        """Return what the header at the start of `data` says, or `None` if it is not sound."""
        if len(data) < KEYS_OFFSET:
            return None
        fields = _FIELDS.unpack_from(data)
        length, num_pages, parent_bytes, num_extents = fields[3], *fields[8:11]
        if (
            fields[:3] != (_MAGIC, FORMAT_VERSION, _RAW_BYTES)
            or not 1 <= num_pages <= MAX_PAGES
            or parent_bytes not in (0, KEY_BYTES)
            or not num_extents
            or not _header_bytes(num_pages, num_extents) == length <= len(data)
        ):
            return None
        body_bytes = length - _SEAL_BYTES
        if xxhash.xxh3_128_digest(data[:body_bytes]) != data[body_bytes:length]:
            return None
        group_id, segment, block, page_bytes = fields[4:8]
        digest, parent = fields[11:]
        checksums_offset = KEYS_OFFSET + num_pages * KEY_BYTES
        extents_offset = checksums_offset + num_pages * CHECKSUM_BYTES
        return cls(
            group_id,
            segment,
            block,
            digest,
            page_bytes,
            parent[:parent_bytes],
            data[KEYS_OFFSET:checksums_offset],
            data[checksums_offset:extents_offset],
            tuple(map(Extent._make, _EXTENT.iter_unpack(data[extents_offset:body_bytes]))),
        )


def _header_bytes(num_pages: int, num_extents: int) -> int:
    pages_bytes = num_pages * (KEY_BYTES + CHECKSUM_BYTES)
    return KEYS_OFFSET + pages_bytes + num_extents * _EXTENT.size + _SEAL_BYTES


def fits_a_block(num_pages: int, num_extents: int) -> bool:
    """Return whether the header of such a group fits the block that headers have."""
    return num_pages <= MAX_PAGES and _header_bytes(num_pages, num_extents) <= BLOCK_BYTES
