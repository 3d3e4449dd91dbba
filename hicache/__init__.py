"""hicache: a hierarchical KV cache for LLM serving.

One radix tree over the engine's device pool (L1), host memory (L2) and pluggable storage (L3).
Start at `hicache.hiradix_cache.HiRadixCache`, which a scheduler talks to, and at
`docs/architecture.md`, which says what each package is for.
"""

__version__ = "0.1.0"
