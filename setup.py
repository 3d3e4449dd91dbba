"""The native part of the package; all else is said in pyproject.toml."""

from __future__ import annotations

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "hicache.storage._page_io",
            [
                "native/page_io.c",
                "native/page_mapping.c",
                "native/page_queue.c",
                "native/page_stream.c",
            ],
            depends=["native/page_mapping.h", "native/page_queue.h", "native/page_stream.h"],
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
            libraries=["dl"],
            # Without a compiler the same is done in Python, slower.
            optional=True,
        )
    ]
)
