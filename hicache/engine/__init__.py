"""The reference engine: the smallest real consumer of the cache."""
