"""The C code of the warm path (disttensor/dispatch/native.c), where there is a compiler; all else
stands in pyproject.toml."""

import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "disttensor/dispatch/native.c"
checksum = zlib.crc32((Path(__file__).parent / SOURCE).read_bytes())

setup(
    ext_modules=[
        Extension(
            "disttensor.dispatch._native",
            [SOURCE],
            define_macros=[("SOURCE", f'"{checksum:08x}"')],
            optional=True,
        )
    ]
)
