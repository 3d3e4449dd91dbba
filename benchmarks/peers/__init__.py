"""Other systems that do the same work beside hicache, each in an environment of its own."""
