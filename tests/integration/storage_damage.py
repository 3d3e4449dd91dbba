"""Damage to what a page store has on the disk, behind its back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.storage.page_store import list_pages, verify_pages

if TYPE_CHECKING:
    from pathlib import Path

    from hicache.storage.page_store import StoredPage


def num_stored_pages(path: Path) -> int:
    """Return how many pages the store in `path` has."""
    return len(list(list_pages(str(path))))


def flip(page: StoredPage, position: int = 0) -> None:
    """Change a byte of a page that lies in one piece; positions below 0 count from its end."""
    with open(page.file, "r+b") as file:
        offset = page.offset + position % page.num_bytes
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def remove_stored_pages(path: Path) -> None:
    """Let all pages vanish from the store in `path`."""
    for page in list_pages(str(path)):
        flip(page)
    for _ in verify_pages(str(path), remove_damaged=True):
        pass
