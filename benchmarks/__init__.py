"""The benchmark suite: `python -m benchmarks NAME`.

Every module here that defines

    def steps(*, quick: bool, peers: frozenset[str]) -> Sequence[Step]

is the benchmark of its name, and the first line of its docstring is what `--help` says about it.
Adding a benchmark is adding such a module; there is no list to keep.
"""
