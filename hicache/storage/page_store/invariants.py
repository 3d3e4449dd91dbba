"""Whether an index agrees with itself."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from hicache.storage.page_store.blocks import BlockKind, Extent, count_blocks, merge
from hicache.storage.page_store.catalogue import GROUP_KEY, LEAF_KEY, Leaf
from hicache.storage.page_store.counters import BACKED, REUSE_HISTORY, pages_counter
from hicache.storage.page_store.group import Group
from hicache.storage.page_store.records import GroupState, NamespaceRecord, PageEntry, page_name
from hicache.storage.page_store.reuse_history import ReuseHistory
from hicache.storage.page_store.space import free_map, hole_map, lease_map

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lmdb

    from hicache.storage.page_store.index import Databases

__all__ = ["check_index"]


def check_index(txn: lmdb.Transaction[bytes], dbs: Databases, *, segment_blocks: int) -> list[str]:
    """Return every contradiction in an index, one sentence each.

    Looks at everything, so it takes memory and time in proportion to the store.
    """
    check = _Check(txn, dbs)
    check.pages()
    check.links()
    for kind in BlockKind:
        check.blocks(kind, segment_blocks)
    check.numbers()
    return check.violations


class _Check:
    def __init__(self, txn: lmdb.Transaction[bytes], dbs: Databases) -> None:
        self.violations: list[str] = []
        self._txn = txn
        self._dbs = dbs
        self._groups: dict[int, tuple[Group, GroupState]] = {}
        self._num_backed = 0
        for key, data in _items(txn, dbs.groups):
            (group_id,) = GROUP_KEY.unpack(key)
            group = Group.decode(data)
            state = txn.get(key, db=dbs.states)
            if group is None or group.group_id != group_id:
                self._say(f"group {group_id} has no sound header")
            elif state is None:
                self._say(f"group {group_id} has no state")
            else:
                self._groups[group_id] = (group, GroupState.decode(state))

    def pages(self) -> None:
        """Pages are where their entries say, and all that groups have are there."""
        expected = {
            page_name(state.namespace_id, group.key(n)): PageEntry(group_id, n, group.num_pages)
            for group_id, (group, state) in self._groups.items()
            for n in _stored(group, state)
        }
        found = {name: PageEntry.decode(data) for name, data in _items(self._txn, self._dbs.pages)}
        self._compare("page", expected, found)

    def links(self) -> None:
        """Children are counted, and leaves are the groups that nothing hangs below."""
        children: Counter[bytes] = Counter()
        for group, state in self._groups.values():
            for n in _stored(group, state):
                parent_key = group.parent_of(n)
                if parent_key and not state.is_stored(n - 1):
                    children[page_name(state.namespace_id, parent_key)] += 1
        found = {
            name: int.from_bytes(data, "little")
            for name, data in _items(self._txn, self._dbs.children)
        }
        self._compare("children of page", dict(children), found)
        leaves = {
            group_id: Leaf.of(group_id, state)
            for group_id, (group, state) in self._groups.items()
            if not children[page_name(state.namespace_id, group.key(state.last_position))]
        }
        keys = (LEAF_KEY.unpack(key) for key, _ in _items(self._txn, self._dbs.leaves))
        filed = [Leaf._make(key) for key in keys]
        self._compare("leaf", leaves, {leaf.group_id: leaf for leaf in filed})
        history = ReuseHistory.decode(self._txn.get(REUSE_HISTORY, b"", db=self._dbs.meta))
        num_leaves = Counter(leaf.use_class for leaf in filed)
        counted = {c: count for c, count in enumerate(history.num_leaves) if count}
        self._compare("leaves of class", dict(num_leaves), counted)

    def blocks(self, kind: BlockKind, segment_blocks: int) -> None:
        """Every block of every segment is in one state."""
        backed = list(free_map(self._dbs, kind).extents(self._txn))
        for owner_id, _ in _items(self._txn, self._dbs.owners):
            backed += lease_map(self._dbs, kind, owner_id).extents(self._txn)
        for group, state in self._groups.values():
            if kind is BlockKind.HEADER:
                backed.append(group.header_extent)
            else:
                backed += (e for n in _stored(group, state) for e in group.layout.extents_of(n, 1))
        holes = list(hole_map(self._dbs, kind).extents(self._txn))
        self._num_backed += count_blocks(backed)
        ordered = sorted([*backed, *holes])
        for left, right in itertools.pairwise(ordered):
            if left.segment == right.segment and left.end > right.block:
                self._say(f"{kind.value}: {left} and {right} overlap")
        for extent in merge(ordered):
            if extent != Extent(extent.segment, 0, segment_blocks):
                self._say(f"{kind.value}: of segment {extent.segment} only {extent} is known")

    def numbers(self) -> None:
        """Counters are right."""
        stored: Counter[int] = Counter()
        for _, state in self._groups.values():
            stored[state.namespace_id] += state.num_stored
        for _, data in _items(self._txn, self._dbs.namespaces):
            namespace_id = NamespaceRecord.decode(data).namespace_id
            self._compare_number(pages_counter(namespace_id), stored[namespace_id])
        self._compare_number(BACKED, self._num_backed)

    def _compare(self, what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> None:
        for name in expected.keys() | found.keys():
            if expected.get(name) != found.get(name):
                self._say(f"{what} {name!r}: {found.get(name)}, not {expected.get(name)}")

    def _compare_number(self, counter: bytes, expected: int) -> None:
        found = int.from_bytes(self._txn.get(counter, b"", db=self._dbs.meta), "little")
        if found != expected:
            self._say(f"{counter!r}: {found}, not {expected}")

    def _say(self, violation: str) -> None:
        self.violations.append(violation)


def _stored(group: Group, state: GroupState) -> Iterator[int]:
    return (n for n in range(group.num_pages) if state.is_stored(n))


def _items(txn: lmdb.Transaction[bytes], database: Any) -> Iterator[tuple[bytes, bytes]]:
    with txn.cursor(database) as cursor:
        yield from cursor
