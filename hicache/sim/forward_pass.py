"""A forward pass over some requests that can stand still before, between and behind its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache.errors import InvariantViolation
from hicache.sim.options import GEOMETRY
from hicache.sim.request import NO_PRODUCER
from hicache.sim.stamps import POISON_ROW

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from hicache.sim.request import Request
    from hicache.sim.system import System
    from hicache.types import IntArray

__all__ = ["Chunk", "ForwardPass"]


class Chunk(NamedTuple):
    """Pages `[first_page, last_page)` of a request, which a pass computes."""

    request: Request
    first_page: int
    last_page: int

    @property
    def pages(self) -> IntArray:
        """Its device pages."""
        return self.request.pages[self.first_page : self.last_page]


class ForwardPass:
    """Computes chunks layer by layer, each layer behind the loads that the chunks wait for.

    Args:
        system: where the pages are.
        chunks: at most one for each request.
        silent_layers: that end without the pool being told.

    Attributes:
        chunks: of requests that have neither left nor been inserted.
        num_layers_done: layers of which the pages hold their bytes; of the others they hold what
            they were poisoned with.
    """

    def __init__(
        self, system: System, chunks: Sequence[Chunk], *, silent_layers: Collection[int]
    ) -> None:
        self._system = system
        self._silent_layers = silent_layers
        self.chunks = list(chunks)
        self.num_layers_done = 0
        self._wrong: list[str] = []

    @property
    def computed(self) -> bool:
        """Whether all layers are done."""
        return self.num_layers_done == GEOMETRY.num_layers

    def end_of(self, request: Request) -> int:
        """Return where the chunk of a request ends; 0 when it has none."""
        return next((one.last_page for one in self.chunks if one.request is request), 0)

    def leave(self, request: Request) -> None:
        """Go on without a request; no effect when it has no chunk."""
        self.chunks = [one for one in self.chunks if one.request is not request]

    def compute_layer(self) -> None:
        """Compute the next layer of every chunk.

        Raises:
            TransferError: a load has failed here.
        """
        layer, system = self.num_layers_done, self._system
        self._await_loads(layer)
        for request, first, last in self.chunks:
            rows = system.stamps.rows(request.key)[first:last]
            system.device_bytes.put(request.pages[first:last], rows, layer=layer)
        self.num_layers_done += 1
        if layer not in self._silent_layers:
            system.end_layer(layer)

    def end_loads(self) -> None:
        """After the last layer, note that nobody waits for the loads of these requests any more.

        Raises:
            InvariantViolation: one had not arrived when it was waited for.
        """
        if not self.computed:
            return
        # Only now: a load of whose layers one has failed, on any rank, may be gone altogether.
        if self._wrong:
            raise InvariantViolation(self._wrong)
        for request, _, _ in self.chunks:
            request.load_first_page, request.producer = None, NO_PRODUCER

    def known_pages(self) -> Iterator[tuple[int, IntArray, list[int]]]:
        """Yield layers with pages of a chunk and the row of what each has to hold in the layer."""
        for chunk in self.chunks:
            rows = self._system.stamps.rows(chunk.request.key)[chunk.first_page : chunk.last_page]
            for layer in range(GEOMETRY.num_layers):
                is_done = layer < self.num_layers_done
                yield layer, chunk.pages, rows if is_done else [POISON_ROW] * len(rows)

    def _await_loads(self, layer: int) -> None:
        """Wait for `layer` of the loads as a model does, and look at what they have brought."""
        system = self._system
        loading = [one.request for one in self.chunks if one.request.load_first_page is not None]
        if not loading:
            return
        system.counter.set_consumer(sorted({request.producer for request in loading}))
        system.await_layer(layer)
        for request in loading:
            loaded = slice(request.load_first_page, request.num_tree_pages)
            rows = system.stamps.rows(request.key)[loaded]
            if system.device_bytes.wrong(request.pages[loaded], rows, layer=layer):
                text = f"layer {layer} of a load had not arrived when it was waited for"
                self._wrong.append(text)
