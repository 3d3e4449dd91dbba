"""Where bytes and work live: streams, events and host memory.

A stream runs work in order; an event marks a place in that order; host memory is the region that
the host pool is cut from. `create_device` chooses between a CPU, whose streams are worker threads,
and CUDA. `SimulatedDevice` runs only when it is told to, so that a test decides the interleaving.
"""

from __future__ import annotations

from hicache.device.base import Device, Event, Stream, Work
from hicache.device.factory import create_device
from hicache.device.host_memory import HostMemory, available_host_memory_bytes
from hicache.device.simulated import SimulatedDevice

__all__ = [
    "Device",
    "Event",
    "HostMemory",
    "SimulatedDevice",
    "Stream",
    "Work",
    "available_host_memory_bytes",
    "create_device",
]
