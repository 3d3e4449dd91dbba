"""What the device pools (L1) of all kinds of rows have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache.device.host_memory import available_host_memory_bytes
from hicache.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache.layout import PageGeometry
    from hicache.pools.base import LayerCounter

__all__ = ["DevicePages", "put_rows"]

_ALIGNMENT_BYTES = 4096


class DevicePages:
    """The rows of every layer for `num_pages` pages, zero at first; the base of device pools.

    Whoever reads a layer through a `get_*` method of a pool waits for that layer's loads first, as
    the registered counter says. `layer_parts` is for copy engines and does not wait.

    Args:
        geometry: what one page is.
        num_pages: size of the pool.
        torch_device: where the tensors live.

    Raises:
        ConfigError: `num_pages` is below 1.
        CapacityError: the device cannot give that much memory.
    """

    def __init__(
        self, geometry: PageGeometry, *, num_pages: int, torch_device: torch.device
    ) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {num_pages}")
        self.geometry = geometry
        self.num_pages = num_pages
        self.torch_device = torch_device
        pages = _zeros(geometry, num_pages, torch_device)
        # A view costs microseconds to make and the model asks for one per layer and step.
        self._layer_parts = [layer.unbind(0) for layer in pages.unbind(1)]
        self._layer_rows = [layer.unbind(0) for layer in pages.flatten(2, 3).unbind(1)]
        self._counter: LayerCounter | None = None
        self._notify_layer_end: Callable[[int], None] | None = None

    def register_layer_transfer_counter(self, counter: LayerCounter | None) -> None:
        """Let every reader of a layer wait for `counter` first; `None` ends that."""
        self._counter = counter

    def register_layer_end_notifier(self, notify: Callable[[int], None] | None) -> None:
        """See `hicache.pools.ReportsLayerEnds`; `end_layer` calls it."""
        self._notify_layer_end = notify

    def end_layer(self, layer: int) -> None:
        """Say that the pass has stored, or enqueued to store, all it stores in `layer`."""
        if self._notify_layer_end is not None:
            self._notify_layer_end(layer)

    def layer_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return each part of `layer` as a view `[num_pages, page_size, num_heads, dim]`.

        Never waits: it is for those who bring the bytes.
        """
        return self._layer_parts[layer]

    def _rows(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Wait for `layer`, then return each part as `[num_pages * page_size, num_heads, dim]`."""
        if self._counter is not None:
            self._counter.wait_until(layer)
        return self._layer_rows[layer]


def put_rows(target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy `rows[i]` to `target[slots[i]]`; `slots` are int64 on the same device, no two equal."""
    if target.element_size() == 1:
        # torch has no such copy of FP8 on a CPU.
        target, rows = target.view(torch.uint8), rows.view(torch.uint8)
    target.index_copy_(0, slots, rows)


def _zeros(geometry: PageGeometry, num_pages: int, torch_device: torch.device) -> torch.Tensor:
    """Return `[num_parts, num_layers, num_pages, page_size, num_heads, dim]`, all zero."""
    wanted_bytes = num_pages * geometry.page_bytes
    advice = "use fewer pages, or give the process more memory"
    # A CPU promises any amount and kills the process when it is used.
    if torch_device.type == "cpu" and wanted_bytes > (available := available_host_memory_bytes()):
        raise CapacityError(
            f"a device pool of {num_pages} pages needs {wanted_bytes} bytes, {available} are "
            f"available; {advice}"
        )
    shape = (
        geometry.num_parts,
        geometry.num_layers,
        num_pages,
        geometry.page_size,
        *geometry.row_shape,
    )
    dtype = getattr(torch, geometry.dtype)
    try:
        if torch_device.type == "cpu":
            pool = _huge_page_bytes(wanted_bytes).view(dtype).view(shape)
        else:
            pool = torch.empty(shape, dtype=dtype, device=torch_device)
        # Written now: zeros of the operating system would be paid for by the first requests.
        return pool.zero_()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(
            f"{torch_device} cannot give {wanted_bytes} bytes for a device pool of {num_pages} "
            f"pages ({error}); {advice}"
        ) from error


def _huge_page_bytes(num_bytes: int) -> torch.Tensor:
    """Return unwritten bytes, aligned to a small page, in huge pages where the kernel gives them.

    numpy asks for such and torch does not; copies are up to a third faster with them.
    """
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])
