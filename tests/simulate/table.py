"""The tables of docs/numbers/simulate.md: simulated steps against the same steps of gloo processes.

python -m tests.simulate.table                  # bytes, FLOPs, memory: exact on any machine
python -m tests.simulate.table --measure FILE [A:B]  # steps of runs A to B, real and of
                        # single ranks; the machine has to be idle. FILE keeps the figures
python -m tests.simulate.table --time FILE      # seconds, by the figures in FILE
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.calibrate.measure import measure_network
from disttensor.simulate import devices, measure, simulate
from tests.simulate import gpt_training, huggingface_training
from tests.simulate.measured import measured
from tests.simulate.seconds import step_time
from tests.simulate.test_against_real_ranks import CPU, EIGHT, MODELS, STRATEGIES
from tests.support.pool import run_on_ranks, warning_filters

RANKS = 4
APART = 0.10  # of a step: strategies that differ by less are not compared
HERE = devices.Device(name="this CPU", peak=CPU.peak, bandwidth=CPU.bandwidth, type="cpu")

# Runs whose times are compared: the number of ranks, and options.
_MIDDLE, _WIDE, _DEEP = (
    f"--layers={layers} --width={width} --context={context}"
    for layers, width, context in ((4, 192, 96), (2, 384, 64), (6, 96, 48))
)
GPTS = [
    (2, f"{_MIDDLE} --dp=2 --batch=8"),
    (2, f"{_MIDDLE} --tp=2 --batch=8"),
    (2, f"{_MIDDLE} --sharding=2 --zero=3 --batch=8"),
    (2, f"{_MIDDLE} --sharding=2 --zero=2 --batch=8 --accumulate=2"),
    (2, f"{_MIDDLE} --pp=2 --batch=8 --accumulate=4"),
    (2, f"{_MIDDLE} --pp=2 --batch=8 --accumulate=4 --schedule=zbv"),
    (2, f"{_MIDDLE} --cp=2 --batch=8"),
    (2, f"{_MIDDLE} --dp=2 --batch=8 --recompute"),
    (2, f"{_WIDE} --dp=2 --batch=4"),
    (2, f"{_WIDE} --tp=2 --batch=4"),
    (2, f"{_DEEP} --sharding=2 --zero=1 --batch=12"),
    (2, f"{_DEEP} --pp=2 --batch=12 --accumulate=6 --schedule=interleaved_1f1b"),
    (4, f"{_MIDDLE} --dp=4 --batch=8"),
    (4, f"{_MIDDLE} --dp=2 --tp=2 --batch=8"),
    (4, f"{_MIDDLE} --pp=2 --dp=2 --batch=8 --accumulate=4"),
    (4, f"{_MIDDLE} --sharding=4 --zero=3 --batch=8"),
    (4, f"{_MIDDLE} --pp=4 --batch=8 --accumulate=8"),
]
KNOWN = [
    (2, "llama tp=2"),
    (2, "gpt2 sharding=2 zero_stage=3"),
    (2, "bert dp=2 accumulate_steps=2"),
]


def main() -> None:
    warning_filters[:] = ["ignore::disttensor.errors.FallbackWarning"]
    runs = [(gpt_training.build, options) for options in STRATEGIES]
    runs += [(huggingface_training.build, options) for options in MODELS]
    if "--measure" in sys.argv:
        file, *part = sys.argv[sys.argv.index("--measure") + 1 :]
        ends = [int(n) for n in part[0].split(":")] if part else [None]
        measure_steps(Path(file), slice(*ends))
        return
    if "--time" in sys.argv:
        compare_times(Path(sys.argv[sys.argv.index("--time") + 1]))
        return
    head = ["options", "collectives", "bytes", "FLOP of rank 0", "peak, simulated", "peak, real"]
    print(*row(head), sep="\n")
    sizes = [RANKS] * len(runs) + [2 * RANKS] * len(EIGHT)
    runs += [(gpt_training.build, options) for options in EIGHT]
    for (build, options), ranks in zip(runs, sizes, strict=True):
        real = run_on_ranks(ranks, measured, build, options, timeout=300)
        program = functools.partial(build, options)
        report = simulate(program, ranks, device=CPU)
        comms = [(len(c), sum(r.bytes for r in c)) for c, _, _ in real]
        kinds = [report.kind_of(rank) for rank in range(ranks)]
        assert comms == [(len(k.comms), k.comms.total_bytes) for k in kinds], options
        assert [f for _, f, _ in real] == [k.flops for k in kinds], options
        worst = max(range(ranks), key=lambda r: abs(kinds[r].peak_memory / real[r][2].peak - 1))
        figures = *comms[0], kinds[0].flops, kinds[worst].peak_memory, real[worst][2].peak
        print(row([f"`{options}`", *(f"{n:,}" for n in figures)])[0], flush=True)


def timed() -> list[tuple[Any, int, str]]:
    return [(gpt_training.build, *run) for run in GPTS] + [
        (huggingface_training.build, *run) for run in KNOWN
    ]


def measure_steps(file: Path, part: slice) -> None:
    """Adds to a file, for a part of the runs: the seconds of a step of each real rank, the measured
    steps of single ranks, and the network of the real ranks."""
    found = pickle.loads(file.read_bytes()) if file.exists() else {}
    for build, ranks, options in timed()[part]:
        network = run_on_ranks(ranks, measure_network, timeout=100)[0]
        real = run_on_ranks(ranks, step_time, build, options, timeout=100)
        alone = range(ranks) if "pp=" in options else [0]  # one of each kind
        program = functools.partial(build, options)
        found[ranks, options] = real, measure(program, ranks, alone), network
        file.write_bytes(pickle.dumps(found))
        print(options, real, flush=True)


def compare_times(file: Path) -> None:
    """Prints the steps in a file with the simulated ones; and how many pairs are in the right
    order, of those that differ by more than 10%."""
    found, known = pickle.loads(file.read_bytes()), []
    for build, ranks, options in timed():
        if (ranks, options) not in found:
            continue
        real, measured_, network = found[ranks, options]
        device = replace(HERE, sharing=max(1.0, ranks / len(os.sched_getaffinity(0))))
        program = functools.partial(build, options)
        report = simulate(program, ranks, device=device, network=network, measured=measured_)
        said, seconds = report.step_time, max(real)
        known.append((said, seconds))
        cells = [f"{said * 1e3:.1f} ms", f"{seconds * 1e3:.1f} ms", f"{said / seconds - 1:+.0%}"]
        print(row([str(ranks), f"`{options}`", *cells])[0], flush=True)
    off = [abs(said / seconds - 1) for said, seconds in known]
    print(f"off by {sum(off) / len(off):.1%} on average and {max(off):.1%} at most")
    pairs = itertools.combinations(known, 2)
    apart = [(a, b) for a, b in pairs if abs(a[1] / b[1] - 1) > APART]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    print(f"of {len(apart)} pairs that differ by more than 10%, {right} are in the right order")


def row(cells: Sequence[str]) -> tuple[str, str]:
    """A row of a table, and the line below a head."""
    return "|".join(["", *cells, ""]), "|".join(["", *["---"] * len(cells), ""])


if __name__ == "__main__":
    main()
