"""The device's KV pool (L1): what the model reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache.device.host_memory import available_host_memory_bytes
from hicache.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from hicache.layout import KVGeometry
    from hicache.pools.base import LayerCounter

__all__ = ["DeviceKVPool"]


class DeviceKVPool:
    """K and V of every layer for `num_pages` pages, zero at first.

    Whoever reads a layer through `get_*_buffer` waits for that layer's loads first, as the
    registered counter says. `key_pages` and `value_pages` are for copy engines and do not wait.

    Args:
        geometry: what one page is.
        num_pages: size of the pool.
        torch_device: where the tensors live.

    Raises:
        ConfigError: `num_pages` is below 1.
        CapacityError: the device cannot give that much memory.
    """

    def __init__(self, geometry: KVGeometry, *, num_pages: int, torch_device: torch.device) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages must be at least 1, not {num_pages}")
        self.geometry = geometry
        self.num_pages = num_pages
        self.torch_device = torch_device
        kv = _zeros(geometry, num_pages, torch_device)
        # A view costs microseconds to make and the model asks for one per layer and step.
        self._key_pages, self._value_pages = kv[0].unbind(0), kv[1].unbind(0)
        tokens = kv.flatten(2, 3)
        self._keys, self._values = tokens[0].unbind(0), tokens[1].unbind(0)
        self._counter: LayerCounter | None = None

    def register_layer_transfer_counter(self, counter: LayerCounter | None) -> None:
        """Let every reader of a layer wait for `counter` first; `None` ends that."""
        self._counter = counter

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return its K `[num_pages * page_size, num_kv_heads, head_dim]`.

        Raises:
            TransferError: a load of the layer failed.
        """
        self._wait(layer)
        return self._keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return its V; else as `get_key_buffer`."""
        self._wait(layer)
        return self._values[layer]

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for `layer`, then return its K and V; else as `get_key_buffer`."""
        self._wait(layer)
        return self._keys[layer], self._values[layer]

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store K and V of new tokens. Waits for nothing: their slots belong to the caller.

        Args:
            layer: which layer.
            slots: token slots, int64 `[num_tokens]` on the pool's device, no two equal.
            k: `[num_tokens, num_kv_heads, head_dim]`, device and type of the pool.
            v: as `k`.
        """
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

    def key_pages(self, layer: int) -> torch.Tensor:
        """Return the K of `layer` as `[num_pages, page_size, num_kv_heads, head_dim]`.

        Never waits: it is for those who bring the bytes.
        """
        return self._key_pages[layer]

    def value_pages(self, layer: int) -> torch.Tensor:
        """Return the V of `layer`; else as `key_pages`."""
        return self._value_pages[layer]

    def _wait(self, layer: int) -> None:
        if self._counter is not None:
            self._counter.wait_until(layer)


def _zeros(geometry: KVGeometry, num_pages: int, torch_device: torch.device) -> torch.Tensor:
    """Return `[2, num_layers, num_pages, page_size, num_kv_heads, head_dim]`, all zero."""
    wanted_bytes = num_pages * geometry.page_bytes
    advice = "use fewer pages, or give the process more memory"
    # A CPU promises any amount and kills the process when it is used.
    if torch_device.type == "cpu" and wanted_bytes > (available := available_host_memory_bytes()):
        raise CapacityError(
            f"a device pool of {num_pages} pages needs {wanted_bytes} bytes, {available} are "
            f"available; {advice}"
        )
    shape = (
        2,
        geometry.num_layers,
        num_pages,
        geometry.page_size,
        geometry.num_kv_heads,
        geometry.head_dim,
    )
    try:
        # Written now: zeros of the operating system would be paid for by the first requests.
        pool = torch.empty(shape, dtype=getattr(torch, geometry.dtype), device=torch_device)
        return pool.zero_()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"{torch_device} cannot give {wanted_bytes} bytes for a device pool of {num_pages} "
            f"pages ({error}); {advice}"
        ) from error
