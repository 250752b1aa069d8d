"""Simulates an unmodified script: ``python -m disttensor.simulate --world 64 train.py --pp 4``."""

from __future__ import annotations

import argparse
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from disttensor.errors import SimulationError
from disttensor.simulate import devices
from disttensor.simulate.devices import Device, Network
from disttensor.simulate.run import simulate_program
from disttensor.simulate.run_rank import of_script


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m disttensor.simulate",
        description="Simulate a training script on each rank of a large world: memory, "
        "communication, floating-point operations, time. The script runs here as one rank of each "
        "kind, on tensors without data, and prints as rank 0.",
    )
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    steps = "the report is of optimizer step N, where the script is stopped (2)"
    parser.add_argument("--steps", type=int, default=2, metavar="N", help=steps)
    value = "the value of data that the script reads: losses, norms, flags (0)"
    parser.add_argument("--value", type=float, default=0.0, metavar="X", help=value)
    costs = f"{', '.join(devices.NAMED)}, or a file of python -m benchmarks.calibrate (h100)"
    parser.add_argument("--device", default="h100", metavar="NAME", help=costs)
    node = "ranks of one node (8, or as in the file of --device)"
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help=node)
    parser.add_argument("--html", metavar="FILE", help="write a page with all pictures there")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    trace = "write the time line there, for Perfetto and chrome://tracing"
    parser.add_argument("--trace", metavar="FILE", help=trace)
    parser.add_argument("script", help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own options")
    args = parser.parse_args(arguments)
    program = of_script(args.script, args.arguments, args.steps)
    try:
        device, network = costs_of(args.device, args.ranks_per_node)
        report = simulate_program(
            program, args.world, values=args.value,
            device=device, network=network,
        )  # fmt: skip
    except (SimulationError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(report)
    if args.html:
        report.to_html(args.html)
    if args.json:
        report.to_json(args.json)
    if args.trace:
        report.to_chrome_trace(args.trace)


def costs_of(name: str, ranks_per_node: int | None) -> tuple[Device, Network]:
    """Returns a named device and the default network, or those that a Python file defines as
    ``device`` and, optionally, ``network``. Raises ValueError if there is neither."""
    found: dict[str, Any] = {"device": devices.NAMED.get(name)}
    if found["device"] is None and Path(name).is_file():
        found = runpy.run_path(name)
    if not isinstance(found.get("device"), Device):
        raise ValueError(
            f"--device {name}: one of {', '.join(devices.NAMED)} is expected, or a Python file "
            "that defines device, as python -m benchmarks.calibrate prints one"
        )
    network = found.get("network", Network())
    return found["device"], network if ranks_per_node is None else replace(
        network, ranks_per_node=ranks_per_node
    )  # fmt: skip


if __name__ == "__main__":
    main()
