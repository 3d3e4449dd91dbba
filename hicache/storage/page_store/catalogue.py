"""What is stored: pages, their groups, and the order in which they may be given up.

A page may go when no stored page is chained from it. Within a group that is the last stored page at
most, and that one if no other group hangs below it: so a group is filed among the `leaves`, under
its class of uses and its last use, exactly when `children` has nothing for its last page.
`children` counts by the parent's key, whether the parent is stored or not. A page whose predecessor
in its own group is not stored hangs below it like one of another group.

When the last child of a page goes, the page has been of use at least as long as that child: it
inherits its tick. And whatever read a child has read what it hangs below: when it goes, its uses
are counted there. So a read has to note its last page only.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from hicache.storage.page_store.blocks import Extent, merge
from hicache.storage.page_store.counters import pages_counter
from hicache.storage.page_store.group import Group
from hicache.storage.page_store.records import GroupState, PageEntry, page_name
from hicache.storage.page_store.reuse_history import class_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache.storage.page_store.departed import Departed
    from hicache.storage.page_store.index import WriteTransaction

__all__ = ["ALL_POSITIONS", "GROUP_KEY", "LEAF_KEY", "Catalogue", "Freed", "Leaf"]

GROUP_KEY = struct.Struct(">Q")
LEAF_KEY = struct.Struct(">BQQ")
ALL_POSITIONS = (1 << 64) - 1
"""Every page that a group can have."""

_NUMBER = struct.Struct("<Q")


class Leaf(NamedTuple):
    """A group that may be given up from its end, as it is filed.

    Attributes:
        use_class: class of its uses.
        last_use: tick of the last one.
        group_id: which group.
    """

    use_class: int
    last_use: int
    group_id: int

    @classmethod
    def of(cls, group_id: int, state: GroupState) -> Leaf:
        """Return how a group is filed."""
        return cls(class_of(state.num_uses), state.last_use, group_id)


class Freed(NamedTuple):
    """What has become free.

    Attributes:
        num_pages: pages that are no longer stored.
        payload: their blocks.
        headers: blocks of the headers of groups that have no page left.
        leaves: groups whose last child is gone, which may go now.
    """

    num_pages: int
    payload: list[Extent]
    headers: list[Extent]
    leaves: Sequence[Leaf] = ()


class Catalogue:
    """The changes that can be made to what is stored, within one write transaction."""

    def __init__(self, write: WriteTransaction) -> None:
        self._write = write
        self._txn = write.txn
        self._dbs = write.dbs

    def add_to(self, counter: bytes, difference: int) -> int:
        """Change a number in `meta`; return what it was before."""
        before: int = _NUMBER.unpack(self._txn.get(counter, bytes(8), db=self._dbs.meta))[0]
        self._txn.put(counter, _NUMBER.pack(before + difference), db=self._dbs.meta)
        return before

    def publish(
        self,
        group: Group,
        namespace_id: int,
        *,
        positions: int = ALL_POSITIONS,
        last_use: int | None = None,
        departed: Departed | None = None,
    ) -> int:
        """Store the pages of a group that are not stored yet.

        Args:
            group: whose blocks are written.
            namespace_id: whose pages they are.
            positions: the pages to store, one bit each.
            last_use: tick of their last use; by default they are used just now.
            departed: what is known of their past.

        Returns:
            Those that were stored by this, one bit each; the others are stored already. If there
            are none, nothing has changed.
        """
        prefix = page_name(namespace_id)
        stored = self._enter_pages(prefix, group, positions & ((1 << group.num_pages) - 1))
        if stored:
            tick = self._write.history.tick() if last_use is None else last_use
            num_uses = 1
            if departed is not None:
                first = (stored & -stored).bit_length() - 1
                num_uses += departed.recall(self._write.history, prefix + group.key(first))
            state = GroupState(stored, tick, num_uses, num_uses, namespace_id)
            self._txn.put(GROUP_KEY.pack(group.group_id), group.encode(), db=self._dbs.groups)
            for position in _positions(stored & ~(stored << 1)):
                self._add_child(namespace_id, group.parent_of(position))
            self._file(group, state)
            self.add_to(pages_counter(namespace_id), state.num_stored)
        return stored

    def remove(self, group_id: int, positions: int) -> Freed:
        """Forget those of the pages of a group, one bit each, that are stored."""
        group, state = self._group(group_id), self._state(group_id)
        gone = state.stored & positions
        if group is None or not gone:
            return Freed(0, [], [])
        self._unfile(group_id, state)
        prefix = page_name(state.namespace_id)
        left = state._replace(stored=state.stored & ~gone)
        for position in _positions(gone):
            self._txn.delete(prefix + group.key(position), db=self._dbs.pages)
        for position in _positions(gone & left.stored >> 1):
            self._count_children(prefix + group.key(position), 1)
        first_ones = gone & ~(state.stored << 1)
        parents = [group.parent_of(position) for position in _positions(first_ones)]
        num_gone = state.num_stored - left.num_stored
        self.add_to(pages_counter(state.namespace_id), -num_gone)
        headers: list[Extent] = []
        if left.stored:
            self._file(group, left)
        else:
            self._txn.delete(GROUP_KEY.pack(group_id), db=self._dbs.groups)
            self._txn.delete(GROUP_KEY.pack(group_id), db=self._dbs.states)
            headers.append(group.header_extent)
        dropped = (self._drop_child(parent_key, state) for parent_key in parents)
        leaves = [leaf for leaf in dropped if leaf is not None]
        if num_gone == group.num_pages:
            return Freed(num_gone, merge(group.extents), headers, leaves)
        layout = group.layout
        extents = [one for position in _positions(gone) for one in layout.extents_of(position, 1)]
        return Freed(num_gone, merge(extents), headers, leaves)

    def remove_page(self, name: bytes, entry: PageEntry) -> Freed:
        """Forget a page if its entry is still this very one.

        Where the index itself is damaged, the page is forgotten but its blocks are not free: they
        are found again when the index is rebuilt.
        """
        if self._txn.get(name, db=self._dbs.pages) != entry.encode():
            return Freed(0, [], [])
        freed = Freed(0, [], [])
        if self.is_sound(name, entry):
            freed = self.remove(entry.group_id, 1 << entry.position)
        if not freed.num_pages:
            self._txn.delete(name, db=self._dbs.pages)
        return freed

    def is_sound(self, name: bytes, entry: PageEntry) -> bool:
        """Whether an entry leads to the page that it is filed under."""
        group = self._group(entry.group_id)
        namespace_id = self._state(entry.group_id).namespace_id
        return group is not None and name == page_name(namespace_id, group.key(entry.position))

    def first_leaf(self, start: bytes) -> Leaf | None:
        """Return the first leaf that is filed at `start` or behind it."""
        with self._txn.cursor(self._dbs.leaves) as cursor:
            return Leaf._make(LEAF_KEY.unpack(cursor.key())) if cursor.set_range(start) else None

    def evict(self, leaf: Leaf, departed: Departed, *, num_blocks: int, max_pages: int) -> Freed:
        """Give up pages from the end of a leaf, until that many blocks are free or pages are gone.

        A record that is damaged is dropped; its blocks are found again when the index is rebuilt.
        """
        freed = Freed(0, [], [])
        group = self._group(leaf.group_id)
        if group is not None:
            most = min(-(-num_blocks // group.layout.page_blocks), max_pages)
            state, tail = self._state(leaf.group_id), self._tail(group, most)
            freed = self.remove(leaf.group_id, tail)
            if freed.num_pages:
                first = (tail & -tail).bit_length() - 1
                name = page_name(state.namespace_id, group.key(first))
                departed.remember(self._write.history, name, state.num_uses, state.last_use)
        if not freed.num_pages:
            self._txn.delete(LEAF_KEY.pack(*leaf), db=self._dbs.leaves)
        return freed

    def touch(self, group_id: int, num_uses: int) -> None:
        """Note uses of pages of a group, the last one just now; nothing if it is gone."""
        state = self._state(group_id)
        if not state.stored:
            return
        was_leaf = self._unfile(group_id, state, used=True)
        state = state.used(num_uses, self._write.history.tick())
        self._txn.put(GROUP_KEY.pack(group_id), state.encode(), db=self._dbs.states)
        if was_leaf:
            self._enqueue(group_id, state)

    def _enter_pages(self, prefix: bytes, group: Group, positions: int) -> int:
        """Make entries of those pages of a group that have none; return them, one bit each."""
        entries = PageEntry.encode_all(group.group_id, group.num_pages)
        pairs = list(zip(group.names(prefix), entries, strict=True))
        wanted = [pairs[position] for position in _positions(positions)]
        with self._txn.cursor(self._dbs.pages) as cursor:
            _, num_new = cursor.putmulti(wanted, overwrite=False)
        if num_new == len(wanted):
            return positions
        # An entry is like no other, so what reads back as written was stored by this.
        return sum(
            1 << position
            for position in _positions(positions)
            if self._txn.get(pairs[position][0], db=self._dbs.pages) == entries[position]
        )

    def _tail(self, group: Group, most: int) -> int:
        """Return up to `most` pages from the end of a group that nothing else hangs below."""
        state = self._state(group.group_id)
        prefix = page_name(state.namespace_id)
        tail = 0
        for _ in range(most):
            last = state.last_position
            if last < 0 or self._num_children(prefix + group.key(last)):
                break
            tail |= 1 << last
            state = state._replace(stored=state.stored & ~(1 << last))
        return tail

    def _group(self, group_id: int) -> Group | None:
        return Group.decode(self._txn.get(GROUP_KEY.pack(group_id), b"", db=self._dbs.groups))

    def _state(self, group_id: int) -> GroupState:
        data = self._txn.get(GROUP_KEY.pack(group_id), db=self._dbs.states)
        return GroupState(0, 0, 0, 0, 0) if data is None else GroupState.decode(data)

    def _file(self, group: Group, state: GroupState) -> None:
        """Write a group's state, and file it among the leaves if it is one."""
        group_id = group.group_id
        self._txn.put(GROUP_KEY.pack(group_id), state.encode(), db=self._dbs.states)
        last = page_name(state.namespace_id, group.key(state.last_position))
        if not self._num_children(last):
            self._enqueue(group_id, state)

    def _enqueue(self, group_id: int, state: GroupState) -> Leaf:
        leaf = Leaf.of(group_id, state)
        self._txn.put(LEAF_KEY.pack(*leaf), b"", db=self._dbs.leaves)
        history = self._write.history
        history.num_leaves[leaf.use_class] += 1
        history.begin_wait(leaf.use_class, leaf.last_use)
        return leaf

    def _unfile(self, group_id: int, state: GroupState, *, used: bool = False) -> bool:
        """Take a group out of the leaves; return whether it was one."""
        leaf = Leaf.of(group_id, state)
        was_leaf = self._txn.delete(LEAF_KEY.pack(*leaf), db=self._dbs.leaves)
        if was_leaf:
            history = self._write.history
            history.num_leaves[leaf.use_class] -= 1
            history.end_wait(leaf.use_class, leaf.last_use, used=used)
        return was_leaf

    def _add_child(self, namespace_id: int, parent_key: bytes) -> None:
        if not parent_key:
            return
        name = page_name(namespace_id, parent_key)
        parent = self._parent(name) if self._count_children(name, 1) == 1 else None
        if parent is not None:
            group_id, state = parent
            self._unfile(group_id, state)

    def _drop_child(self, parent_key: bytes, child: GroupState) -> Leaf | None:
        """Count a child less; return its parent if that is a leaf now."""
        if not parent_key:
            return None
        name = page_name(child.namespace_id, parent_key)
        num_left = self._count_children(name, -1)
        num_uses = child.num_uses - child.num_counted
        parent = self._parent(name) if num_uses or not num_left else None
        if parent is None:
            return None
        group_id, state = parent
        state = state.used(num_uses, state.last_use if num_left else child.last_use)
        self._txn.put(GROUP_KEY.pack(group_id), state.encode(), db=self._dbs.states)
        return None if num_left else self._enqueue(group_id, state)

    def _parent(self, name: bytes) -> tuple[int, GroupState] | None:
        """Return the group whose last stored page is the one of this name, if there is one."""
        data = self._txn.get(name, db=self._dbs.pages)
        if data is None:
            return None
        entry = PageEntry.decode(data)
        state = self._state(entry.group_id)
        return (entry.group_id, state) if state.last_position == entry.position else None

    def _num_children(self, name: bytes) -> int:
        count: int = _NUMBER.unpack(self._txn.get(name, bytes(8), db=self._dbs.children))[0]
        return count

    def _count_children(self, name: bytes, difference: int) -> int:
        count = self._num_children(name) + difference
        if count:
            self._txn.put(name, _NUMBER.pack(count), db=self._dbs.children)
        else:
            self._txn.delete(name, db=self._dbs.children)
        return count


def _positions(bits: int) -> Iterable[int]:
    """Return the numbers of the bits that are set, in order."""
    return _scan(bits) if bits & (bits + 1) else range(bits.bit_length())


def _scan(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
