"""Copies between the device pool and the host pool with torch alone: correct on every device.

On a CPU a run of pages goes as one copy, and pages that stand alone go through a small buffer, a
batch at a time: one call gathers a batch and one scatters it, where a call per page would spend
its time in Python and hold the interpreter lock that the scheduler needs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from hicache.errors import ConfigError, OwnershipError, TransferError

if TYPE_CHECKING:
    from hicache.pools.base import DevicePool
    from hicache.pools.host import HostKVPool
    from hicache.types import IntArray

__all__ = ["PageRun", "TorchTransferEngine", "TransferEngine", "TransferPlan"]

_DIRECT_COPY_BYTES = 32 << 10
"""On a CPU, from here on a run is copied on its own. Below, the microseconds of Python that each
copy costs outweigh moving its bytes twice."""

_QUEUED_COPY_BYTES = 4 << 10
"""The same on CUDA, where a run that is not copied on its own blocks, and is moved three times."""


class PageRun(NamedTuple):
    """Pages that are consecutive on the device and on the host."""

    device: slice
    host: slice


@dataclasses.dataclass(frozen=True, eq=False)
class TransferPlan:
    """Which pages of the two pools belong together, prepared once for the copies of all layers.

    Independent of the arrays it was made from. It does not own the pages.

    Attributes:
        device_pages: pages of the device pool, in the order of `host_pages`; read-only.
        host_pages: their partners in the host pool, ascending; read-only.
        runs: the longest stretches that are consecutive on both sides, if worth a copy of their
            own.
        scattered_device: device pages outside `runs`, int64 on the CPU.
        scattered_host: their partners.
    """

    device_pages: IntArray
    host_pages: IntArray
    runs: tuple[PageRun, ...]
    scattered_device: torch.Tensor
    scattered_host: torch.Tensor

    @classmethod
    def pair(
        cls, device_pages: IntArray, host_pages: IntArray, *, min_run_pages: int
    ) -> TransferPlan:
        """Pair `device_pages[i]` with `host_pages[i]`; a run has at least `min_run_pages`.

        Raises:
            TransferError: the lengths differ, or a page comes twice.
        """
        if len(device_pages) != len(host_pages):
            raise TransferError(
                f"{len(device_pages)} device pages for {len(host_pages)} host pages; "
                "give one for each"
            )
        # Copies of distinct pages may run in any order: take the one that shows the most runs.
        order = np.argsort(host_pages)
        device, host = device_pages[order], host_pages[order]
        _require_distinct(np.sort(device), "device")
        _require_distinct(host, "host")
        device.setflags(write=False)
        host.setflags(write=False)
        starts_run = np.ones(len(host), dtype=np.bool_)
        starts_run[1:] = (np.diff(device) != 1) | (np.diff(host) != 1)
        starts = np.flatnonzero(starts_run)
        lengths = np.diff(starts, append=len(host))
        is_long = lengths >= min_run_pages
        long = starts[is_long]
        runs = zip(
            device[long].tolist(), host[long].tolist(), lengths[is_long].tolist(), strict=True
        )
        is_scattered = np.repeat(~is_long, lengths)
        return cls(
            device_pages=device,
            host_pages=host,
            runs=tuple(PageRun(slice(d, d + n), slice(h, h + n)) for d, h, n in runs),
            scattered_device=torch.from_numpy(device[is_scattered]),
            scattered_host=torch.from_numpy(host[is_scattered]),
        )


class TransferEngine(Protocol):
    """Copies one layer of many pages between a device pool and a host pool.

    Called on a stream, whose order the copies keep. One write and one load may run at the same
    time; two writes or two loads may not.
    """

    @property
    def num_layers(self) -> int:
        """Layers of both pools."""

    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        """Prepare copies between `device_pages[i]` and `host_pages[i]`, in either direction.

        Raises:
            OwnershipError: a page is not in its pool.
            TransferError: the lengths differ, or a page comes twice.
        """

    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        """Copy all parts of `layer` from the device to the host."""

    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        """Copy all parts of `layer` from the host to the device."""

    def layer_bytes(self, plan: TransferPlan) -> int:
        """Return how many bytes one `write_layer` or `load_layer` moves."""


class TorchTransferEngine:
    """The `TransferEngine` that needs nothing but torch; works in the calling thread.

    On a CPU a copy has ended when the call returns. On CUDA, runs of at least 4 KiB between the
    device and pinned `layer_first` memory are queued on the current stream; all else blocks too.

    Args:
        device_pool: one side.
        host_pool: the other side, of the same geometry.
        staging_bytes: size of the buffer for scattered pages, one for each direction; at least one
            page of one layer is taken.

    Raises:
        ConfigError: the pools differ in geometry.
    """

    def __init__(
        self, device_pool: DevicePool, host_pool: HostKVPool, *, staging_bytes: int = 1 << 20
    ) -> None:
        self._geometry = geometry = host_pool.geometry
        if device_pool.geometry != geometry:
            raise ConfigError(
                f"device pool and host pool differ: {device_pool.geometry} and {geometry}; "
                "build both from one geometry"
            )
        self._num_device_pages = device_pool.num_pages
        self._num_host_pages = host_pool.num_pages
        self._layers = [
            _layer_views(device_pool, host_pool, layer) for layer in range(geometry.num_layers)
        ]
        device, host = self._layers[0][0]
        self._non_blocking = device.is_cuda and host.is_pinned()
        self._min_run_pages = _min_run_pages(device, host)
        num_pages = max(1, staging_bytes // geometry.page_layer_bytes)
        self._write_staging = _staging(device, host, num_pages)
        self._load_staging = _staging(host, device, num_pages)

    @property
    def num_layers(self) -> int:
        """Layers of both pools."""
        return self._geometry.num_layers

    def plan(self, device_pages: IntArray, host_pages: IntArray) -> TransferPlan:
        """See `TransferEngine.plan`."""
        _require_inside(device_pages, self._num_device_pages, "device")
        _require_inside(host_pages, self._num_host_pages, "host")
        return TransferPlan.pair(device_pages, host_pages, min_run_pages=self._min_run_pages)

    def write_layer(self, plan: TransferPlan, layer: int) -> None:
        """See `TransferEngine.write_layer`."""
        for device, host in self._layers[layer]:
            for run in plan.runs:
                host[run.host].copy_(device[run.device], non_blocking=self._non_blocking)
            _copy_scattered(
                device, plan.scattered_device, host, plan.scattered_host, self._write_staging
            )

    def load_layer(self, plan: TransferPlan, layer: int) -> None:
        """See `TransferEngine.load_layer`."""
        for device, host in self._layers[layer]:
            for run in plan.runs:
                device[run.device].copy_(host[run.host], non_blocking=self._non_blocking)
            _copy_scattered(
                host, plan.scattered_host, device, plan.scattered_device, self._load_staging
            )

    def layer_bytes(self, plan: TransferPlan) -> int:
        """See `TransferEngine.layer_bytes`."""
        return self._geometry.num_parts * len(plan.host_pages) * self._geometry.page_layer_bytes


class _Views(NamedTuple):
    """A part of one layer, both sides as `[num_pages, page_size, words of a row]`.

    Where one side keeps the heads of a token apart, it is `[num_pages, page_size, num_heads, words
    of a head]` on both.
    """

    device: torch.Tensor
    host: torch.Tensor


class _Staging(NamedTuple):
    """Buffers shaped as the views of a batch of pages; one tensor if both sides are one."""

    source: torch.Tensor
    target: torch.Tensor


def _layer_views(device_pool: DevicePool, host_pool: HostKVPool, layer: int) -> list[_Views]:
    return [
        _Views(*map(_as_words, _with_equal_axes(device, host)))
        for device, host in zip(
            device_pool.layer_parts(layer), host_pool.layer_parts(layer), strict=True
        )
    ]


def _with_equal_axes(device: torch.Tensor, host: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join heads and elements of a token to a row, where both sides have them in one piece."""
    if device[0, 0].is_contiguous() and host[0, 0].is_contiguous():
        return device.view(*device.shape[:2], -1), host.view(*host.shape[:2], -1)
    return device, host


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """View the last axis as int32 where it divides into such, else FP8 as bytes.

    torch scatters 16-bit types slower, and FP8 not at all.
    """
    word_bytes = rows.shape[-1] * rows.element_size()
    if word_bytes % torch.int32.itemsize == 0:
        return rows.view(torch.int32)
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _min_run_pages(device: torch.Tensor, host: torch.Tensor) -> int:
    """Return from how many pages on a run is copied on its own."""
    if device.is_cuda and not host.is_contiguous():
        # Strided memory torch would copy through temporaries as large as the run.
        return len(host) + 1
    run_bytes = _QUEUED_COPY_BYTES if device.is_cuda else _DIRECT_COPY_BYTES
    return -(-run_bytes // (device[0].numel() * device.element_size()))


def _staging(source: torch.Tensor, target: torch.Tensor, num_pages: int) -> _Staging:
    shape = (num_pages, *source.shape[1:])
    if source.device == target.device:
        buffer = torch.empty(shape, dtype=source.dtype, device=source.device)
        return _Staging(buffer, buffer)
    return _Staging(
        *(
            torch.empty(shape, dtype=side.dtype, device=side.device, pin_memory=not side.is_cuda)
            for side in (source, target)
        )
    )


def _copy_scattered(
    source: torch.Tensor,
    source_pages: torch.Tensor,
    target: torch.Tensor,
    target_pages: torch.Tensor,
    staging: _Staging,
) -> None:
    batch_pages = len(staging.source)
    for start in range(0, len(source_pages), batch_pages):
        batch = slice(start, start + batch_pages)
        source_batch = source_pages[batch].to(source.device)
        near, far = (buffer[: len(source_batch)] for buffer in staging)
        torch.index_select(source, 0, source_batch, out=near)
        if staging.source is not staging.target:
            # Blocks: the host reads what arrived, or reuses what was sent, right after.
            far.copy_(near)
        target.index_copy_(0, target_pages[batch].to(target.device), far)


def _require_inside(pages: IntArray, num_pages: int, side: str) -> None:
    foreign = pages[(pages < 0) | (pages >= num_pages)]
    if len(foreign):
        raise OwnershipError(
            f"{len(foreign)} pages are not in the {side} pool of {num_pages}, such as "
            f"{foreign[0]}; pages count from 0"
        )


def _require_distinct(ascending: IntArray, side: str) -> None:
    twice = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(twice):
        raise TransferError(
            f"{side} page {twice[0]} comes twice in one copy; give each page one partner"
        )
