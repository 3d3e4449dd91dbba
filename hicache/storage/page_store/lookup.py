"""Which pages of a prefix are stored, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.group import KEY_BYTES, KEYS_OFFSET
from hicache.storage.page_store.records import GroupState, PageEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    import lmdb

    from hicache.storage.page_store.index import Databases

__all__ = ["Run", "find_runs"]

_GROUP_KEY_BYTES = 8
_NUM_PAGES_OFFSET = 9


class Run(NamedTuple):
    """Pages that follow each other in a batch and in a group.

    Attributes:
        start: place of the first one in the batch.
        num_pages: how many.
        entry: of the first one.
        header: the group's header, as the index has it; empty if the index is damaged there.
    """

    start: int
    num_pages: int
    entry: PageEntry
    header: bytes

    def entry_of(self, index: int) -> PageEntry:
        """Return the entry of one of the pages."""
        return self.entry._replace(position=self.entry.position + index)


def find_runs(
    txn: lmdb.Transaction[bytes],
    dbs: Databases,
    prefix: bytes,
    keys: Sequence[bytes],
    *,
    past_holes: bool = False,
    lone_pages: bool = True,
) -> tuple[list[Run], int]:
    """Find the pages of a batch that are stored, in as few runs as there are.

    Costs two or three look-ups a run, however many pages it has.

    Args:
        txn: a read or write transaction.
        dbs: the index.
        prefix: what the names of the namespace's pages begin with.
        keys: of the pages.
        past_holes: whether to go on behind the first page that is not stored.
        lone_pages: whether groups of one page are wanted as well, which cost most.

    Returns:
        The runs, and where the search ended: without `past_holes`, at the first page that is not
        stored.
    """
    runs: list[Run] = []
    joined = b"".join(keys)
    start, num_keys = 0, len(keys)
    while start < num_keys:
        data = txn.get(prefix + keys[start], db=dbs.pages)
        if data is None:
            if not past_holes:
                break
            start += 1
            continue
        if not lone_pages and data[_NUM_PAGES_OFFSET] == 1:
            start += 1
            continue
        entry = PageEntry.decode(data)
        group_key = data[:_GROUP_KEY_BYTES]
        header = txn.get(group_key, b"", db=dbs.groups)
        most = min(entry.num_pages - entry.position, num_keys - start)
        if most > 1:
            state = txn.get(group_key, db=dbs.states)
            stored = (
                0 if state is None else GroupState.decode(state).num_stored_from(entry.position)
            )
            most = min(most, stored)
        most = max(most, 1)
        offset = KEYS_OFFSET + entry.position * KEY_BYTES
        found = header[offset : offset + most * KEY_BYTES]
        wanted = joined[start * KEY_BYTES : (start + most) * KEY_BYTES]
        num_pages = most if found == wanted else _num_equal(found, wanted)
        if not num_pages:
            # A damaged record leads to another page; without a header, so does nobody.
            num_pages, header = 1, b""
        runs.append(Run(start, num_pages, entry, header))
        start += num_pages
    return runs, start


def _num_equal(left: bytes, right: bytes) -> int:
    """Return how many leading keys are equal; not all are."""
    low, high = 0, len(right) // KEY_BYTES - 1
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * KEY_BYTES] == right[: middle * KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
