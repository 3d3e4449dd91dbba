from collections.abc import Callable, Sequence
from typing import TypeAlias

_Pages: TypeAlias = Sequence[tuple[tuple[int, int], ...]]
_Places: TypeAlias = Sequence[tuple[int, int, int] | tuple[int, int, int, int]]

def read_pages(
    places: _Places,
    pages: _Pages,
    first: int,
    num_pages: int,
    gap_bytes: int,
    chunk_bytes: int,
    num_requests: int,
    /,
) -> bytes: ...
def write_pages(
    places: _Places,
    pages: _Pages,
    first: int,
    num_pages: int,
    gap_bytes: int,
    chunk_bytes: int,
    num_requests: int,
    mark: int = 0,
    on_mark: Callable[[bytes], object] = ...,
    /,
) -> bytes: ...
def map_file(fd: int, num_bytes: int, /) -> int: ...
def unmap(mapping: int, num_bytes: int, /) -> None: ...
def have_length(pages: _Pages, page_bytes: int, /) -> bool: ...
