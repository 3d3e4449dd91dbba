from collections.abc import Sequence

def read_pages(
    places: Sequence[tuple[int, int, int]],
    pages: Sequence[tuple[tuple[int, int], ...]],
    first: int,
    num_pages: int,
    gap_bytes: int,
    chunk_bytes: int,
    /,
) -> bytes: ...
def write_pages(
    places: Sequence[tuple[int, int, int]],
    pages: Sequence[tuple[tuple[int, int], ...]],
    first: int,
    num_pages: int,
    gap_bytes: int,
    chunk_bytes: int,
    /,
) -> bytes: ...
def read_unchecked(
    places: Sequence[tuple[int, int, int]],
    pages: Sequence[tuple[tuple[int, int], ...]],
    first: int,
    num_pages: int,
    gap_bytes: int,
    chunk_bytes: int,
    /,
) -> int: ...
def write_unchecked(
    places: Sequence[tuple[int, int, int]],
    pages: Sequence[tuple[tuple[int, int], ...]],
    first: int,
    num_pages: int,
    gap_bytes: int,
    chunk_bytes: int,
    /,
) -> int: ...
def checksums(
    pages: Sequence[tuple[tuple[int, int], ...]], first: int, num_pages: int, /
) -> bytes: ...
def have_length(pages: Sequence[tuple[tuple[int, int], ...]], page_bytes: int, /) -> bool: ...
