"""The header of a group, against a decoder written from its documentation."""

from __future__ import annotations

import hashlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from hicache.storage.page_store.blocks import BLOCK_BYTES, Extent
from hicache.storage.page_store.group import MAX_PAGES, Group, fits_a_block

DIGEST = bytes(range(32))
PARENT = bytes(range(32, 64))
KEYS = bytes(range(64, 128))
CHECKSUMS = bytes(range(128, 160))
GROUP = Group(
    group_id=0x0123_4567_89AB_CDEF,
    segment=3,
    block=70_000,
    namespace_digest=DIGEST,
    page_bytes=20_000,
    parent_key=PARENT,
    keys=KEYS,
    checksums=CHECKSUMS,
    extents=(Extent(7, 11, 6), Extent(8, 0, 4)),
)


def number(data: bytes, start: int, length: int) -> int:
    return int.from_bytes(data[start : start + length], "little")


def test_each_field_is_where_the_documentation_says() -> None:
    header = GROUP.encode()
    assert len(header) == 128 + 2 * 32 + 2 * 16 + 2 * 12 + 16
    assert header[:8] == b"HICACHEG"
    assert number(header, 8, 2) == 1
    assert number(header, 10, 2) == 0
    assert number(header, 12, 4) == len(header)
    assert number(header, 16, 8) == GROUP.group_id
    assert (number(header, 24, 4), number(header, 28, 4)) == (3, 70_000)
    assert number(header, 32, 8) == 20_000
    assert number(header, 40, 2) == 2
    assert number(header, 42, 2) == 32
    assert number(header, 44, 4) == 2
    assert header[48:80] == DIGEST
    assert header[80:112] == PARENT
    assert not any(header[112:128])
    assert header[128:192] == KEYS
    assert header[192:224] == CHECKSUMS
    numbers = [number(header, start, 4) for start in range(224, 248, 4)]
    assert numbers == [7, 11, 6, 8, 0, 4]
    assert header[248:] == xxhash.xxh3_128_digest(header[:248])


def test_the_format_is_the_one_that_stored_pages_have() -> None:
    """A change of the golden value means a new format version: old pages must not be misread."""
    assert hashlib.sha256(GROUP.encode()).hexdigest() == (
        "b60bb35538eb4ea8ec5ed52f6a0e846687e9a8aba739c4eb229e4931593ca7ef"
    )


def test_a_header_says_what_was_put_into_it_wherever_it_ends() -> None:
    header = GROUP.encode()
    assert Group.decode(header) == GROUP
    assert Group.decode(header.ljust(BLOCK_BYTES, b"\xaa")) == GROUP
    first = GROUP._replace(parent_key=b"")
    assert Group.decode(first.encode()) == first
    assert not any(first.encode()[80:112])


def test_what_older_stores_have_in_the_unused_bytes_is_ignored() -> None:
    header = GROUP.encode()
    body = header[:112] + bytes(range(160, 176)) + header[128:248]
    assert Group.decode(body + xxhash.xxh3_128_digest(body)) == GROUP


@given(position=st.integers(0, 263), mask=st.integers(1, 255))
def test_a_header_with_any_byte_changed_is_none(position: int, mask: int) -> None:
    header = bytearray(GROUP.encode())
    header[position] ^= mask
    assert Group.decode(bytes(header)) is None


@given(data=st.binary(max_size=600))
def test_what_is_no_header_is_none(data: bytes) -> None:
    assert Group.decode(data) is None
    assert Group.decode(b"HICACHEG" + data) is None


def test_a_header_that_was_cut_is_none() -> None:
    header = GROUP.encode()
    assert all(Group.decode(header[:length]) is None for length in range(len(header)))


def test_pages_lie_one_after_the_other_over_the_extents() -> None:
    assert GROUP.layout.page_blocks == 5
    assert GROUP.layout.extents_of(0, 1) == [Extent(7, 11, 5)]
    assert GROUP.layout.extents_of(1, 1) == [Extent(7, 16, 1), Extent(8, 0, 4)]
    assert GROUP.layout.extents_of(0, 2) == list(GROUP.extents)
    assert (GROUP.parent_of(0), GROUP.parent_of(1)) == (PARENT, KEYS[:32])


@given(num_pages=st.integers(1, MAX_PAGES), num_extents=st.integers(1, 400))
def test_what_fits_a_block_does(num_pages: int, num_extents: int) -> None:
    group = GROUP._replace(
        keys=bytes(32 * num_pages),
        checksums=bytes(16 * num_pages),
        extents=(Extent(0, 0, 1),) * num_extents,
    )
    assert fits_a_block(num_pages, num_extents) == (len(group.encode()) <= BLOCK_BYTES)


def test_a_full_group_in_one_piece_fits() -> None:
    assert fits_a_block(MAX_PAGES, 1)
    assert not fits_a_block(MAX_PAGES + 1, 1)


@pytest.mark.parametrize("position", [0, 1])
def test_a_key_is_found_by_its_position(position: int) -> None:
    assert GROUP.key(position) == KEYS[32 * position :][:32]
