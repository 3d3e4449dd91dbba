"""What a simulated scheduler remembers of a request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hicache.sim.options import GEOMETRY

if TYPE_CHECKING:
    from hicache.radix import RadixKey, RadixNode
    from hicache.types import IntArray, OperationId

__all__ = ["NO_PRODUCER", "Request", "no_pages"]

NO_PRODUCER = -1
"""Of a request whose load has not started, or that has none."""


def no_pages() -> IntArray:
    """Return an empty page table."""
    return np.empty(0, dtype=np.int64)


@dataclasses.dataclass(eq=False)
class Request:
    """A request and the pages that it uses.

    Attributes:
        node: locked for it; None while it waits.
        pages: its page table: pages of the tree, then its own.
        num_tree_pages: of `pages`, how many are the tree's, or a load's.
        num_computed_pages: of `pages`, how many hold, or are getting, their bytes.
        load_first_page: where its load begins; None when it waits for none.
        producer: of its load; -1 while that is queued.
        load_id: job of its load.
        query_id: of its prefetch.
        reserved_id: of the write that is reserved for it.
        computes: whether it does without loads, because one has failed.
    """

    request_id: str
    key: RadixKey
    node: RadixNode | None = None
    pages: IntArray = dataclasses.field(default_factory=no_pages)
    num_tree_pages: int = 0
    num_computed_pages: int = 0
    load_first_page: int | None = None
    producer: int = NO_PRODUCER
    load_id: OperationId | None = None
    query_id: OperationId | None = None
    reserved_id: OperationId | None = None
    computes: bool = False

    @property
    def num_pages(self) -> int:
        """Full pages of the whole key."""
        return len(self.key) // GEOMETRY.page_size

    @property
    def can_compute(self) -> bool:
        """Whether it runs and no load of it is still to be started."""
        is_started = self.load_first_page is None or self.producer != NO_PRODUCER
        return self.node is not None and is_started
