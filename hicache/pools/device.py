"""The device's KV pool (L1) of multi-head attention: what the model reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.pools.paged import DevicePages, put_rows

if TYPE_CHECKING:
    import torch

    from hicache.layout import KVGeometry

__all__ = ["DeviceKVPool"]


class DeviceKVPool(DevicePages):
    """K and V of every layer; see `DevicePages` for who waits, the arguments and the errors."""

    def __init__(self, geometry: KVGeometry, *, num_pages: int, torch_device: torch.device) -> None:
        super().__init__(geometry, num_pages=num_pages, torch_device=torch_device)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return its K `[num_pages * page_size, num_kv_heads, head_dim]`.

        Raises:
            TransferError: a load of the layer failed.
        """
        return self._rows(layer)[0]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return its V; else as `get_key_buffer`."""
        return self._rows(layer)[1]

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for `layer`, then return its K and V; else as `get_key_buffer`."""
        keys, values = self._rows(layer)
        return keys, values

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
        keys, values = self._layer_rows[layer]
        put_rows(keys, slots, k)
        put_rows(values, slots, v)

    def key_pages(self, layer: int) -> torch.Tensor:
        """Return the K of `layer` as `[num_pages, page_size, num_kv_heads, head_dim]`.

        Never waits: it is for those who bring the bytes.
        """
        return self._layer_parts[layer][0]

    def value_pages(self, layer: int) -> torch.Tensor:
        """Return the V of `layer`; else as `key_pages`."""
        return self._layer_parts[layer][1]
