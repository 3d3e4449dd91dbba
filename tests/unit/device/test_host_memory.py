"""Host memory is what was asked for or nothing, and goes back completely."""

from __future__ import annotations

import errno
import mmap
import resource
from pathlib import Path

import pytest
import torch

from hicache.device.host_memory import (
    HUGE_PAGE_BYTES,
    HostMemory,
    available_host_memory_bytes,
)
from hicache.errors import CapacityError, ClosedError, ConfigError

MIB = 1 << 20
GIB = 1 << 30
LARGE = 256 * MIB


def mapped_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * mmap.PAGESIZE


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


@pytest.mark.parametrize("num_bytes", [1, 4097, 2 * MIB, 3 * MIB + 5])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_the_region_is_aligned_zeroed_writable_and_of_the_size_asked(
    num_bytes: int, huge_pages: bool
) -> None:
    memory = HostMemory(num_bytes, pinned=False, huge_pages=huge_pages)
    tensor = memory.tensor
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (num_bytes,)
    assert memory.num_bytes == num_bytes
    assert memory.address == tensor.data_ptr()
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert not tensor.any()
    tensor.fill_(0xA5)
    assert int(memory.tensor[-1]) == 0xA5
    assert huge_pages or not memory.huge_pages
    memory.close()


def test_the_region_is_populated_at_construction() -> None:
    before = resident_bytes()
    memory = HostMemory(64 * MIB, pinned=False, huge_pages=False)
    assert resident_bytes() - before >= 60 * MIB
    memory.close()


def test_close_is_idempotent_and_returns_the_memory_when_no_tensor_is_left() -> None:
    before = mapped_bytes()
    memory = HostMemory(64 * MIB, pinned=False, huge_pages=True)
    view = memory.tensor[:16].fill_(9)
    memory.close()
    memory.close()
    with pytest.raises(ClosedError, match="closed"):
        _ = memory.tensor
    assert view.tolist() == [9] * 16
    assert mapped_bytes() - before >= 64 * MIB
    del view
    assert mapped_bytes() - before < 32 * MIB


def test_more_than_available_is_refused_with_both_numbers() -> None:
    before = mapped_bytes()
    with pytest.raises(CapacityError, match=f"{LARGE} bytes .* {LARGE} available of which 4096"):
        HostMemory(LARGE, pinned=False, huge_pages=False, reserve_bytes=4096, available_bytes=LARGE)
    assert mapped_bytes() - before < LARGE // 2


def test_a_mapping_that_the_kernel_refuses_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="refused to map"):
        HostMemory(1 << 50, pinned=False, huge_pages=False, available_bytes=1 << 60)


class OldKernel(mmap.mmap):
    """A kernel that knows neither advice."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


class FullKernel(mmap.mmap):
    """A kernel that runs out of memory while it populates."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_the_reserve_is_a_tenth_and_at_most_one_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)

    def refused_for_the_reserve(num_bytes: int, available_bytes: int) -> bool:
        try:
            HostMemory(num_bytes, pinned=False, huge_pages=False, available_bytes=available_bytes)
        except CapacityError as error:  # a small machine may refuse to map the largest
            return "to stay free" in str(error)
        return False

    assert not refused_for_the_reserve(18 * MIB, 20 * MIB)
    assert refused_for_the_reserve(18 * MIB + 1, 20 * MIB)
    assert not refused_for_the_reserve(99 * GIB, 100 * GIB)
    assert refused_for_the_reserve(99 * GIB + 1, 100 * GIB)


def test_a_kernel_without_the_advices_gives_plain_lazy_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    memory = HostMemory(4 * MIB, pinned=False, huge_pages=True)
    assert not memory.huge_pages
    assert not memory.tensor.any()
    memory.close()


def test_a_failure_half_way_leaves_nothing_mapped_though_the_error_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mmap, "mmap", FullKernel)
    before = mapped_bytes()
    with pytest.raises(CapacityError, match="could not populate") as kept:
        HostMemory(LARGE, pinned=False, huge_pages=True)
    assert mapped_bytes() - before < LARGE // 2
    assert kept.value.__traceback__ is not None


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_bytes"):
        HostMemory(0, pinned=False, huge_pages=False)


def test_pinned_memory_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="pinned=False"):
        HostMemory(4096, pinned=True, huge_pages=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_pinned_until_closed() -> None:
    memory = HostMemory(4 * MIB, pinned=True, huge_pages=True)
    tensor = memory.tensor
    assert tensor.is_pinned()
    memory.close()
    assert not tensor.is_pinned()


class Machine:
    """A made-up `/proc` and `/sys`."""

    def __init__(self, root: Path, *, available_bytes: int, cgroup: str) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:  {available_bytes // 1024} kB\n")
        self.write("proc/self/cgroup", cgroup)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group_v2(self, group: str, *, limit: object, used: int, cache: int = 0) -> None:
        self.write(f"sys/fs/cgroup{group}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup{group}/memory.current", f"{used}\n")
        self.write(f"sys/fs/cgroup{group}/memory.stat", f"anon 1\ninactive_file {cache}\n")

    def group_v1(self, group: str, *, limit: int, used: int, cache: int = 0) -> None:
        self.write(f"sys/fs/cgroup/memory{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory{group}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"sys/fs/cgroup/memory{group}/memory.stat", f"total_inactive_file {cache}\n")

    def available(self) -> int:
        return available_host_memory_bytes(self.root)


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=8 * GIB, cgroup="0::/a\n")
    assert machine.available() == 8 * GIB
    machine.group_v2("/a", limit="max", used=GIB)
    assert machine.available() == 8 * GIB


def test_the_tightest_v2_group_on_the_way_up_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=8 * GIB, cgroup="0::/a/b/c\n")
    machine.group_v2("/a/b/c", limit=6 * GIB, used=GIB)
    assert machine.available() == 5 * GIB
    machine.group_v2("/a/b", limit="max", used=3 * GIB)
    machine.group_v2("/a", limit=7 * GIB, used=4 * GIB)
    assert machine.available() == 3 * GIB


def test_the_v1_memory_group_counts_and_other_controllers_do_not(tmp_path: Path) -> None:
    cgroup = "9:cpu,cpuacct:/x\n4:hugetlb,memory:/jobs/one\n1:name=systemd:/y\n0::/\n"
    machine = Machine(tmp_path, available_bytes=8 * GIB, cgroup=cgroup)
    machine.group_v1("/x", limit=1, used=0)
    machine.group_v1("/jobs/one", limit=4 * GIB, used=GIB)
    machine.group_v1("", limit=0x7FFFFFFFFFFFF000, used=GIB)
    assert machine.available() == 3 * GIB


def test_page_cache_that_the_kernel_would_reclaim_counts_as_available(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "v2", available_bytes=8 * GIB, cgroup="0::/a\n")
    machine.group_v2("/a", limit=4 * GIB, used=3 * GIB, cache=2 * GIB)
    assert machine.available() == 3 * GIB
    machine = Machine(tmp_path / "v1", available_bytes=8 * GIB, cgroup="4:memory:/a\n")
    machine.group_v1("/a", limit=4 * GIB, used=3 * GIB, cache=2 * GIB)
    assert machine.available() == 3 * GIB


def test_in_a_container_whose_group_is_not_visible_the_mounted_one_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=8 * GIB, cgroup="4:memory:/docker/0123\n")
    machine.group_v1("", limit=2 * GIB, used=GIB)
    assert machine.available() == GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_bytes=8 * GIB, cgroup="0::/\n")
    machine.group_v2("", limit=GIB, used=2 * GIB)
    assert machine.available() == 0


def test_the_address_space_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, available_bytes=8 * GIB, cgroup="")
    machine.write("proc/self/statm", f"{GIB // mmap.PAGESIZE} 5 5 5 0 5 0\n")
    assert machine.available() == 8 * GIB
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GIB, resource.RLIM_INFINITY))
    assert machine.available() == 2 * GIB


def test_a_machine_that_tells_nothing_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="pass available_bytes"):
        available_host_memory_bytes(tmp_path)


def test_this_machine_has_some_memory_but_not_more_than_all() -> None:
    total_kilobytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < available_host_memory_bytes() <= total_kilobytes * 1024
