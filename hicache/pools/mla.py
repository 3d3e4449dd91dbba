"""The device's KV pool (L1) of multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.pools.paged import DevicePages, put_rows

if TYPE_CHECKING:
    import torch

    from hicache.layout import MlaGeometry

__all__ = ["DeviceMlaPool"]


class DeviceMlaPool(DevicePages):
    """The latent rows of every layer; see `DevicePages` for who waits, the arguments and errors.

    A row is the key of a token, its head is the value: the latent, then the rotated key.
    """

    def __init__(
        self, geometry: MlaGeometry, *, num_pages: int, torch_device: torch.device
    ) -> None:
        super().__init__(geometry, num_pages=num_pages, torch_device=torch_device)
        rank = geometry.kv_lora_rank
        self._latents = [rows[..., :rank] for (rows,) in self._layer_rows]
        self._rope_keys = [rows[..., rank:] for (rows,) in self._layer_rows]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return its rows.

        Returns:
            `[num_pages * page_size, 1, kv_lora_rank + qk_rope_head_dim]`.

        Raises:
            TransferError: a load of the layer failed.
        """
        return self._rows(layer)[0]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return the latents of its rows, a view.

        Returns:
            `[num_pages * page_size, 1, kv_lora_rank]`.

        Raises:
            TransferError: a load of the layer failed.
        """
        self._rows(layer)
        return self._latents[layer]

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor
    ) -> None:
        """Store the rows of new tokens. Waits for nothing: their slots belong to the caller.

        Args:
            layer: which layer.
            slots: token slots, int64 `[num_tokens]` on the pool's device, no two equal.
            latent: `[num_tokens, 1, kv_lora_rank]`, device and type of the pool.
            rope_key: `[num_tokens, 1, qk_rope_head_dim]`, the same.
        """
        put_rows(self._latents[layer], slots, latent)
        put_rows(self._rope_keys[layer], slots, rope_key)
