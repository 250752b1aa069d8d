"""Runs a program as one rank, up to the end of the recorded step."""

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
from unittest import mock

from disttensor import callbacks, errors
from disttensor.errors import SimulationError
from disttensor.simulate.events import Collective, Message, Op
from disttensor.simulate.kinds import Differences
from disttensor.simulate.rank_run import RankRun, cut_step
from disttensor.simulate.recorder import StepRecorder, Values
from disttensor.simulate.templates import few
from disttensor.simulate.world import own_modules, simulated_rank

Program = Callable[[StepRecorder], None]  # starts and stops the recorder


class _StepIsOver(BaseException):
    """Ends a script after the recorded step. No Exception, which the script may catch."""


def of_build(build: Callable[[], Callable[[], Any]]) -> Program:
    """Returns a program that calls ``step = build()`` and records the second call of ``step``."""

    def program(recorder: StepRecorder) -> None:
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
    """Returns a program that runs ``python path arguments`` and records from the end of optimizer
    step ``steps - 1`` to the end of optimizer step ``steps``, where the script is stopped."""

    def program(recorder: StepRecorder) -> None:
        def after_step() -> None:
            if recorder.steps == steps - 1:
                recorder.start()
            elif recorder.steps == steps:
                recorder.stop()
                raise _StepIsOver

        recorder.after_step = after_step
        folder = str(Path(path).resolve().parent)
        if steps == 1:
            recorder.start()
        try:
            with (
                mock.patch.object(sys, "argv", [path, *arguments]),
                mock.patch.object(sys, "path", [folder, *sys.path]), own_modules(of_script=True),
            ):  # fmt: skip
                runpy.run_path(path, run_name="__main__")
        except _StepIsOver:
            return
        raise SimulationError(
            f"{path} ended after {recorder.steps} optimizer steps, and the report is of step "
            f"{steps}: let the script do more steps, or pass --steps {max(1, recorder.steps)}"
        )

    return program


def run_rank(
    program: Program, rank: int, world: int, values: Values, ranks_per_node: int, backend: str,
    is_short: bool = False,
) -> tuple[RankRun, Differences]:  # fmt: skip
    """Runs ``program`` as one rank and returns its recorded step, and the differences between ranks
    that the step shows.

    Args:
        program: starts and stops the recorder.
        rank: the simulated rank. Only rank 0 prints.
        world: the number of ranks.
        values: see ``simulate``.
        ranks_per_node: for LOCAL_RANK and the other variables of torchrun.
        backend: the backend of the fake process group.
        is_short: run only the micro-batches that are needed to derive the others.

    Raises:
        Exception: any exception of the program.
    """
    quiet = contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext()
    warned = set(errors.warned)
    errors.warned.clear()
    try:
        with (
            simulated_rank(rank, world, ranks_per_node, backend),
            warnings.catch_warnings(record=True) as caught,
            quiet,
        ):
            warnings.simplefilter("always")
            # the engine compares addresses, and reads nothing there
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            recorder = StepRecorder(values)
            short = contextlib.nullcontext() if not is_short else callbacks.set_during(
                callbacks.choose_actions, lambda row: few(row, recorder.recording)
            )  # fmt: skip
            with recorder.running(), own_modules(), short:
                program(recorder)
            held, changes = recorder.memory_of_step()
            events, runs = recorder.events, recorder.actions.runs
            found = recorder.comms.differences(events, runs)
            parts = list(cut_step(runs, recorder.last, events, changes, recorder.comms.records))
    finally:
        errors.warned.clear()
        errors.warned.update(warned)
    texts = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))
    return RankRun(rank, held, parts, runs, texts, recorder.layers.of_meshes()), found


def compare(one: RankRun, other: RankRun) -> None:
    """Raises SimulationError if two ranks of a kind differ in operators with FLOPs or in
    communication: their program depends on the rank, or their causal attention on the place of its
    rows. (Other operators may depend on the place in a mesh.)"""
    for a, b in itertools.zip_longest(_texts(one), _texts(other), fillvalue="nothing more"):
        if a != b:
            raise SimulationError(
                f"ranks {one.rank} and {other.rank} have pieces of the same sizes in all meshes, "
                f"and do not do the same: rank {one.rank} does {a}, rank {other.rank} does {b}. A "
                "program may read RANK to print and to write files; its computation and "
                "communication have to follow from meshes. Causal attention whose rows are split "
                "does more on later ranks, which is not simulated: give it rows that are "
                "dt.attention.Balanced, or a number of heads that the mesh axis divides"
            )


def _texts(run: RankRun) -> Iterator[str]:
    """Yields the events that are equal on all ranks of a kind, as text."""
    for e in run.events:
        if isinstance(e, Op) and e.flops:
            yield f"{e.name} of {e.flops:,} FLOP ({e.where})"
        elif isinstance(e, Collective):
            yield f"{e.kind} of {e.nbytes:,} bytes over {e.axis} ({e.where})"
        elif isinstance(e, Message):
            yield f"a message {'to' if e.sends else 'from'} a rank, {e.nbytes:,} bytes ({e.where})"
