"""The command `hicache storage`: looks into a page store, verifies it, repairs it, measures it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any

import lmdb

from hicache.errors import HiCacheError
from hicache.storage.page_store import (
    collect_garbage,
    list_pages,
    rebuild_store,
    summarize,
    verify_pages,
)
from hicache.tools.location import store_directory
from hicache.tools.storage_bench import bench_store
from hicache.types import PageOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from hicache.storage.page_store import NamespaceSummary, StoredPage, StoreSummary

__all__ = ["StorageAction", "StorageArguments", "run_storage"]

_NAMESPACE_DIGITS = 12
"""Hex digits of a digest that people are shown."""


class StorageAction(str, Enum):
    """What is to be done."""

    LS = "ls"
    STAT = "stat"
    VERIFY = "verify"
    GC = "gc"
    BENCH = "bench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageArguments:
    """What the command line asks for.

    Attributes:
        location: of the store, `DIRECTORY` or `file:DIRECTORY`.
        pages: `ls` lists pages, not namespaces.
        namespace: `ls` lists pages of namespaces whose digest begins so.
        repair: `verify` forgets what is damaged.
        rebuild: `verify` makes the index anew first.
        page_bytes, total_bytes, threads, direct_io: what `bench` measures.
        json_path: where the answer goes as JSON besides.
    """

    action: StorageAction
    location: str
    pages: bool = False
    namespace: str = ""
    repair: bool = False
    rebuild: bool = False
    page_bytes: int = 128 << 10
    total_bytes: int = 256 << 20
    threads: int = 1
    direct_io: bool = False
    json_path: Path | None = None


def run_storage(arguments: StorageArguments, *, write: Callable[[str], None]) -> int:
    """Carry out an action; what it found goes to `write`, in whole lines.

    Returns:
        The exit status: 0 done, 1 pages are damaged.

    Raises:
        HiCacheError: there is no such store, it is of another format, or it cannot be read.
    """
    directory = store_directory(arguments.location)

    def line(text: str) -> None:
        write(text + "\n")

    actions = {
        StorageAction.LS: _ls,
        StorageAction.STAT: _stat,
        StorageAction.VERIFY: _verify,
        StorageAction.GC: _gc,
        StorageAction.BENCH: _bench,
    }
    try:
        status, found = actions[arguments.action](directory, arguments, line)
    except (OSError, lmdb.Error) as error:
        raise HiCacheError(f"{directory}: {error}") from error
    if arguments.json_path is not None:
        arguments.json_path.parent.mkdir(parents=True, exist_ok=True)
        arguments.json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return status


def _ls(
    directory: str, arguments: StorageArguments, write: Callable[[str], None]
) -> tuple[int, object]:
    if not arguments.pages:
        summary = summarize(directory)
        namespaces = [one for one in summary.namespaces if one.num_pages]
        for namespace in namespaces:
            write(_namespace_line(namespace))
        if not namespaces:
            write("no page is stored here")
        return 0, [_namespace_json(one) for one in namespaces]
    found = []
    for page in list_pages(directory):
        if page.namespace_digest.hex().startswith(arguments.namespace):
            write(f"{page.key.hex()}  {page.num_bytes:>10}  {page.file}:{page.offset}")
            found.append(_page_json(page))
    return 0, found


def _stat(
    directory: str, arguments: StorageArguments, write: Callable[[str], None]
) -> tuple[int, object]:
    summary = summarize(directory)
    facts = _stat_json(summary)
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = _bytes(value) if name.endswith("_bytes") and isinstance(value, int) else value
        write(f"{name.ljust(width)}  {shown}")
    return 0, facts


def _verify(
    directory: str, arguments: StorageArguments, write: Callable[[str], None]
) -> tuple[int, object]:
    if arguments.rebuild:
        write(f"rebuilt the index: {rebuild_store(directory)} pages")
    total = sum(namespace.num_pages for namespace in summarize(directory).namespaces)
    outcomes: Counter[str] = Counter()
    damaged = []
    with _progress(verify_pages(directory, remove_damaged=arguments.repair), total) as pages:
        for page in pages:
            assert page.outcome is not None
            outcomes[page.outcome.value] += 1
            if page.outcome is not PageOutcome.OK:
                damaged.append(_page_json(page))
                write(f"{page.outcome.value}: {page.key.hex()} in {page.file} at {page.offset}")
    what = "forgotten; the next write of each repairs it" if arguments.repair else "damaged"
    write(f"{outcomes[PageOutcome.OK.value]} pages are sound, {len(damaged)} {what}")
    return int(bool(damaged)), {"outcomes": dict(outcomes), "damaged": damaged}


def _gc(
    directory: str, arguments: StorageArguments, write: Callable[[str], None]
) -> tuple[int, object]:
    report = collect_garbage(directory)
    write(
        f"gave back {_bytes(report.released_bytes)} to the file system; "
        f"{report.num_dead_owners} dead process(es) had space"
    )
    return 0, dataclasses.asdict(report)


def _bench(
    directory: str, arguments: StorageArguments, write: Callable[[str], None]
) -> tuple[int, object]:
    figures = bench_store(
        directory,
        page_bytes=arguments.page_bytes,
        total_bytes=arguments.total_bytes,
        num_threads=arguments.threads,
        direct_io=arguments.direct_io,
    )
    write(
        f"pages of {_bytes(arguments.page_bytes)}, {arguments.threads} thread(s), "
        f"{'direct I/O' if arguments.direct_io else 'page cache'}, every byte compared:"
    )
    write(f"  write   {figures.write_gb_per_s:8.2f} GB/s")
    write(f"  read    {figures.read_gb_per_s:8.2f} GB/s")
    write(f"  memcpy  {figures.memcpy_gb_per_s:8.2f} GB/s, of as many equal pieces")
    write(f"  exists  {figures.exists_us:8.1f} us for {figures.exists_keys} keys")
    return 0, dataclasses.asdict(figures)


@contextlib.contextmanager
def _progress(pages: Iterator[StoredPage], total: int) -> Iterator[Iterable[StoredPage]]:
    """Show a bar when a person is watching and tqdm is installed."""
    if not sys.stderr.isatty():
        yield pages
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield pages
        return
    with tqdm(pages, total=total, unit="page", leave=False) as bar:
        yield bar


def _namespace_line(namespace: NamespaceSummary) -> str:
    payload = namespace.num_pages * namespace.page_bytes
    named = namespace.description
    what = (
        f"{named['model']} {named['weights_revision']} {named['dtype']} {named['layout']} "
        f"page_size={named['page_size']} {named['shard']}"
        if named
        else "(described when an engine opens it)"
    )
    digest = namespace.digest.hex()[:_NAMESPACE_DIGITS]
    return f"{digest}  {namespace.num_pages:>9} pages  {_bytes(payload):>10}  {what}"


def _namespace_json(namespace: NamespaceSummary) -> dict[str, Any]:
    return {
        "digest": namespace.digest.hex(),
        "description": dict(namespace.description),
        "page_bytes": namespace.page_bytes,
        "num_pages": namespace.num_pages,
    }


def _page_json(page: StoredPage) -> dict[str, Any]:
    return {
        "namespace": page.namespace_digest.hex(),
        "key": page.key.hex(),
        "num_bytes": page.num_bytes,
        "file": page.file,
        "offset": page.offset,
        "outcome": None if page.outcome is None else page.outcome.value,
    }


def _stat_json(summary: StoreSummary) -> dict[str, Any]:
    payload = sum(one.num_pages * one.page_bytes for one in summary.namespaces)
    limits = summary.limits
    return {
        "path": summary.path,
        "format_version": summary.format_version,
        "num_namespaces": len(summary.namespaces),
        "num_pages": sum(one.num_pages for one in summary.namespaces),
        "payload_bytes": payload,
        "segment_bytes": summary.segment_bytes,
        "free_bytes": summary.free_bytes,
        "index_bytes": summary.index_bytes,
        "max_bytes": "nobody writes" if limits is None else limits.max_bytes,
        "min_free_bytes": "nobody writes" if limits is None else limits.min_free_bytes,
        "num_processes": summary.num_owners,
    }


def _bytes(count: int) -> str:
    """Say a number of bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB" if size < 1 << 20 else "unbounded"
