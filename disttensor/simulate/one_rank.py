"""The run of one rank: its program up to a step that is recorded, and what that shows."""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from disttensor.dispatch import strict
from disttensor.simulate.errors import SimulationError
from disttensor.simulate.events import Collective, Message, Op
from disttensor.simulate.kinds import Differences, differences
from disttensor.simulate.modules import own_modules
from disttensor.simulate.rank_run import RankRun
from disttensor.simulate.recorder import Recorder, Values
from disttensor.simulate.visits import pieces
from disttensor.simulate.world import imagined_rank

Program = Callable[[Recorder], None]  # starts and stops the recorder


class _Enough(BaseException):
    """The step that was asked for is over. No Exception, which a script may catch."""


def of_build(build: Callable[[], Callable[[], Any]]) -> Program:
    """``step = build()``; the second call of ``step`` is recorded."""

    def program(recorder: Recorder) -> None:
        step = build()
        if not callable(step):
            raise TypeError(
                f"simulate: build() gave {type(step).__name__}: a function of no arguments is "
                "expected, which does one training step (return step)"
            )
        step()
        recorder.start()
        step()
        recorder.stop()

    return program


def of_script(path: str, arguments: Sequence[str], steps: int = 2) -> Program:
    """A script as ``python path arguments`` runs it, up to the end of its optimizer step number
    ``steps``, which is recorded together with what led to it from the step before."""

    def program(recorder: Recorder) -> None:
        def after_step() -> None:
            if recorder.steps == steps - 1:
                recorder.start()
            elif recorder.steps == steps:
                recorder.stop()
                raise _Enough

        recorder.after_step = after_step
        before = sys.argv, list(sys.path)
        sys.argv = [path, *arguments]
        sys.path.insert(0, str(Path(path).resolve().parent))
        if steps == 1:
            recorder.start()
        try:
            with own_modules(of_script=True):
                runpy.run_path(path, run_name="__main__")
        except _Enough:
            return
        finally:
            sys.argv, sys.path[:] = before
        raise SimulationError(
            f"{path} ended after {recorder.steps} optimizer steps, and the report is of step "
            f"{steps}: let it do more, or say --steps {max(1, recorder.steps)}"
        )

    return program


def run_rank(
    program: Program, rank: int, world: int, values: Values, ranks_per_node: int, backend: str,
    few: bool = False,
) -> tuple[RankRun, Differences]:  # fmt: skip
    """Run ``program`` as ``rank``. What it prints is heard from rank 0 only. ``few``: of its
    micro-batches only those run that show what all of them do. Raises what it raises."""
    quiet = contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext()
    warned = set(strict._warned)
    strict._warned.clear()
    try:
        with (
            imagined_rank(rank, world, ranks_per_node, backend),
            warnings.catch_warnings(record=True) as caught,
            quiet,
        ):
            warnings.simplefilter("always")
            # the engine compares addresses, and reads nothing there
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            recorder = Recorder(values, few)
            with recorder.running(), own_modules():
                program(recorder)
            held, changes = recorder.memory_of_step()
            found = differences(recorder.comms, recorder.events, recorder.visits.runs)
            events, comms = recorder.events, recorder.comms.records[: recorder.last.comms]
            parts = tuple(pieces(recorder.visits.runs, recorder.last))
    finally:
        strict._warned.clear()
        strict._warned.update(warned)
    said = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))
    one = RankRun(
        rank, events, comms, held, changes, said, parts, recorder.visits.runs,
        recorder.blocks_before, recorder.layers.placed(),
    )  # fmt: skip
    return one, found


def compare(one: RankRun, other: RankRun) -> None:
    """Raises SimulationError where two ranks that should do the same do not: their program asks
    which rank it is. (Of operators without FLOPs some depend on the place in a mesh.)"""
    for a, b in itertools.zip_longest(_said(one), _said(other), fillvalue="nothing more"):
        if a != b:
            raise SimulationError(
                f"ranks {one.rank} and {other.rank} have pieces of the same sizes in all meshes, "
                f"and do not do the same: rank {one.rank} does {a}, rank {other.rank} does {b}. A "
                "program may ask for RANK to print and to write files; what it computes and sends "
                "has to follow from meshes"
            )


def _said(run: RankRun) -> Iterator[str]:
    """What is alike on all ranks of a kind, in words."""
    for e in run.events:
        if isinstance(e, Op) and e.flops:
            yield f"{e.name} of {e.flops:,} FLOP ({e.where})"
        elif isinstance(e, Collective):
            yield f"{e.kind} of {e.nbytes:,} bytes over {e.axis} ({e.where})"
        elif isinstance(e, Message):
            yield f"a message {'to' if e.sends else 'from'} a rank, {e.nbytes:,} bytes ({e.where})"
