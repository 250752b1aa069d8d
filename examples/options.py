"""The command line of train_gpt.py."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import NoReturn

import disttensor as dt

SCHEDULES = {  # how often each stage is visited
    "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1, "interleaved_zero_bubble": 2,
    "zbv": 2, "dualpipev": 2,
}  # fmt: skip
ATTENTION = ("auto", "gather", "ring", "heads")


def parse_args() -> argparse.Namespace:
    """Returns the options, with their ``strategy``. Invalid options raise SystemExit on every
    rank."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on one process or, under torchrun, on a mesh of them."
    )
    parser.error = _refuse  # type: ignore[method-assign]

    degrees = parser.add_argument_group(
        "processes (their number is the product; the first of dp, sharding, tp, cp that is not "
        "given takes what the others leave, with --zero sharding does)"
    )
    degrees.add_argument("--pp", type=_count, default=1, help="stages, with some layers each (1)")
    degrees.add_argument("--dp", type=_count, help="parts of the batch, each with a replica")
    degrees.add_argument("--sharding", type=_count, help="parts of the batch, and of the state")
    degrees.add_argument("--cp", type=_count, help="parts of the sequence")
    degrees.add_argument("--tp", type=_count, help="parts of each layer")

    ways = parser.add_argument_group("strategy")
    zero = "what --sharding splits: optimizer state, 2: gradients too, 3: parameters too (3)"
    ways.add_argument("--zero", type=int, choices=(1, 2, 3), help=zero)
    segments = ways.add_mutually_exclusive_group()
    size = "communicate parameters and gradients in segments of so many megabytes"
    segments.add_argument("--segment-mb", type=float, metavar="X", help=size)
    anchors = "layers that begin a new segment, as blocks.2"
    segments.add_argument("--anchors", nargs="+", metavar="LAYER", help=anchors)
    parts = "parts of the batch, one after the other, whose gradients add up (with --pp: 4, else 1)"
    ways.add_argument("--accumulate", "--micro-batches", type=_count, metavar="K", help=parts)
    ways.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the stages (1f1b)")
    policy = "how parts of the sequence (--cp) come together (auto)"
    ways.add_argument("--attention", choices=ATTENTION, default="auto", help=policy)
    ways.add_argument("--amp", choices=("bf16", "fp16"), help="compute in half precision")
    again = "compute the blocks again in the backward, in place of keeping what they made"
    ways.add_argument("--recompute", action="store_true", help=again)

    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=_count, default=3, help="(3)")
    model.add_argument("--width", type=_count, default=128, help="(128)")
    model.add_argument("--heads", type=_count, default=4, help="(4)")
    model.add_argument("--context", type=_count, default=64, help="bytes seen at once (64)")
    experts = "a mixture of so many in place of each MLP, split over all ranks of a stage"
    model.add_argument("--experts", type=_count, default=0, metavar="N", help=experts)
    model.add_argument("--tie", action="store_true", help="one matrix as embedding and head")
    dtypes = ("float32", "float64")
    model.add_argument("--device", choices=("cpu", "cuda"), help="(cpu)")
    model.add_argument("--dtype", choices=dtypes, default="float32", help="(float32)")

    data = parser.add_argument_group("text")
    files = "(Python's language reference)"
    data.add_argument("--data", nargs="+", type=_file, metavar="FILE", default=(), help=files)
    data.add_argument("--bytes", type=_count, help="so many bytes at most (all)")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=_count, default=700, help="(700)")
    training.add_argument("--batch", type=_count, default=32, help="sequences in a step (32)")
    training.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (0.003)")
    training.add_argument("--seed", type=int, default=0, help="(0)")

    keep = "save there, and go on from the newest checkpoint there, under any strategy"
    training.add_argument("--save", metavar="FOLDER", help=keep)
    every = "save after so many steps, and after the last one (50)"
    training.add_argument("--every", type=_count, default=50, metavar="K", help=every)

    after = parser.add_argument_group("afterwards")
    after.add_argument("--checks", type=int, default=32, help="batches of the validation loss (32)")
    after.add_argument("--sample", type=int, default=300, help="bytes that the model writes (300)")
    after.add_argument("--plot", metavar="PNG", default="out/loss.png", help="(out/loss.png)")
    after.add_argument("--losses", metavar="JSON", help="write all losses there")

    args = parser.parse_args()
    args.visits = SCHEDULES[args.schedule]
    if args.accumulate is None:
        args.accumulate = math.gcd(4, args.batch) if args.pp > 1 else 1
    if args.batch % args.accumulate:
        _refuse(f"--batch {args.batch} is not a multiple of --accumulate {args.accumulate}")
    if args.layers + 4 < args.pp * args.visits:  # the embeddings, the last norm and the head, too
        _refuse(f"--layers {args.layers} are too few for --pp {args.pp} with {args.schedule}")
    if args.width % args.heads:
        _refuse(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if args.amp and args.dtype != "float32":
        _refuse(f"--amp {args.amp} and --dtype {args.dtype} exclude each other")
    if args.zero and args.sharding == 1:
        _refuse(f"--zero {args.zero} splits over --sharding, which is 1: leave one of them out")
    layers = ["tok", "pos", *(f"blocks.{i}" for i in range(args.layers)), "norm", "head"]
    for anchor in args.anchors or ():
        if anchor not in layers:
            _refuse(f"--anchors {anchor}: the layers are {', '.join(layers)}")
    try:
        args.strategy = strategy_of(args)
        degrees = args.strategy.degrees(int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        _refuse(str(error))
    stage = math.prod(degrees) // degrees.pp
    if args.experts and args.experts < stage:
        _refuse(f"--experts {args.experts} are fewer than the {stage} ranks that hold them")
    return args


def strategy_of(args: argparse.Namespace) -> dt.Strategy:
    """Returns the strategy of the options. Raises ValueError for options that contradict each
    other."""
    segments: dt.fsdp.SegmentBySize | dt.fsdp.SegmentByAnchors | None = None
    if args.segment_mb is not None:
        segments = dt.fsdp.SegmentBySize(args.segment_mb)
    elif args.anchors:
        segments = dt.fsdp.SegmentByAnchors(args.anchors)
    return dt.Strategy(
        pp=args.pp,
        dp=args.dp,
        sharding=args.sharding,
        cp=args.cp,
        tp=args.tp,
        zero_stage=args.zero,
        segments=segments,
        accumulate_steps=args.accumulate,
        attention=args.attention,
        amp=args.amp,
        recompute=["blocks.*"] if args.recompute else [],
        device_type=args.device,
    )


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


def _refuse(message: str) -> NoReturn:
    raise SystemExit(f"{message} (--help lists the options)")
