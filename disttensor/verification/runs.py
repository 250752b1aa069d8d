"""Runs a program in one process and on n ranks, and compares what they have recorded."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from disttensor.checks import (
    argument_error,
    check_callable,
    check_int,
    check_positive,
    check_sequence,
)
from disttensor.errors import RankError, VerifyError
from disttensor.hangs.watcher import watch
from disttensor.launching.launch import launch
from disttensor.torch_private import import_names_of_lines
from disttensor.verification.compare import Comparison, Whole
from disttensor.verification.recorder import StepsEnded, TensorRecorder
from disttensor.verification.records import Records

_SHOWN = 8  # differences, and tensors that were not compared


def verify(
    fn: Callable[..., Any], nprocs: int = 2, args: Sequence[Any] = (), *, steps: int = 3,
    whole: Whole | None = None, dtype: torch.dtype | None = torch.float64,
    timeout: float | None = None,
) -> str:  # fmt: skip
    """Compares what a training program computes on ``nprocs`` ranks with what it computes in one
    process, and names the first tensor that differs.

    ``fn(*args)`` runs as a rank of a world of 1 and of ``nprocs``, as in ``launch``, with any
    library on ``torch.distributed``. It has to make the same global batches and initial values in
    both. The outputs of modules, their gradients, losses, gradients, norms and parameters of each
    step are compared.

    Args:
        fn: a program with an optimizer.
        nprocs: the number of ranks, at least 2.
        args: the arguments of ``fn``.
        steps: the program is ended after this number of optimizer steps.
        whole: ``whole(name, phase, pieces)`` puts the pieces of a regular tensor together, given as
            a dict by rank, where the sizes do not show how. It returns None for other tensors.
        dtype: the default dtype of the runs. In float64 roundings are 1e9 times smaller than in
            float32, and errors are not. None: the dtype of the program.
        timeout: seconds after which the ranks are ended. None: a minute, and twenty times as long
            as one process takes. Ranks that wait for each other say where, as with ``dt.watch``.

    Returns:
        A text with the number of compared tensors, and those that were not compared.

    Raises:
        VerifyError: a tensor differs.
        TimeoutError: the ranks had not ended within ``timeout``.

    >>> def train():
    ...     mesh = dt.init_mesh((torch.distributed.get_world_size(),), ("dp",))
    ...     model = dt.replicate(torch.nn.Linear(4, 1), mesh=mesh)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     for _ in range(2):
    ...         x = dt.ones(8, 4, mesh=mesh, placements=[dt.Shard(0)])
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    >>> print(dt.verify(train, 2))  # doctest: +SKIP
    verify: 2 ranks compute what one process computes, within 1e-15: 23 tensors of 2 steps
    """
    check_callable("verify: fn", fn)
    size = check_int("verify: nprocs", nprocs, 2)
    args = check_sequence("verify: args", args, "a sequence of arguments")
    check_int("verify: steps", steps, 1)
    if whole is not None:
        check_callable("verify: whole", whole)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise argument_error("verify: dtype", dtype, "a floating dtype of torch, or None")
    if timeout is not None:
        check_positive("verify: timeout", timeout, "a positive number of seconds")
    import_names_of_lines()  # once, before the forks that are watched
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        folder, note = Path(name), ""
        run, began = partial(_run, folder, steps, fn, args), time.monotonic()
        try:
            launch(run, 1, ("one", False, dtype))
        except RankError as error:
            if dtype is None:
                raise
            lines = str(error).splitlines()
            note = f"\n  in its own dtype, because it does not run in {dtype}: {lines[0]}"
            dtype = None
            launch(run, 1, ("one", False, None))
        took = time.monotonic() - began
        with contextlib.suppress(RankError):  # roundings are then taken from the dtype
            launch(run, 1, ("nudged", True, dtype))
        limit = timeout or 60 + 20 * took
        launch(run, size, ("rank", False, dtype, min(10.0, limit / 3)), timeout=limit)
        names = ["one0", "nudged0", *(f"rank{r}" for r in range(size))]
        with contextlib.ExitStack() as files:
            opened = [files.enter_context((folder / name).open("rb")) for name in names]
            one, nudged, *ranks = map(Records, opened)
            comparison = Comparison(one, nudged, ranks, whole)
    text = _report(comparison, size) + note
    if comparison.differences:
        raise VerifyError(text)
    return text


def _run(
    folder: Path, steps: int, fn: Callable[..., Any], args: Any,
    label: str, nudge: bool, dtype: torch.dtype | None, patience: float = 0.0,
) -> None:  # fmt: skip
    """Runs the program as a rank, and records it. ``patience``: the seconds after which ranks that
    wait for each other say where they are; 0: they do not."""
    if dtype is not None:
        torch.set_default_dtype(dtype)
    if patience:
        watch(patience)
    recorder = TensorRecorder(folder / f"{label}{os.environ['RANK']}", steps, nudge)
    try:
        with contextlib.suppress(StepsEnded):
            fn(*args)
    finally:
        recorder.close()


def _report(c: Comparison, size: int) -> str:
    total = sum(c.equal.values())
    counts = ", ".join(f"{phase} {n}" for phase, n in c.equal.items()) or "none"
    if c.differences:
        first, *more = c.differences
        lines = [
            f"{size} ranks do not compute what one process computes",
            f"first difference: {first}",
            f"  {first.words}",
            f"  roundings explain {first.rounding:.1g}",
            *(f"then {other}" for other in more[:_SHOWN]),
            f"{len(more)} later tensors differ, and {total} are equal ({counts})",
        ]
    else:
        steps = len({key[0] for key in c.one.entries})
        lines = [
            f"{size} ranks compute what one process computes, within {c.error:.1g}",
            f"{total} tensors of {steps} steps are equal ({counts})",
        ]
    lines += [c.drift] if c.drift else []
    lines += [f"not compared: {name}: {why}" for name, why in [*c.uncompared.items()][:_SHOWN]]
    if len(c.uncompared) > _SHOWN:
        lines.append(f"and {len(c.uncompared) - _SHOWN} others are not compared")
    return "verify: " + "\n  ".join(lines)
