"""A whole rank with injected faults on simulated time: from a seed, with every step checked."""

from hicache.sim.simulation import COVERING_STEPS, Failure, Report, simulate

__all__ = ["COVERING_STEPS", "Failure", "Report", "simulate"]
