"""The command line of the fuzzers."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from tests.support import pool

T = TypeVar("T")


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


def shrunk(case: T, simpler: Callable[[T], Iterable[T]], fails: Callable[[T], Any]) -> T:
    """Returns a case that fails too, and is simpler, as far as one change at a time goes."""
    progress = True
    while progress:
        progress = False
        for smaller in simpler(case):
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def each_seed(
    seeds: Iterable[int],
    world: int,
    make: Callable[[int, int], T],
    failure: Callable[[T], str],
    simpler: Callable[[T], Iterable[T]],
) -> int:
    """Returns how many of these seeds fail; each is made smaller and printed. ``failure(case)``
    returns the report of a case, or "" if it is right."""
    failed = 0
    for seed in seeds:
        case = make(seed, world)
        report = failure(case)
        if report:
            failed += 1
            print(f"seed {seed}", failure(shrunk(case, simpler, failure)) or report, flush=True)
    pool.stop()
    return failed


def report_of(world: int, run: Callable[..., list[str]], case: Any) -> str:
    """Returns the report of ``run([case])`` on the ranks; "" if the case is right. An end of the
    ranks is a report too."""
    try:
        return "".join(pool.run_on_ranks(world, run, [case], timeout=40.0)[0])
    except pool.RanksFailed as error:
        return f"{case}\n{error}"[:6000]


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
