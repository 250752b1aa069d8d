"""Under autocast every rank's piece of a result has the dtype that plain torch gives the whole.

    python -m tests.opinfo.autocast                    a line for each OpInfo with another dtype
    python -m tests.opinfo.autocast --ops add,einsum --most 20

Each function of PyTorch's own database that has a rule, on its samples, in float32 and bfloat16,
cut over four simulated ranks: of five rows the last has none, of three as well.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from disttensor.core.placement import Placement, Replicate, Shard, show
from ops.factors import NoRule
from ops.registry import RULES
from tests.opinfo.opinfo_call import (
    OPS,
    common_methods_invocations,
    replace,
    sample_inputs,
    seed,
)
from tests.opinfo.opinfo_check import UNSET, unseeded
from tests.support.simulate import simulate
from tests.support.structure import tensors_in

RANKS = (4,)
DRAWS = 3  # layouts of a sample
Layouts = list[tuple[Placement, ...]]


def rules_of(names: Sequence[str]) -> list[str]:
    """Those whose function has a rule."""
    return [name for name in names if OPS[name].op in RULES and not UNSET.search(name)]


def layouts_for(tensors: Sequence[Tensor], key: str) -> Iterator[Layouts]:
    """The first tensor is split, the others as it may come."""
    rng = random.Random(key)

    def one(t: Tensor, split: bool) -> tuple[Placement, ...]:
        dims: list[Placement] = [Shard(d) for d in range(t.ndim)]
        return (rng.choice(dims if split and dims else [*dims, Replicate()]),)

    for _ in range(DRAWS):
        yield [one(t, not i) for i, t in enumerate(tensors)]


def dtypes(values: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors_in(values)]


def problems(name: str, most: int = 6) -> list[str]:
    """What differs, for each sample and layout of an OpInfo."""
    op, found = OPS[name], []
    cast = torch.autocast("cpu", torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        if dtype not in op.supported_dtypes("cpu"):
            continue
        for n, sample in enumerate(sample_inputs(op, dtype, most, 200, False)):
            given = ((sample.input, *sample.args), dict(sample.kwargs))
            tensors = tensors_in(given)
            if not tensors or any(t.layout is not torch.strided for t in tensors):
                continue
            seed(1)
            args, kwargs = replace(given, iter([t.clone() for t in tensors]))
            try:
                with cast:
                    want = dtypes(op.op(*args, **kwargs))
            except Exception:  # what torch refuses is no case
                continue
            for layouts in layouts_for(tensors, f"{name} {dtype} {n}"):
                args, kwargs = replace(given, iter([t.clone() for t in tensors]))
                try:
                    with cast:
                        done = simulate(op.op, *args, layouts=layouts, mesh_shape=RANKS, **kwargs)
                except NoRule:
                    break
                except AttributeError as error:
                    if "draw" in str(error):  # random numbers are not simulated
                        return []
                    raise
                except Exception as error:
                    found.append(f"{n} {dtype} {show(layouts[0])}: {error!r:.300}")
                    continue
                for at, values in done.values.items() if done else ():
                    if dtypes(values) != want:
                        shown = ", ".join(show(p) for p in layouts)
                        shapes = [list(t.shape) for t in tensors]
                        text = f"{n} {dtype} {shapes} [{shown}] at {at}: {dtypes(values)}"
                        found.append(f"{text}, plain {want}")
    return found


def sweep(names: Sequence[str], most: int = 6) -> dict[str, list[str]]:
    with (
        warnings.catch_warnings(),
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
    ):
        warnings.simplefilter("ignore")
        return {name: found for name in names if (found := problems(name, most))}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo.autocast", description=__doc__)
    parser.add_argument("--ops", help="names, separated by commas (all that have a rule)")
    parser.add_argument("--most", type=int, default=6, help="samples of each OpInfo (6)")
    options = parser.parse_args(argv)
    names = rules_of(options.ops.split(",") if options.ops else list(OPS))
    wrong = sweep(names, options.most)
    for name, found in wrong.items():
        print(name, *found[:3], sep="\n  ")
    print(f"{len(names)} functions with a rule, {len(wrong)} with another dtype somewhere")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
