"""A simulated device whose streams can be found by name and held up."""

from __future__ import annotations

from hicache.device.simulated import SimulatedDevice, SimulatedStream

__all__ = ["NamedStreams"]


class NamedStreams(SimulatedDevice):
    """See `SimulatedDevice`.

    Attributes:
        streams: every stream by its name.
        stalled: names of streams that stand still, unless somebody waits for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, SimulatedStream] = {}
        self.stalled: set[str] = set()

    def create_stream(self, name: str) -> SimulatedStream:
        """See `Device.create_stream`."""
        stream = self.streams[name] = super().create_stream(name)
        return stream

    def can_run(self, name: str) -> bool:
        """Whether the stream has work that may run now."""
        return name not in self.stalled and self.streams[name].runnable
