"""The store (L3) beside memcpy, the bare file system and other systems: pages, looks, opening.

The backend registered as `file` is driven through the storage contract alone, with its checksums.
Every side of a figure moves the same pages in turn, between its store and memory of the same kind;
which batches, and where in memory their pages lie, is drawn anew for each turn.

Every byte that a side has read is compared with what belongs there. A write goes to an empty store
each time, and is compared by reading it back.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import Step
from benchmarks.peers.store_process import PeerStores
from benchmarks.store_calls import CallRows, CallSizes
from benchmarks.store_disk import huge_page_choices
from benchmarks.store_load import LoadRows
from benchmarks.store_sides import open_file_store
from benchmarks.store_transfers import TransferRows, TransferSizes

if TYPE_CHECKING:
    from benchmarks.store_sides import OpenStore

__all__ = ["Sizes", "steps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        transfers: reads and writes.
        calls: looks and opening.
        load: the scheduler's thread meanwhile.
    """

    transfers: TransferSizes = dataclasses.field(default_factory=TransferSizes)
    calls: CallSizes = dataclasses.field(default_factory=CallSizes)
    load: LoadRows = dataclasses.field(default_factory=LoadRows)

    @classmethod
    def quick(cls) -> Sizes:
        """Return the sizes of a run that only shows that all works."""
        mib = 1 << 20
        return cls(
            transfers=TransferSizes(
                warm_page_bytes=(16 << 10, 128 << 10),
                small_page_bytes=(128 << 10,),
                cold_page_bytes=(128 << 10,),
                set_bytes=128 * mib,
                read_bytes=32 * mib,
                write_bytes=32 * mib,
                cold_write_bytes=32 * mib,
                turns=3,
                row_seconds=1.0,
            ),
            calls=CallSizes(large_pages=10_000, samples=500, opens=3),
            load=LoadRows(seconds=3.0),
        )


def steps(
    *,
    quick: bool,
    peers: frozenset[str] = frozenset(),
    sizes: Sizes | None = None,
    open_store: OpenStore = open_file_store,
) -> list[Step]:
    """Return the parts of the benchmark.

    Args:
        quick: smaller pages, fewer of them and fewer turns.
        peers: systems to run beside.
        sizes: instead of those that `quick` means.
        open_store: what is measured, but for the load, which opens it by its name.
    """
    if sizes is None:
        sizes = Sizes.quick() if quick else Sizes()
    stores = PeerStores(peers)
    transfers = TransferRows(sizes.transfers, open_store, stores)
    calls = CallRows(sizes.calls, open_store, stores)
    parts = [
        Step(f"{page_bytes >> 10} KiB pages, warm", partial(transfers.warm, page_bytes))
        for page_bytes in sizes.transfers.warm_page_bytes
    ]
    if huge_page_choices() == (True, False):
        parts += [
            Step(
                f"{page_bytes >> 10} KiB pages, without huge pages",
                partial(transfers.warm_on_small_pages, page_bytes),
            )
            for page_bytes in sizes.transfers.small_page_bytes
        ]
    return [
        *parts,
        Step("pages past the page cache", transfers.cold),
        Step("looks", calls.looks),
        Step("a large store", calls.large),
        Step("the scheduler's thread under load", sizes.load),
    ]
