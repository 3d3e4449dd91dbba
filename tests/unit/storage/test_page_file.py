"""The header of a page file, against a decoder written from its documentation."""

from __future__ import annotations

import hashlib

import pytest
import xxhash

from hicache.storage.page_file import HEADER_BYTES, PageFormat
from hicache.types import PageHash, PageOutcome

DIGEST = bytes(range(32))
KEY = PageHash(bytes(range(32, 64)))
PARENT = bytes(range(64, 96))
CHECKSUM = bytes(range(96, 112))
FORMAT = PageFormat(DIGEST, page_bytes=131_072)


def test_each_field_is_where_the_documentation_says() -> None:
    block = FORMAT.encode(KEY, PARENT, CHECKSUM)
    assert len(block) == HEADER_BYTES == 4096
    assert block[:8] == b"HICACHE\x00"
    assert int.from_bytes(block[8:12], "little") == 1
    assert int.from_bytes(block[12:16], "little") == 32
    assert int.from_bytes(block[16:24], "little") == 131_072
    assert block[24:56] == DIGEST
    assert block[56:88] == KEY
    assert block[88:120] == PARENT
    assert block[120:136] == CHECKSUM
    assert not any(block[136:4088])
    assert int.from_bytes(block[4088:], "little") == xxhash.xxh3_64_intdigest(block[:4088])


def test_the_format_is_the_one_that_stored_pages_have() -> None:
    """A change of the golden value means a new format version: old pages must not be misread."""
    block = FORMAT.encode(KEY, PARENT, CHECKSUM)
    assert hashlib.sha256(block).hexdigest() == (
        "41762450ddc97a88a8aef2b613d7c0a376b55095fe23520a447dede54c0769e0"
    )


def test_a_first_page_has_no_parent() -> None:
    block = FORMAT.encode(KEY, b"", CHECKSUM)
    assert int.from_bytes(block[12:16], "little") == 0
    assert not any(block[88:120])


def test_a_header_is_accepted_for_its_own_page_only() -> None:
    block = FORMAT.encode(KEY, PARENT, CHECKSUM)
    assert FORMAT.check(block, KEY) is PageOutcome.OK
    assert FORMAT.payload_checksum(block) == CHECKSUM
    assert FORMAT.check(block, PageHash(DIGEST)) is PageOutcome.FOREIGN
    assert PageFormat(KEY, 131_072).check(block, KEY) is PageOutcome.FOREIGN
    assert PageFormat(DIGEST, 131_071).check(block, KEY) is PageOutcome.FOREIGN


@pytest.mark.parametrize("position", [0, 7, 8, 12, 16, 24, 56, 88, 120, 135, 136, 4087, 4088, 4095])
def test_a_header_with_any_byte_changed_is_refused(position: int) -> None:
    block = bytearray(FORMAT.encode(KEY, PARENT, CHECKSUM))
    block[position] ^= 0x10
    expected = PageOutcome.FOREIGN if position < 8 else PageOutcome.CORRUPT
    assert FORMAT.check(block, KEY) is expected
