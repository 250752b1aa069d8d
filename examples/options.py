"""The command line of train_gpt.py."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def parse_args() -> argparse.Namespace:
    """The options, ``dp`` and ``tp`` filled in. Bad ones raise SystemExit, on every rank alike."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on one process or, under torchrun, on a mesh of them."
    )
    parser.error = _refuse  # type: ignore[method-assign]

    mesh = parser.add_argument_group("mesh (dp x tp is the number of processes)")
    mesh.add_argument("--dp", type=_count, help="parts of the batch (what --tp leaves)")
    mesh.add_argument("--tp", type=_count, help="parts of each layer (what --dp leaves)")

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
        args.dp, args.tp = mesh_shape(args.dp, args.tp, int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        _refuse(str(error))
    if args.width % args.heads:
        _refuse(f"--width {args.width} is not a multiple of --heads {args.heads}")
    return args


def mesh_shape(dp: int | None, tp: int | None, processes: int) -> tuple[int, int]:
    """(dp, tp): one that is not given follows from the other; without both, all is dp."""
    if dp is None:
        dp = max(1, processes // (tp or 1))
    if tp is None:
        tp = max(1, processes // dp)
    if dp * tp != processes:
        fitting = [(n, processes // n) for n in range(1, processes + 1) if processes % n == 0]
        raise ValueError(
            f"--dp {dp} --tp {tp} needs {dp * tp} processes, but {processes} started. Either start "
            f"{dp * tp} (torchrun --nproc-per-node {dp * tp} ...), or choose "
            + " or ".join(f"--dp {a} --tp {b}" for a, b in fitting)
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
