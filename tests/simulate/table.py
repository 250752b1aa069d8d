"""The tables of docs/numbers/simulate.md: simulated steps against the same steps of gloo processes,
four of them, and eight.

python -m tests.simulate.table          # bytes, FLOPs, memory: exact on any machine
python -m tests.simulate.table --time FILE [A:B]   # seconds, by a device and a network that are
                        # measured before and after; the machine has to be idle. FILE keeps the
                        # figures of runs A to B for the next call
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disttensor.simulate import simulate
from tests.simulate import gpt_training, huggingface_training
from tests.simulate.measured import measured
from tests.simulate.seconds import calibrate, step_time
from tests.simulate.test_against_real_ranks import CPU, EIGHT, MODELS, STRATEGIES
from tests.support.pool import run_on_ranks, warning_filters

RANKS = 4
LARGER = "--width=256 --context=128"  # so that a step is not the host's alone
APART = 0.15  # of a step: strategies that differ by less are not compared


def main() -> None:
    warning_filters[:] = ["ignore::disttensor.errors.FallbackWarning"]
    runs = [(gpt_training.build, options) for options in STRATEGIES]
    runs += [(huggingface_training.build, options) for options in MODELS]
    if "--time" in sys.argv:
        file, *part = sys.argv[sys.argv.index("--time") + 1 :]
        ends = [int(n) for n in part[0].split(":")] if part else [len(runs)]
        times(runs, Path(file), slice(*ends))
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


def times(runs: Sequence[tuple[Any, str]], file: Path, part: slice) -> None:
    """Seconds of a step, real and simulated, of a part of the runs; and how many pairs of
    strategies of one program come in the right order, of those that differ by more than 15%."""
    gpt = gpt_training.build
    runs = [(b, f"{o} {LARGER}" if b is gpt and "width" not in o else o) for b, o in runs]
    found = json.loads(file.read_text()) if file.exists() else {}
    before = run_on_ranks(RANKS, calibrate, timeout=200)[0]
    real = [max(run_on_ranks(RANKS, step_time, *run, timeout=300)) for run in runs[part]]
    after = run_on_ranks(RANKS, calibrate, timeout=200)[0]
    print(*before, *after, sep="\n", flush=True)
    for (build, options), seconds in zip(runs[part], real, strict=True):
        program = functools.partial(build, options)
        report = simulate(program, RANKS, device=before[0], network=before[1])
        said = (report.step_time + report.on(device=after[0], network=after[1]).step_time) / 2
        found[options] = said, seconds
        cells = f"`{options}`", f"{said * 1e3:.1f} ms", f"{seconds * 1e3:.1f} ms"
        print(row([*cells, f"{said / seconds - 1:+.0%}"])[0], flush=True)
    file.write_text(json.dumps(found))
    near = sum(abs(said / seconds - 1) <= 0.25 for said, seconds in found.values())
    print(f"{near} of {len(found)} within 25%")
    apart = right = 0
    known = [found[o] for b, o in runs if b is gpt and o in found]
    for (said, seconds), (other, others) in itertools.combinations(known, 2):
        if abs(seconds / others - 1) > APART:
            apart += 1
            right += (said < other) == (seconds < others)
    print(f"of {apart} pairs that differ by more than 15%, {right} are in the right order")


def row(cells: Sequence[str]) -> tuple[str, str]:
    """A row of a table, and the line below a head."""
    return "|".join(["", *cells, ""]), "|".join(["", *["---"] * len(cells), ""])


if __name__ == "__main__":
    main()
