"""Page ids to token slots and back, for public methods and copy engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from hicache.types import IntArray

__all__ = ["SlotTable", "expand_pages", "pages_of_slots"]


class SlotTable:
    """The token slots of every page of a pool, so that an expansion is one gather.

    Takes 8 bytes per token of the pool and is four times as fast as computing the slots.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._slots = np.arange(num_pages * page_size, dtype=np.int64).reshape(-1, page_size)

    def expand(self, pages: IntArray) -> torch.Tensor:
        """Return what `expand_pages` returns."""
        return torch.from_numpy(self._slots.take(pages, axis=0).reshape(-1))


def expand_pages(pages: IntArray, page_size: int) -> torch.Tensor:
    """Return the token slots of `pages` in order: int64 `[len(pages) * page_size]`, on the CPU."""
    slots = pages[:, np.newaxis] * page_size + np.arange(page_size, dtype=np.int64)
    return torch.from_numpy(slots.reshape(-1))


def pages_of_slots(slots: torch.Tensor | IntArray, page_size: int) -> IntArray:
    """Return the pages that `slots` run through; undoes `expand_pages`.

    Waits for the device when `slots` is there.

    Args:
        slots: token slots, one-dimensional, whole pages from their first token to their last.
        page_size: tokens in a page.

    Raises:
        ConfigError: `slots` is not made of whole pages; the message names the first place.
    """
    array = slots.cpu().numpy() if isinstance(slots, torch.Tensor) else slots
    if array.ndim != 1 or len(array) % page_size:
        raise ConfigError(
            f"slots of shape {array.shape} are not whole pages of {page_size} tokens; "
            "cut the tail below a page first"
        )
    runs = array.reshape(-1, page_size)
    pages = runs[:, 0] // page_size
    aligned = runs == pages[:, np.newaxis] * page_size + np.arange(page_size)
    wrong = ~aligned.all(axis=1) | (pages < 0)
    if wrong.any():
        first = int(wrong.argmax())
        raise ConfigError(
            f"slots {runs[first, 0]} .. {runs[first, -1]} at position {first * page_size} are not "
            f"a page of {page_size} tokens; slots must come in page-aligned runs"
        )
    return pages.astype(np.int64)
