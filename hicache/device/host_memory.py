"""Host memory for KV pages, and how much of it the machine can still give."""

from __future__ import annotations

import errno
import mmap
import resource
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hicache.errors import CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HUGE_PAGE_BYTES", "HostMemory", "available_host_memory_bytes"]

HUGE_PAGE_BYTES = 2 << 20

# Linux 5.14; the mmap module has no name for it.
_MADV_POPULATE_WRITE = 23


class HostMemory:
    """A region of zeroed memory, as one tensor.

    It starts on a 2 MiB boundary and is populated at construction, so that neither page faults nor
    a lack of memory come later, in the middle of a copy; this takes as long as writing the region
    once. On a kernel before 5.14 it is populated at first use. Allocation is all or nothing. For
    one owner, who closes it after the last copy.

    Args:
        num_bytes: size of the region.
        pinned: register the region with CUDA, so that the device copies from it directly.
        huge_pages: ask the kernel for 2 MiB pages.
        reserve_bytes: what must stay available to the rest of the machine; by default 1 GiB or a
            tenth of what is available, whichever is less.
        available_bytes: what the machine can give; measured by default.

    Attributes:
        address: where the region starts.
        num_bytes: size of the region.
        huge_pages: whether huge pages were asked for and the kernel took the advice.

    Raises:
        ConfigError: a size below 1, or `pinned` without CUDA.
        CapacityError: the machine cannot give that much.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        pinned: bool,
        huge_pages: bool,
        reserve_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        if num_bytes < 1:
            raise ConfigError(f"num_bytes must be at least 1, not {num_bytes}")
        if pinned and not torch.cuda.is_available():
            raise ConfigError("pinned memory needs a CUDA device; use pinned=False")
        region_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        _require_available(region_bytes, reserve_bytes, available_bytes)
        # A mapping starts on a small page: this much more always holds a boundary of 2 MiB.
        mapping = _map(region_bytes + HUGE_PAGE_BYTES - mmap.PAGESIZE)
        base = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        offset = -base % HUGE_PAGE_BYTES
        try:
            self.huge_pages = huge_pages and _advise_huge_pages(mapping, offset, region_bytes)
            _populate(mapping, offset, region_bytes)
            if pinned:
                _pin(base + offset, num_bytes)
        except BaseException:
            # The exception's traceback would keep the mapping for as long as somebody keeps it.
            mapping.close()
            raise
        self.address = base + offset
        self.num_bytes = num_bytes
        self._pinned = pinned
        self._tensor: torch.Tensor | None = torch.frombuffer(
            mapping, dtype=torch.uint8, offset=offset, count=num_bytes
        )

    @property
    def tensor(self) -> torch.Tensor:
        """The region as uint8 `[num_bytes]`; `ClosedError` once closed."""
        if self._tensor is None:
            raise ClosedError("this host memory is closed; allocate a new one")
        return self._tensor

    def close(self) -> None:
        """Unpin the region and give it back. Idempotent.

        Tensors over the region must not be used any more. Each keeps the mapping, so that a
        forgotten one reads stale bytes rather than unmapped addresses: the memory returns to the
        machine when the last of them is gone.
        """
        if self._tensor is None:
            return
        self._tensor = None
        if self._pinned:
            # It fails only when the CUDA context is lost, and with it every registration.
            _cudart().cudaHostUnregister(self.address)


def _require_available(
    wanted_bytes: int, reserve_bytes: int | None, available_bytes: int | None
) -> None:
    if available_bytes is None:
        available_bytes = available_host_memory_bytes()
    if reserve_bytes is None:
        reserve_bytes = min(1 << 30, available_bytes // 10)
    if wanted_bytes > available_bytes - reserve_bytes:
        raise CapacityError(
            f"{wanted_bytes} bytes of host memory wanted, {available_bytes} available of which "
            f"{reserve_bytes} are to stay free; make the host pool smaller, or raise the limit of "
            "the machine or container"
        )


def _map(num_bytes: int) -> mmap.mmap:
    try:
        # Private: the kernel gives huge pages to shared mappings only by a system-wide setting.
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"the kernel refused to map {num_bytes} bytes ({error}); make the host pool smaller"
        ) from error


def _advise_huge_pages(mapping: mmap.mmap, offset: int, num_bytes: int) -> bool:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes)
    except OSError:
        return False
    return True


def _populate(mapping: mmap.mmap, offset: int, num_bytes: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, offset, num_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise CapacityError(
                f"the kernel could not populate {num_bytes} bytes ({error}); "
                "make the host pool smaller"
            ) from error


def _pin(address: int, num_bytes: int) -> None:
    cudart = _cudart()
    status = cudart.cudaHostRegister(address, num_bytes, 0)
    if status != cudart.cudaError.success:
        raise CapacityError(
            f"CUDA could not pin {num_bytes} bytes ({status}); make the host pool smaller or use "
            "pinned=False"
        )


def _cudart() -> Any:
    """Return the CUDA runtime's functions, which torch does not annotate."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def available_host_memory_bytes(root: Path = Path("/")) -> int:
    """Return how many bytes this process can still allocate without swapping or being killed.

    The least of what the machine has available, of what the control groups around the process
    leave it (v1 and v2, page cache counted as free where the kernel would reclaim it first) and of
    its address space limit.

    Args:
        root: where `proc` and `sys` are mounted.

    Raises:
        CapacityError: nothing of this can be read.
    """
    headrooms = [*_machine_headroom(root), *_cgroup_headrooms(root), *_address_space_headroom(root)]
    if not headrooms:
        raise CapacityError(
            f"cannot tell how much memory is available: {root / 'proc/meminfo'} is not readable; "
            "pass available_bytes"
        )
    return max(0, min(headrooms))


def _machine_headroom(root: Path) -> Iterator[int]:
    kilobytes = _read_field(root / "proc/meminfo", "MemAvailable:")
    if kilobytes is not None:
        yield kilobytes * 1024


class _CgroupFiles(NamedTuple):
    mount: str
    limit: str
    usage: str
    reclaimable: str


_CGROUP_V1 = _CgroupFiles(
    "sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_CGROUP_V2 = _CgroupFiles(
    "sys/fs/cgroup", limit="memory.max", usage="memory.current", reclaimable="inactive_file"
)


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Yield what each limited group leaves, from the process's own group up to the top."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            files = _CGROUP_V2
        elif "memory" in controllers.split(","):
            files = _CGROUP_V1
        else:
            continue
        # Inside a container the named group may not be visible; then the walk up finds the
        # container's own at the mount.
        path = PurePosixPath(group)
        for level in (path, *path.parents):
            directory = root / files.mount / level.relative_to("/")
            limit = _read_int(directory / files.limit)
            usage = _read_int(directory / files.usage)
            if limit is not None and usage is not None:
                cache = _read_field(directory / "memory.stat", files.reclaimable) or 0
                yield limit - (usage - cache)


def _address_space_headroom(root: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used_pages = _read(root / "proc/self/statm").split()[:1]
    if limit != resource.RLIM_INFINITY and used_pages:
        yield limit - int(used_pages[0]) * mmap.PAGESIZE


def _read(path: Path) -> str:
    """Return the text of a kernel file, empty when this machine does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read_field(path: Path, field: str) -> int | None:
    for line in _read(path).splitlines():
        words = line.split()
        if words[:1] == [field]:
            return int(words[1])
    return None
