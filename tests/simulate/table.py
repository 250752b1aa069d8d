"""The table of docs/simulate.md: simulated steps against the same steps of four gloo processes.

python -m tests.simulate.table          # bytes, FLOPs, memory: exact on any machine
python -m tests.simulate.table --time   # seconds too, of a device and a network measured here;
                                        # the machine has to be idle
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import disttensor as dt
from disttensor.simulate.devices import Device, Link, Network
from disttensor.simulate.events import Op
from tests.simulate import gpt_training, huggingface_training
from tests.simulate.measured import measured
from tests.simulate.seconds import LARGE, calibrate, step_time
from tests.simulate.test_against_real_ranks import CPU, MODELS, STRATEGIES
from tests.support.pool import run_on_ranks

RANKS = 4
LARGER = "--width=256 --context=128"  # so that a step is not the host's alone
HOST = "--dp=4 --batch=4 --width=8 --context=4"  # a step in which nothing but the host takes time
APART = 0.15  # of a step: strategies that differ by less are not compared


def here() -> tuple[Device, Network]:
    """This machine, while four ranks run on it."""
    devices, small, large = zip(*run_on_ranks(RANKS, calibrate, timeout=200), strict=True)
    sent = (RANKS - 1) * LARGE * 4
    link = Link(bandwidth=sent / max(large), latency=max(small) / (RANKS - 1))
    return devices[0], Network(ranks_per_node=RANKS, within=link, between=link)


def main() -> None:
    runs = [(gpt_training.build, options) for options in STRATEGIES]
    runs += [(huggingface_training.build, options) for options in MODELS]
    if "--time" in sys.argv:
        times(runs)
        return
    head = ["options", "collectives", "bytes", "FLOP of rank 0", "peak, simulated", "peak, real"]
    print(*row(head), sep="\n")
    for build, options in runs:
        real = run_on_ranks(RANKS, measured, build, options, timeout=300)
        program = functools.partial(build, options)
        report = dt.simulate(program, RANKS, device=CPU)
        comms = [(len(c), sum(r.bytes for r in c)) for c, _, _ in real]
        kinds = [report.kind_of(rank) for rank in range(RANKS)]
        assert comms == [(len(k.comms), k.comms.total_bytes) for k in kinds], options
        assert [f for _, f, _ in real] == [k.flops for k in kinds], options
        worst = max(range(RANKS), key=lambda r: abs(kinds[r].peak_memory / real[r][2].peak - 1))
        figures = *comms[0], kinds[0].flops, kinds[worst].peak_memory, real[worst][2].peak
        print(row([f"`{options}`", *(f"{n:,}" for n in figures)])[0], flush=True)


def times(runs: Sequence[tuple[Any, str]]) -> None:
    """Seconds of a step, real and simulated, and how many pairs of strategies of one program come
    in the right order, of those that differ by more than 15%."""
    gpt = gpt_training.build
    runs = [(b, f"{o} {LARGER}" if b is gpt and "width" not in o else o) for b, o in runs]
    device, network = here()
    host = max(run_on_ranks(RANKS, step_time, gpt_training.build, HOST, timeout=300))
    real = [max(run_on_ranks(RANKS, step_time, *run, timeout=300)) for run in runs]
    tiny = dt.simulate(functools.partial(gpt_training.build, HOST), RANKS, device=CPU)
    kernels = sum(isinstance(e, Op) for e in tiny.kinds[0].events)
    device = dataclasses.replace(device, launch=host / kernels)
    print(device, network, flush=True)
    print(*row(["options", "step, simulated", "step, real", "off"]), sep="\n")
    said = []
    for (build, options), seconds in zip(runs, real, strict=True):
        program = functools.partial(build, options)
        said.append(dt.simulate(program, RANKS, device=device, network=network).step_time)
        off = said[-1] / seconds - 1
        cells = f"`{options}`", f"{said[-1] * 1e3:.1f} ms", f"{seconds * 1e3:.1f} ms", f"{off:+.0%}"
        print(row(cells)[0], flush=True)
    apart = right = 0
    for (i, one), (j, other) in itertools.combinations(enumerate(runs), 2):
        if one[0] is other[0] is gpt_training.build and abs(real[i] / real[j] - 1) > APART:
            apart += 1
            right += (said[i] < said[j]) == (real[i] < real[j])
    print(f"of {apart} pairs that differ by more than 15%, {right} are in the right order")


def row(cells: Sequence[str]) -> tuple[str, str]:
    """A row of a table, and the line below a head."""
    return "|".join(["", *cells, ""]), "|".join(["", *["---"] * len(cells), ""])


if __name__ == "__main__":
    main()
