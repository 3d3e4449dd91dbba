"""What an operator can ask of a store, and do to it, while engines use it or not."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache.errors import ConfigError
from hicache.storage.page_memory import BatchMemory, HostRegions, page_over
from hicache.storage.page_store.blocks import BLOCK_BYTES, BlockKind
from hicache.storage.page_store.catalogue import GROUP_KEY
from hicache.storage.page_store.clearing import remove_if_same
from hicache.storage.page_store.counters import BACKED, pages_counter
from hicache.storage.page_store.directory import DEFAULT_SEGMENT_BYTES, StoreDirectory
from hicache.storage.page_store.group import FORMAT_VERSION, Group
from hicache.storage.page_store.invariants import check_index
from hicache.storage.page_store.limits import Limits
from hicache.storage.page_store.owner import is_alive, list_owners
from hicache.storage.page_store.page_reader import read_pages
from hicache.storage.page_store.rebuild import rebuild_index
from hicache.storage.page_store.records import GroupState, NamespaceRecord, PageEntry, page_name
from hicache.storage.page_store.refill import recover_dead_owners
from hicache.storage.page_store.registry import STORES
from hicache.storage.page_store.space import free_map
from hicache.storage.page_store.spans import span_of
from hicache.storage.page_store.transfer import PageTransfer
from hicache.types import PageHash, PageOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import lmdb

    from hicache.storage.page_store.index import Databases
    from hicache.storage.page_store.open_store import OpenStore

__all__ = [
    "GarbageReport",
    "NamespaceSummary",
    "StoreSummary",
    "StoredPage",
    "check_store",
    "collect_garbage",
    "list_pages",
    "rebuild_store",
    "summarize",
    "verify_pages",
]

_GROUPS_AT_ONCE = 16
"""Groups looked up at a time: a longer look would keep the index from using space again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamespaceSummary:
    """The pages of one namespace.

    Attributes:
        digest: 32 bytes that name it.
        description: its fields; empty after the index was rebuilt, until an engine opens it again.
        page_bytes: payload of a page.
        num_pages: pages stored.
    """

    digest: bytes
    description: Mapping[str, Any]
    page_bytes: int
    num_pages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSummary:
    """A store as a whole.

    Attributes:
        path: its directory.
        format_version: of its files.
        namespaces: by digest.
        limits: the strictest of the processes that have it open to use it; None if none has.
        num_owners: living processes that have it open, this one included.
        segment_bytes: space that its segments take on the disk.
        free_bytes: the part of it that no page uses and nobody has leased.
        index_bytes: length of the index.
    """

    path: str
    format_version: int
    namespaces: tuple[NamespaceSummary, ...]
    limits: Limits | None
    num_owners: int
    segment_bytes: int
    free_bytes: int
    index_bytes: int


class StoredPage(NamedTuple):
    """A stored page, and where its first byte is.

    Attributes:
        namespace_digest: whose it is.
        key: its hash.
        num_bytes: its payload.
        file: path of the segment.
        offset: where in the segment; a page may go on elsewhere.
        outcome: `OK` if its bytes were read and are those that were written, the reason if they are
            not, `None` if it was not read.
    """

    namespace_digest: bytes
    key: PageHash
    num_bytes: int
    file: str
    offset: int
    outcome: PageOutcome | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GarbageReport:
    """What was given back.

    Attributes:
        num_dead_owners: dead processes whose leases were free again.
        released_bytes: free space that went back to the file system.
    """

    num_dead_owners: int
    released_bytes: int


def summarize(path: str) -> StoreSummary:
    """Describe the store in a directory; takes time for its free extents and namespaces only.

    Raises:
        ConfigError: there is no store that this process can use.
        OSError, lmdb.Error: it cannot be read.
    """
    with _opened(path) as store:
        dbs = store.index.dbs
        with store.index.read() as txn:
            owners = [Limits.decode(data) for _, data in _items(txn, dbs.owners)]
            namespaces = [
                _summarize_namespace(txn, dbs, digest, NamespaceRecord.decode(data))
                for digest, data in _items(txn, dbs.namespaces)
            ]
            num_free = sum(free_map(dbs, kind).num_blocks(txn) for kind in BlockKind)
            num_backed = _number(txn, dbs, BACKED)
        return StoreSummary(
            path=store.directory.path,
            format_version=FORMAT_VERSION,
            namespaces=tuple(namespaces),
            limits=Limits().strictest(owners) if owners else None,
            num_owners=len(_living(store.directory)),
            segment_bytes=num_backed * BLOCK_BYTES,
            free_bytes=num_free * BLOCK_BYTES,
            index_bytes=store.index.num_bytes,
        )


def list_pages(path: str) -> Iterator[StoredPage]:
    """Yield every stored page, oldest groups first, without reading it.

    Pages that come or go meanwhile may be left out.

    Raises:
        ConfigError: there is no store that this process can use.
        OSError, lmdb.Error: it cannot be read.
    """
    with _opened(path) as store:
        for group, state in _groups(store):
            yield from (_page(store, group, n, None) for n in _stored_positions(group, state))


def verify_pages(path: str, *, remove_damaged: bool = False) -> Iterator[StoredPage]:
    """Yield every stored page after reading it; engines may go on meanwhile.

    Args:
        path: the store's directory.
        remove_damaged: whether a page that is not what was written is forgotten, so that the next
            write of its key repairs it; as a read would do.

    Raises:
        ConfigError: there is no store that this process can use.
        OSError, lmdb.Error: it cannot be read.
    """
    with _opened(path) as store:
        transfer = PageTransfer(store.segments)
        for group, state in _groups(store):
            buffer = bytearray(group.page_bytes)
            memory = BatchMemory(HostRegions(), [page_over(buffer)])
            for position in _stored_positions(group, state):
                span = span_of(group, position)
                outcome = read_pages(transfer, span, memory, expired=lambda: False).failure
                if outcome is not PageOutcome.OK:
                    name = page_name(state.namespace_id, group.key(position))
                    entry = PageEntry(group.group_id, position, group.num_pages)
                    if not _is_same(store, name, entry):
                        continue
                    if remove_damaged:
                        remove_if_same(store, name, entry)
                yield _page(store, group, position, outcome)


def check_store(path: str) -> list[str]:
    """Return every contradiction in the index of a store, one sentence each; see `check_index`.

    Raises:
        ConfigError: there is no store that this process can use.
        OSError, lmdb.Error: it cannot be read.
    """
    with _opened(path) as store, store.index.read() as txn:
        return check_index(txn, store.index.dbs, segment_blocks=store.parts.segment_blocks)


def collect_garbage(path: str) -> GarbageReport:
    """Take back what dead processes had leased, and give free space back to the file system.

    Raises:
        ConfigError: there is no store that this process can use.
        OSError, lmdb.Error: it cannot be written; what was done before stays.
    """
    with _opened(path) as store:
        num_dead_owners = num_punched = 0
        num_blocks = 1
        while num_blocks:
            with store.index.write() as write:
                num_dead_owners += recover_dead_owners(write, store.parts)
                space = store.parts.space(write)
                num_blocks = sum(space.punch(kind, space.num_backed) for kind in BlockKind)
                num_punched += num_blocks
        return GarbageReport(
            num_dead_owners=num_dead_owners, released_bytes=num_punched * BLOCK_BYTES
        )


def rebuild_store(path: str) -> int:
    """Replace the index of a store that nobody has open; return how many pages were found.

    Raises:
        ConfigError: there is no store, or a living process has it open.
        OSError, lmdb.Error: the store is as it was, or has no index and can be rebuilt again.
    """
    directory = StoreDirectory(path)
    with directory.locked(create=False, segment_bytes=DEFAULT_SEGMENT_BYTES) as store_format:
        if _living(directory):
            raise ConfigError(f"{directory.path} is in use; stop the processes that have it open")
        return rebuild_index(directory, store_format)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[OpenStore]:
    directory = StoreDirectory(path)
    store = STORES.acquire(directory, create=False, segment_bytes=DEFAULT_SEGMENT_BYTES)
    try:
        yield store
    finally:
        STORES.release(store)


def _living(directory: StoreDirectory) -> list[bytes]:
    return [o for o in list_owners(directory.owners) if is_alive(directory.owners, o)]


def _items(txn: lmdb.Transaction[bytes], database: Any) -> Iterator[tuple[bytes, bytes]]:
    with txn.cursor(database) as cursor:
        yield from cursor


def _number(txn: lmdb.Transaction[bytes], dbs: Databases, counter: bytes) -> int:
    return int.from_bytes(txn.get(counter, b"", db=dbs.meta), "little")


def _summarize_namespace(
    txn: lmdb.Transaction[bytes], dbs: Databases, digest: bytes, record: NamespaceRecord
) -> NamespaceSummary:
    return NamespaceSummary(
        digest=digest,
        description=record.description,
        page_bytes=record.page_bytes,
        num_pages=_number(txn, dbs, pages_counter(record.namespace_id)),
    )


def _groups(store: OpenStore) -> Iterator[tuple[Group, GroupState]]:
    """Yield every sound group, looking up a few at a time."""
    dbs = store.index.dbs
    start = b"\x00"
    while True:
        found: list[tuple[Group, GroupState]] = []
        with store.index.read() as txn, txn.cursor(dbs.states) as cursor:
            more = cursor.set_range(start)
            for _ in range(_GROUPS_AT_ONCE):
                if not more:
                    break
                key, state = cursor.item()
                group = Group.decode(txn.get(key, b"", db=dbs.groups))
                if group is not None:
                    found.append((group, GroupState.decode(state)))
                start = GROUP_KEY.pack(GROUP_KEY.unpack(key)[0] + 1)
                more = cursor.next()
        yield from found
        if not more:
            return


def _stored_positions(group: Group, state: GroupState) -> list[int]:
    return [position for position in range(group.num_pages) if state.is_stored(position)]


def _page(store: OpenStore, group: Group, position: int, outcome: PageOutcome | None) -> StoredPage:
    segment, block, _ = group.layout.extents_of(position, 1)[0]
    return StoredPage(
        group.namespace_digest,
        PageHash(group.key(position)),
        group.page_bytes,
        store.segments.path(BlockKind.PAYLOAD, segment),
        block * BLOCK_BYTES,
        outcome,
    )


def _is_same(store: OpenStore, name: bytes, entry: PageEntry) -> bool:
    with store.index.read() as txn:
        return txn.get(name, db=store.index.dbs.pages) == entry.encode()
