"""Families of samples that differ in the value of one label."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["counter", "gauge"]


def counter(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    """Return a counter with a value for each value of a label."""
    family = CounterMetricFamily(f"hicache_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """Return a gauge with a value for each value of a label."""
    family = GaugeMetricFamily(f"hicache_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
