"""Runs the program of a public bug in one process and on ranks, and compares all that it computes.

Each file of this folder that is named after a repository and a number has

    a docstring of three parts: what went wrong; repository#number, date, state; the cause
    STRATEGIES   the fields of dt.Strategy, by number of ranks
    program      ``program(run)``: the program that was meant
    planted      ``planted(run)``: the same with the bug in the run on ranks; not in every file
    peer         ``peer()`` on 2 ranks (or ``PEER_RANKS``): what the library itself computes, and
                 what is right; only where it can be run here

A program is ordinary PyTorch. ``Run`` does what differs between one process and ranks: in one
process its methods use plain PyTorch only.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt
from disttensor import DistTensor, pipeline

FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("*_[0-9]*.py"))
TOLERANCE = 1e-10  # of a difference, relative to the largest element
STEPS = 3

Loss = Callable[..., Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]
Clip = Callable[[Any], Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def clip_to_one(parameters: Any) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    draw = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randint(high, shape, generator=draw)


class Run:
    """A run of a program, in one process (without ``fields``) or under a strategy.

    ``found`` holds what the run has computed, by name, as full tensors.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        self.parallel = fields is not None
        self.strategy = dt.Strategy(**fields or {})
        self.stages = self.strategy.visits() if self.parallel else []
        self.found: dict[str, Tensor] = {}

    @property
    def mesh(self) -> dt.ProcessMesh:
        return self.stages[0]

    def apply(self, model: nn.Module, plan: Any = None, **how: Any) -> nn.Module:
        """Returns the model in float64, sharded by the strategy and the plan (``stage_plan``)."""
        model = model.double()
        if not self.parallel:
            return model
        if self.strategy.degrees().pp == 1:
            how = {name: value for name, value in how.items() if name != "layers"}
        if callable(plan):
            plan = plan(model, self.mesh)
        return self.strategy.apply(model, plan=plan, **how)[0]

    def place(self, x: Tensor, sequence: int | None = 1, stage: int = 0) -> Tensor:
        """Returns a batch, split over dp, sharding and cp, on the first stage, or on the last."""
        if not self.parallel:
            return x
        sequence = sequence if x.ndim > 1 else None
        return dt.shard_tensor(x, self.stages[stage], self.strategy.batch(sequence))

    def shard(self, x: Tensor, *placements: Any, **options: Any) -> Tensor:
        """Returns a tensor on a mesh of one axis over all ranks."""
        if not self.parallel:
            return x.clone().requires_grad_(options.get("requires_grad", False))
        return dt.shard_tensor(x, self.line, placements, **options)

    @property
    def line(self) -> dt.ProcessMesh:
        return dt.init_mesh((dist.get_world_size(),), ("x",))

    def keep(self, name: str, value: Any) -> None:
        """Keeps a value for the comparison."""
        if isinstance(value, DistTensor):
            value = value.detach().full_tensor(everywhere=True)
        self.found[name] = torch.as_tensor(value).detach().clone()

    def train(
        self, model: nn.Module, loss: Loss, *batch: Tensor, parts: int = 1,
        sequence: int | None = 1, optimizer: Optimizer = sgd, clip: Clip = clip_to_one,
    ) -> None:  # fmt: skip
        """Trains three steps; keeps losses, gradients, their norm and the parameters.

        ``loss(model, *batch)`` is the share of a micro-batch of the loss of a step.
        """
        steps = optimizer([p for p in model.parameters() if p.requires_grad])

        def share(micro: Sequence[Tensor]) -> Tensor:
            placed = [self.place(x, sequence, -1 if i else 0) for i, x in enumerate(micro)]
            if not self.parallel:
                return loss(model, *placed)
            with self.strategy.autocast():
                return loss(model, *placed)

        for step in range(STEPS):
            micro = list(zip(*(x.chunk(parts) for x in batch), strict=True))
            self.keep(f"loss of step {step}", self.backward(model, share, micro))
            self.keep_gradients(model, step)
            self.keep(f"norm of step {step}", clip(model.parameters()))
            steps.step()
            steps.zero_grad()
        for name, p in model.named_parameters():
            if not isinstance(p, DistTensor) or p.is_initialized:
                self.found[name] = full(p)

    def backward(self, model: nn.Module, share: Loss, micro: Sequence[Any]) -> Tensor:
        """Runs forward and backward of all micro-batches; returns the sum of the losses."""
        if len(self.stages) > 1:
            return sum(pipeline.run(share, micro, self.strategy.schedule, stages=self.stages))
        losses = []
        for i, part in enumerate(micro):
            last = i == len(micro) - 1
            with dt.accumulate(model, last=last) if self.parallel else contextlib.nullcontext():
                losses.append(share(part))
                losses[-1].backward()
        return sum(loss.detach() for loss in losses)

    def keep_gradients(self, model: nn.Module, step: int) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                self.found[f"gradient of {name} in step {step}"] = full(p.grad)


def rank() -> int:
    return dist.get_rank()


def torch_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def ddp(x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a weight that DDP computes, if each of 2 ranks has a piece of the
    rows, and that one process computes."""
    x, model = x.float(), nn.Linear(x.shape[1], 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    (want,) = torch.autograd.grad(loss(model(x)), model.weight)
    replica = DistributedDataParallel(model)
    loss(replica(x.chunk(2)[rank()])).backward()
    return model.weight.grad, want


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DistTensor) else x).detach().clone()


def bug(name: str) -> ModuleType:
    return importlib.import_module(f"tests.public_bugs.{name}")


def differences(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the relative difference of each value; -1 for a value that another rank has."""
    extra = got.keys() - want.keys()
    assert got and not extra, f"computed on ranks only: {sorted(extra)}"
    return {n: difference(w, got[n]) if n in got else -1.0 for n, w in want.items()}


def difference(want: Tensor, got: Tensor) -> float:
    if want.shape != got.shape:
        return math.inf
    if torch.equal(want, got):
        return 0.0
    size = want.double().abs().max().clamp(min=1e-3)  # of a zero, as the gradient of a key's bias
    return float(((got.double() - want.double()).abs().max() / size).nan_to_num(math.inf))


def run_ours(name: str, number: int = 0, program: str = "program") -> dict[str, float]:
    """Runs on each rank. Returns the differences of this rank under a strategy."""
    module = bug(name)
    runs = Run(), Run(module.STRATEGIES[dist.get_world_size()][number])
    for run, body in zip(runs, (module.program, getattr(module, program)), strict=True):
        torch.manual_seed(0)
        body(run)
    return differences(*(run.found for run in runs))


def run_peer(name: str) -> tuple[str, str]:
    """Runs on each rank. Returns what the library computes on this rank: ("right", ""), ("wrong",
    numbers) or ("error", text)."""
    module = bug(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got, want = module.peer()
        except Exception as error:
            return "error", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    got, want = (torch.as_tensor(x).detach().double() for x in (got, want))
    if difference(want, got) <= 1e-5:
        return "right", ""
    other = (got - want).abs().flatten() > 1e-5
    return "wrong", f"{numbers(got, other)} instead of {numbers(want, other)}"


def numbers(x: Tensor, chosen: Tensor, most: int = 3) -> str:
    """The chosen elements, as text."""
    flat = x.flatten()[chosen].tolist()
    return ", ".join(f"{n:.3g}" for n in flat[:most]) + (", ..." if len(flat) > most else "")
