"""What one rank does during a step: forwards and backwards of segments, and the collectives under
way beside them.

    python benchmarks/overlap.py                          # text
    python benchmarks/overlap.py --svg docs/overlap.svg   # and a picture
    python benchmarks/overlap.py --forward                # reshards beside a computation

Of several steps of the GPT of data_parallel.py the fastest is shown: replicas with an all-reduce
per block, then stage 3.

With --forward: a reshard, a product that does not depend on it, and a call that reads its result.
*Exposed* is what the reshard takes of the program: the call itself, and the wait where its result
is read. Beside it the same where each reshard is waited for at once, and both as one program that
is compiled. They take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from xml.sax.saxutils import escape

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from replicas import BLOCKS, Settings, free_port, ours, zero3
from table import machine
from torch import nn

import disttensor as dt
from disttensor import DistTensor, Partial, Placement, Replicate, Shard
from disttensor.comm import collectives
from disttensor.comm.work import Work
from reshard import planner

COLUMNS = 96
_PAUSE = 0.0002  # seconds between looks at what is under way
ROWS = ("compute", "gathers", "reductions")


class Span(NamedTuple):
    """Seconds from ``start`` to ``end``. kind: F, B (of a segment), wait, or the name of a
    collective; what: the segment."""

    row: str
    kind: str
    what: str
    start: float
    end: float


class Clock:
    """Records spans. Made once per process; ``watch`` puts it on the module's blocks and on
    collectives in the background."""

    def __init__(self, model: Any) -> None:
        self.spans: list[Span] = []
        self.began: dict[tuple[str, str], float] = {}
        self.depth = len(model.blocks)
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(partial(self._enters, number))
            block.register_forward_hook(partial(self._leaves, number))

    def mark(self, kind: str, ends: str, begins: str) -> None:
        """One segment ends and another begins."""
        now = time.perf_counter()
        if ends and (start := self.began.pop((kind, ends), None)) is not None:
            self.spans.append(Span("compute", kind, ends, start, now))
        if begins:
            self.began[kind, begins] = now

    def _enters(self, number: int, module: nn.Module, args: Any) -> None:
        self.mark("F", str(number - 1) if number else "embedding", str(number))
        if args[0].requires_grad:
            args[0].register_hook(lambda _: self.mark("B", str(number), _before(number)))

    def _leaves(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if number == self.depth - 1:
            self.mark("F", str(number), "head")
            output.register_hook(lambda _: self.mark("B", "head", str(number)))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record what is started in the background. It is over when a look finds it so, or a wait
        for it returns: gloo's reduce_scatter does not tell before."""
        start, wait = collectives.start, Work.wait
        under_way: dict[Any, tuple[str, float]] = {}
        closing = threading.Event()

        def over(work: Any) -> None:
            kind, at = under_way.pop(work, ("", 0.0))
            if kind:
                row = "gathers" if kind == "all_gather" else "reductions"
                self.spans.append(Span(row, kind, "", at, time.perf_counter()))

        def started(kind: str, *args: Any, **options: Any) -> Any:
            at = time.perf_counter()
            work = start(kind, *args, **options)
            under_way[work] = kind, at
            return work

        def waited(work: Any) -> Any:
            at = time.perf_counter()
            result = wait(work)
            over(work)
            self.spans.append(Span("compute", "wait", "", at, time.perf_counter()))
            return result

        def look() -> None:
            while not closing.wait(_PAUSE):
                for work in list(under_way):
                    if work.done():
                        over(work)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            waiting = mock.patch.object(Work, "wait", waited)
            with mock.patch.multiple(collectives, start=started), waiting:
                yield
        finally:
            closing.set()
            looking.join()

    def step(self, forward: Callable[[], Any], after: Callable[[], Any]) -> list[Span]:
        """The spans of a forward and its backward, ordered; ``after`` is the optimizer's."""
        self.spans.clear()
        with self.watch():
            self.mark("F", "", "embedding")
            loss = forward()
            self.mark("F", "head", "")
            self.mark("B", "", "head")
            loss.backward()
            self.mark("B", "embedding", "")
        after()
        return named(sorted(self.spans, key=lambda s: s.start), self.depth)


def _before(number: int) -> str:
    return str(number - 1) if number else "embedding"


def named(spans: list[Span], depth: int) -> list[Span]:
    """Collectives get the names of their segments, which follow from their order where there is one
    for each."""
    up = [str(i) for i in range(depth)]
    orders = {"reductions": [*up[::-1], "rest"], "gathers": ["rest", *up, *up[::-1]]}
    for row, order in orders.items():
        at = [i for i, span in enumerate(spans) if span.row == row]
        names = order if len(at) == len(order) else map(str, range(99))
        for i, what in zip(at, names, strict=False):
            spans[i] = spans[i]._replace(what=what)
    return spans


def union(spans: list[Span]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for _, _, _, start, end in sorted(spans, key=lambda s: s.start):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((start, end))
    return out


def length(spans: list[Span]) -> float:
    return sum(end - start for start, end in union(spans))


def hidden(spans: list[Span]) -> float:
    """The part, 0 to 1, of the time with a collective under way in which this rank did not wait for
    one."""
    waits = length([s for s in spans if s.kind == "wait"])
    return 1 - waits / length([s for s in spans if s.row != "compute"])


def text(title: str, spans: list[Span]) -> str:
    """A row each for what was computed (F0==, B0##, dots: waiting) and for collectives under
    way."""
    first, last = spans[0].start, max(s.end for s in spans)
    scale = COLUMNS / (last - first)
    lines = []
    for row in ROWS:
        line = [" "] * COLUMNS
        for span in sorted((s for s in spans if s.row == row), key=lambda s: s.kind == "wait"):
            left, right = (round((t - first) * scale) for t in (span.start, span.end))
            label = f"{span.kind if row == 'compute' else ''}{span.what}"
            fill = {"F": "=", "B": "#", "wait": "."}.get(span.kind, "-")
            label = label if len(label) < right - left and span.kind != "wait" else ""
            line[left:right] = label.ljust(right - left, fill) if right > left else []
        if "".join(line).strip():
            lines.append(f"{row:>10} |{''.join(line[:COLUMNS])}|")
    head = (
        f"{title}: {1e3 * (last - first):.1f} ms; of the time with a collective under way, "
        f"{hidden(spans):.0%} is not spent waiting for one"
    )
    return "\n".join([head.replace("%", " %"), *lines])


WIDTH, LEFT, RIGHT, HEAD, ROW, BAR = 1000, 90, 20, 40, 34, 28  # pixels
COLOURS = {"F": "#4c78a8", "B": "#f58518", "wait": "#d9d9d9", "all_gather": "#72b7b2"}
LEGEND = (
    "blue: forward, orange: backward, grey: waiting; green: all-gather, red: reduction under way; "
    "names: segments"
)


def svg(charts: list[tuple[str, list[Span]]]) -> str:
    """One chart below the other, each on its own scale."""
    panels = HEAD + ROW * len(ROWS) + 30
    height = panels * len(charts) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 '
        f'{WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]  # fmt: skip
    for number, (title, spans) in enumerate(charts):
        lines += _panel(title, spans, panels * number)
    lines.append(f'<text x="{LEFT}" y="{height - 8}" fill="#666">{LEGEND}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _panel(title: str, spans: list[Span], top: int) -> list[str]:
    first, last = spans[0].start, max(s.end for s in spans)
    unit = (WIDTH - LEFT - RIGHT) / (last - first)
    lines = [f'<text x="{LEFT}" y="{top + 26}" font-size="15">{escape(title)}</text>']
    for i, row in enumerate(ROWS):
        y = top + HEAD + ROW * i
        lines.append(f'<text x="{LEFT - 8}" y="{y + BAR / 2 + 4:g}" text-anchor="end">{row}</text>')
        for span in sorted((s for s in spans if s.row == row), key=lambda s: s.kind == "wait"):
            x, width = LEFT + (span.start - first) * unit, (span.end - span.start) * unit
            colour = COLOURS.get(span.kind, "#e45756")
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{colour}" '
                'stroke="#fff" '
                f'stroke-width="0.5"><title>{span.kind} {span.what}: '
                f'{1e3 * (span.start - first):.1f} to '
                f"{1e3 * (span.end - first):.1f} ms</title></rect>"
            )  # fmt: skip
            if width > 8 * len(span.what) + 2 and span.what:
                lines.append(
                    f'<text x="{x + width / 2:.2f}" y="{y + BAR / 2 + 4:g}" text-anchor="middle" '
                    f'fill="#000" pointer-events="none">{span.what}</text>'
                )
    foot = top + HEAD + ROW * len(ROWS)
    lines.append(f'<path d="M{LEFT} {foot}H{WIDTH - RIGHT}" stroke="#000"/>')
    end = f"{1e3 * (last - first):.0f} ms"
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{foot + 16}" text-anchor="end">{end}</text>')
    return lines


RESHARDS: dict[str, tuple[Placement, Placement]] = {
    "all_reduce": (Partial(), Replicate()), "all_gather": (Shard(0), Replicate()),
    "all_to_all": (Shard(0), Shard(1)),
}  # fmt: skip


class Times(NamedTuple):
    """Seconds of one run: the product between, what the reshard took, all of it."""

    product: float
    exposed: float
    all: float


def one_reshard(x: DistTensor, to: Placement, a: torch.Tensor, at_once: bool) -> Times:
    mesh, usual = x.process_mesh, planner.background
    begins = (lambda *_, **__: None) if at_once else usual
    dist.barrier()
    with mock.patch.object(planner, "background", begins):
        start = time.perf_counter()
        y = dt.reshard(x, mesh, [to])
        called = time.perf_counter()
        torch.mm(a, a)
        computed = time.perf_counter()
        y.to_local()
        end = time.perf_counter()
    return Times(computed - called, called - start + end - computed, end - start)


def one_program(x: DistTensor, to: Placement, a: DistTensor, late: bool) -> Callable[[], float]:
    """The seconds of the same as one compiled program. ``late``: as usual; otherwise it waits for
    the reshard at once."""

    def program(x: DistTensor, a: DistTensor) -> tuple[Any, Any]:
        return x.redistribute(placements=[to]), a @ a

    at_once = {"options": {"post_grad_custom_post_pass": None}}
    run = dt.compile(program, **({} if late else at_once))  # type: ignore[arg-type]

    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        run(x, a)
        return time.perf_counter() - start

    return timed


def forward(args: argparse.Namespace) -> str:
    """A line for each collective."""
    mesh = dt.ProcessMesh(range(args.ranks), ("tp",))
    lines = []
    for kind, (src, dst) in RESHARDS.items():
        rows = 2048 // (args.ranks if src == Shard(0) else 1)
        local = torch.randn(rows, 1024)
        x = dt.from_local(local, mesh, [src], shape=(2048, 1024))
        a = torch.randn(args.product, args.product)
        runs: dict[bool, list[Times]] = {True: [], False: []}
        for turn in range(2 * (args.repeats + 3)):
            took = one_reshard(x, dst, a, turn % 2 == 0)
            runs[turn % 2 == 0] += [took] * (turn >= 6)
        now, later = (
            Times(*(1e3 * statistics.median(part) for part in zip(*runs[b], strict=True)))
            for b in (True, False)
        )
        lines.append(
            f"{kind:>14} of {x.nbytes / 2**20:.0f} MiB: exposed {now.exposed:5.1f} ms waited for "
            f"at once, {later.exposed:4.1f} ms where it is read; with a product of "
            f"{now.product:.1f} ({later.product:.1f}) ms all takes {now.all:.1f} "
            f"({later.all:.1f}) ms"
        )
        whole = dt.shard_tensor(a, mesh, [Replicate()])
        programs = [one_program(x, dst, whole, late) for late in (False, True)]
        turns = [[1e3 * run() for run in programs] for _ in range(args.repeats + 3)][3:]
        first, late = (statistics.median(some) for some in zip(*turns, strict=True))
        lines.append(f"{'compiled':>14}: all takes {first:.1f} ({late:.1f}) ms")
    return "\n".join(lines)


def measure(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dt.init_mesh((args.ranks,), ("dp",))
    if args.forward:
        lines = forward(args)
        if rank == 0:
            print(machine(), lines, sep="\n\n")
        dist.destroy_process_group()
        return
    settings = Settings(args.width, args.depth, args.rows, args.time)
    sides = {
        "replicas, an all-reduce per block": partial(ours, shard_axis=None, segments=BLOCKS),
        "stage 3, gathered and reduced per block": zero3,
    }
    charts = []
    for title, side in sides.items():
        run = side(settings)
        clock = Clock(run.model)
        best: list[Span] = []
        for _ in range(3):  # the warm-up
            run()
        for _ in range(args.repeats):
            run.zero_grad()
            dist.barrier()
            spans = clock.step(run.forward, run.update)
            if not best or spans[-1].end - spans[0].start < best[-1].end - best[0].start:
                best = spans
        charts.append((f"{title} (rank 0 of {args.ranks}, torch {torch.__version__})", best))
    if rank == 0:
        print(machine(), end="\n\n")
        print("\n\n".join(text(*chart) for chart in charts))
        if args.svg:
            args.svg.write_text(svg(charts), encoding="utf-8")
            print(args.svg)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--rows", type=int, default=1, help="of the batch of a rank")
    parser.add_argument("--time", type=int, default=128, help="tokens of a row")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--forward", action="store_true", help="reshards beside a product")
    parser.add_argument("--product", type=int, default=1024, help="rows and columns of that")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it there too")
    args = parser.parse_args()
    mp.spawn(measure, (free_port(), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
