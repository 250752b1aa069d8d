"""Runs a program as one rank, up to the end of the recorded step."""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttensor import callbacks, errors
from disttensor.errors import SimulationError, user_line
from disttensor.simulate.child import Child
from disttensor.simulate.device_type import choose_as_on
from disttensor.simulate.devices import Device
from disttensor.simulate.events import Collective, Message, Op
from disttensor.simulate.flop_formulas import formulas
from disttensor.simulate.kinds import Differences
from disttensor.simulate.rank_reads import watch_rank_reads
from disttensor.simulate.rank_run import RankRun, cut_step
from disttensor.simulate.recorder import StepRecorder, Values
from disttensor.simulate.scratch_files import ScratchFiles
from disttensor.simulate.shapes import add_known, begin_rank, known_since
from disttensor.simulate.stand_ins import replace_functions
from disttensor.simulate.templates import shorten
from disttensor.simulate.world import fake, simulated_rank

_PLACE = 1 << 20  # bytes by which a peak may depend on the place of a rank in a mesh

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
    """Returns a program that runs ``python path arguments`` and records the step that ends with
    update number ``steps`` of its first optimizer, where the script is stopped. It begins with the
    update before."""

    def program(recorder: StepRecorder) -> None:
        def after_step() -> None:
            if recorder.steps == steps - 1:
                recorder.start()
            elif recorder.steps == steps:
                recorder.stop()
                raise _StepIsOver

        recorder.after_step = after_step
        sys.argv = [path, *arguments]
        sys.path.insert(0, str(Path(path).resolve().parent))
        if steps == 1:
            recorder.start()
        ending = "ended"
        try:
            runpy.run_path(path, run_name="__main__")
        except _StepIsOver:
            if dist.get_rank() == 0 and not recorder.has_forward():
                raise SimulationError(
                    f"the step from update {steps - 1} to update {steps} of the first optimizer of "
                    f"{path} has no forward. Pass --steps {steps + 1}, or a later one"
                ) from None
            return
        except SystemExit as error:
            ending = _exit_of(error)
        raise SimulationError(
            f"{path} {ending} after {recorder.steps} updates of its first optimizer, and the "
            f"report is of the step up to update {steps}: let the script do more steps, or pass "
            f"--steps {max(1, recorder.steps)}"
        )

    return program


def _exit_of(error: SystemExit) -> str:
    """Returns where and how a program exited."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return f"called sys.exit({error.code!r}) at {user_line(frames[-1])},"


def start_rank(
    program: Program, rank: int, world: int, values: Values, ranks_per_node: int, device: Device,
    is_short: bool = False, result: Callable[[RankRun, Differences], Any] = lambda *both: both,
) -> Child[Any]:  # fmt: skip
    """Starts ``program`` as one rank, in a process of its own. The process returns
    ``result(run, differences)``, by default both: the recorded step, and the differences between
    ranks that the step shows.

    Args:
        program: starts and stops the recorder.
        rank: the simulated rank. Only rank 0 prints.
        world: the number of ranks.
        values: see ``simulate``.
        ranks_per_node: for LOCAL_RANK and the other variables of torchrun.
        device: torch chooses kernels and collectives by its type.
        is_short: run only the micro-batches that are needed to derive the others.
        result: is called in the process of the rank.
    """

    def run(files: ScratchFiles) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # the engine compares addresses, and reads nothing there
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            with simulated_rank(rank, world, ranks_per_node, device.backend):
                replace_functions(files, rank, world)
                kept = choose_as_on(device.type)
                count = begin_rank(device.type)
                recorder = StepRecorder(values)
                found = result(*_record(program, rank, files, recorder, is_short, caught))
        del kept
        return found, known_since(count, device.type)

    mode = fake()  # tables and imports that take a second are made here, and not in each child
    errors.name_of(torch.add)
    formulas()

    def take(sent: tuple[Any, bytes]) -> Any:
        add_known(sent[1], mode, device.type)
        return sent[0]

    return Child(run, f"rank {rank}", take)


def _record(
    program: Program, rank: int, files: ScratchFiles, recorder: StepRecorder, is_short: bool,
    caught: Sequence[warnings.WarningMessage],
) -> tuple[RankRun, Differences]:  # fmt: skip
    errors.warned.clear()
    quiet = contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext()
    short = contextlib.nullcontext() if not is_short else callbacks.set_during(
        callbacks.choose_actions, lambda row: shorten(row, recorder.recording)
    )  # fmt: skip
    reads = watch_rank_reads()
    with recorder.running(), short, quiet:
        try:
            program(recorder)
        except SystemExit as error:
            raise SimulationError(f"the program {_exit_of(error)} before the step ended") from None
    held, log = recorder.step()
    runs = recorder.actions.runs
    found = recorder.comms.differences(log, runs)
    parts = list(cut_step(runs, log))
    texts = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))
    if recorder.unknown:
        names = ", ".join(f"{name} ({line})" for name, line in recorder.unknown.items())
        texts.append(
            f"no formula for the FLOPs of {names}: 0 FLOP, and the time of the memory traffic. Add "
            "one by torch.utils.flop_counter.register_flop_formula in the program"
        )
    return RankRun(
        rank, held, parts, runs, texts, recorder.layers.of_meshes(), files.written(),
        dict(recorder.updates), recorder.comms.exchanged, list(reads),
    ), found  # fmt: skip


def compare(one: RankRun, other: RankRun, own_work: bool = False) -> bool:
    """Returns True if two ranks of a kind have the same operators with FLOPs and the same
    communication. (Other operators may depend on the place in a mesh.)

    Args:
        own_work: the program reads its rank: FLOPs may differ. Returns False if they do, or if the
            peaks of memory differ.

    Raises:
        SimulationError: if the two differ otherwise: their program depends on the rank, or their
            causal attention on the place of its rows.
    """
    texts = [[*_texts(run)] for run in (one, other)]
    if own_work:
        same = texts[0] == texts[1] and other.has_peak_of(one, _PLACE)
        texts = [[(op, text) for op, text in both if not op] for both in texts]
    for (_, a), (_, b) in itertools.zip_longest(*texts, fillvalue=(False, "nothing more")):
        if a != b:
            raise SimulationError(
                f"ranks {one.rank} and {other.rank} have pieces of the same sizes in all meshes, "
                f"and do not do the same: rank {one.rank} does {a}, rank {other.rank} does {b}. A "
                "program may read RANK to print and to write files; its computation and "
                "communication have to follow from meshes. Causal attention whose rows are split "
                "does more on later ranks, which is not simulated: give it rows that are "
                "dt.attention.Balanced, or a number of heads that the mesh axis divides. Ranks "
                "that exchange sizes get their own ones: give shape= to from_local"
            )
    return same if own_work else True


def _texts(run: RankRun) -> Iterator[tuple[bool, str]]:
    """Yields the events that are equal on all ranks of a kind, as text, each with whether it is an
    operator."""
    for e in run.events:
        if isinstance(e, Op) and e.flops:
            yield True, f"{e.name} of {e.flops:,} FLOP ({e.where})"
        elif isinstance(e, Collective):
            yield False, f"{e.kind} of {e.nbytes:,} bytes over {e.axis} ({e.where})"
        elif isinstance(e, Message):
            way = "to" if e.sends else "from"
            yield False, f"a message {way} a rank, {e.nbytes:,} bytes ({e.where})"
    for text in run.exchanged:
        yield False, f"an exchange of {text}"
