"""Copies between the device pool and the host pool, and the events of their layers."""

from hicache.transfer.layer_events import LayerDoneCounter, LayerLoadingEvent
from hicache.transfer.torch_engine import TorchTransferEngine, TransferEngine, TransferPlan

__all__ = [
    "LayerDoneCounter",
    "LayerLoadingEvent",
    "TorchTransferEngine",
    "TransferEngine",
    "TransferPlan",
]
