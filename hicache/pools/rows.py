"""A device pool of what a model keeps beside its KV, such as an indexer's keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache.pools.paged import DevicePages, put_rows

if TYPE_CHECKING:
    import torch

    from hicache.layout import RowGeometry

__all__ = ["DeviceRowPool"]


class DeviceRowPool(DevicePages):
    """A row for each layer and token; see `DevicePages` for who waits, the arguments and errors.

    A side pool: a page id of the KV pool names a page here too.
    """

    def __init__(
        self, geometry: RowGeometry, *, num_pages: int, torch_device: torch.device
    ) -> None:
        super().__init__(geometry, num_pages=num_pages, torch_device=torch_device)

    def get_row_buffer(self, layer: int) -> torch.Tensor:
        """Wait for `layer`, then return its rows `[num_pages * page_size, 1, width]`.

        Raises:
            TransferError: a load of the layer failed.
        """
        return self._rows(layer)[0]

    def set_row_buffer(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the rows of new tokens. Waits for nothing: their slots belong to the caller.

        Args:
            layer: which layer.
            slots: token slots, int64 `[num_tokens]` on the pool's device, no two equal.
            rows: `[num_tokens, 1, width]`, device and type of the pool.
        """
        put_rows(self._layer_rows[layer][0], slots, rows)
