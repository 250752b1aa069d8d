"""The command line of the fuzzers."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.support import pool


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


def tell(progress: str, number: int) -> None:
    """Which one runs, into the file ``progress``."""
    if progress and dist.get_rank() == 0:
        Path(progress).write_text(str(number))


def each_on_ranks(
    world: int, run: Callable[..., list[str]], cases: Sequence[Any], timeout: float, *more: Any
) -> int:
    """How many of the cases fail; each is printed. ``run(cases, progress, *more)``, on the ranks,
    gives reports of those that do; what ends or hangs the ranks is the one that ran last."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/case"
        while cases:
            part, cases = cases[:20], cases[20:]
            try:
                reports = pool.run_on_ranks(world, run, part, file, *more, timeout=timeout)[0]
            except pool.RanksFailed as error:
                at = int(Path(file).read_text())
                cases = [*part[:at], *part[at + 1 :], *cases]  # what those before it said is lost
                reports = [f"{part[at]}\n{str(error)[:6000]}\n"]
            failed += len(reports)
            for text in reports:
                print(text, flush=True)
    pool.stop()
    return failed
