"""What hicache needs of an engine's own page allocator and device pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hicache.layout import PageGeometry
    from hicache.types import IntArray

__all__ = ["Allocator", "DevicePool", "LayerCounter", "ReportsLayerEnds"]


class Allocator(Protocol):
    """The free list of one pool. For a single owner thread."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, free or not."""

    @property
    def num_available(self) -> int:
        """Pages that `alloc` can give now."""

    def alloc(self, count: int) -> IntArray | None:
        """Give `count` pages to the caller, or none: `None` when fewer are free.

        Returns:
            An array of the caller's own, which shares memory with nothing.
        """

    def free(self, pages: IntArray) -> None:
        """Take pages back from the caller, all or none of them.

        Raises:
            OwnershipError: some of them are not the caller's to give back.
        """


class LayerCounter(Protocol):
    """What tells a device pool that a layer's bytes have arrived."""

    def wait_until(self, layer: int) -> None:
        """Make the model's computation wait for the loads of `layer` that concern it."""


class DevicePool(Protocol):
    """The tensors of a device's pool, as copy engines and the controller see them."""

    @property
    def geometry(self) -> PageGeometry:
        """What one page is."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors are."""

    def layer_parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return each part of a layer as a view `[num_pages, page_size, num_heads, dim]`.

        Never waits: it is for those who bring the bytes. Heads and elements of a token are
        contiguous.
        """

    def register_layer_transfer_counter(self, counter: LayerCounter | None) -> None:
        """Let every reader of a layer wait for `counter` first; `None` ends that."""


@runtime_checkable
class ReportsLayerEnds(Protocol):
    """What a device pool may offer besides, so that pages are written while a pass still runs."""

    def register_layer_end_notifier(self, notify: Callable[[int], None] | None) -> None:
        """Let `notify(layer)` be called when a pass has stored all it stores in a layer.

        `None` ends that. Called in the model's thread.
        """
