"""The command line of train_gpt.py."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b")


def parse_args() -> argparse.Namespace:
    """The options, the mesh and ``micro_batches`` filled in. Bad ones raise SystemExit, on every rank alike."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on one process or, under torchrun, on a mesh of them."
    )
    parser.error = _refuse  # type: ignore[method-assign]

    mesh = parser.add_argument_group("mesh (pp x dp x tp is the number of processes)")
    mesh.add_argument("--pp", type=_count, default=1, help="stages, with some layers each (1)")
    mesh.add_argument("--dp", type=_count, help="parts of the batch (what the others leave)")
    mesh.add_argument("--tp", type=_count, help="parts of each layer (what the others leave)")
    parts = "parts of the batch that follow each other through the stages (with --pp: 4, else 1)"
    mesh.add_argument("--micro-batches", type=_count, metavar="N", help=parts)
    mesh.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the stages (1f1b)")

    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=_count, default=6, help="(6)")
    model.add_argument("--width", type=_count, default=256, help="(256)")
    model.add_argument("--heads", type=_count, default=8, help="(8)")
    model.add_argument("--context", type=_count, default=256, help="bytes seen at once (256)")
    model.add_argument("--tie", action="store_true", help="one matrix as embedding and head")
    dtypes = ("float32", "float64")
    model.add_argument("--dtype", choices=dtypes, default="float32", help="(float32)")

    data = parser.add_argument_group("text")
    files = "(the source of Python's standard library)"
    data.add_argument("--data", nargs="+", type=_file, metavar="FILE", default=(), help=files)
    data.add_argument("--bytes", type=_count, help="so many bytes at most (all)")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=_count, default=120, help="(120)")
    training.add_argument("--batch", type=_count, default=8, help="sequences in a global step (8)")
    training.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (0.001)")
    training.add_argument("--seed", type=int, default=0, help="(0)")

    after = parser.add_argument_group("afterwards")
    after.add_argument("--checks", type=int, default=8, help="batches of the validation loss (8)")
    after.add_argument("--sample", type=int, default=200, help="bytes that the model writes (200)")
    after.add_argument("--plot", metavar="PNG", default="out/loss.png", help="(out/loss.png)")
    after.add_argument("--losses", metavar="JSON", help="write all losses there")

    args = parser.parse_args()
    try:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        args.dp, args.tp = mesh_shape(args.pp, args.dp, args.tp, processes)
    except ValueError as error:
        _refuse(str(error))
    if args.micro_batches is None:
        args.micro_batches = math.gcd(4, args.batch) if args.pp > 1 else 1
    if args.batch % args.micro_batches:
        _refuse(f"--batch {args.batch} is not a multiple of --micro-batches {args.micro_batches}")
    visits = args.pp * (2 if args.schedule == "interleaved_1f1b" else 1)
    if args.layers + 4 < visits:  # the embeddings, the last norm and the head can be on any stage
        _refuse(f"--layers {args.layers} are too few for --pp {args.pp} with {args.schedule}")
    if args.width % args.heads:
        _refuse(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


def mesh_shape(pp: int, dp: int | None, tp: int | None, processes: int) -> tuple[int, int]:
    """(dp, tp) beside ``pp``: one that is not given follows from the others; without both, all is dp."""
    if dp is None:
        dp = max(1, processes // (pp * (tp or 1)))
    if tp is None:
        tp = max(1, processes // (pp * dp))
    needed = pp * dp * tp
    if needed != processes:
        stages = pp if processes % pp == 0 else 1
        rest = processes // stages
        fitting = [(n, rest // n) for n in range(1, rest + 1) if rest % n == 0]
        raise ValueError(
            f"--pp {pp} --dp {dp} --tp {tp} needs {needed} processes, but {processes} started. Either "
            f"start {needed} (torchrun --nproc-per-node {needed} ...), or choose "
            + " or ".join(f"--pp {stages} --dp {a} --tp {b}" for a, b in fitting)
        )
    return dp, tp


def _count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _file(text: str) -> Path:
    """A file that can be read."""
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


def _refuse(message: str) -> None:
    raise SystemExit(f"{message} (--help lists the options)")
