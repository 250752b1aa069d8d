"""The command line of the fuzzers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


def fuzz(about: str | None, what: str, main: Callable[[int, int, int], int]) -> NoReturn:
    """The command line of a fuzzer: ``main(first, last, world)`` says how many seeds fail."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", default="0:100")
    parser.add_argument("--world", type=int, default=2)
    options = parser.parse_args()
    start, end = map(int, options.seeds.split(":"))
    count = main(start, end, options.world)
    print(f"{end - start} {what}, {count} fail")
    raise SystemExit(bool(count))
