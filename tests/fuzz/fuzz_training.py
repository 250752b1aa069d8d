"""Training set-ups at random (tests/fuzz/training_setups.py): a few steps of one on ranks are those
of one plain process, in losses, gradients, norms, parameters and statistics.

    python -m tests.fuzz.fuzz_training --seeds 0:500 --world 4
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import disttensor as dt
from disttensor import pipeline
from disttensor.parallel.rematerialize import recompute
from disttensor.parallel.strategy import AMP
from tests.fuzz.command_line import each_on_ranks, fuzz, tell
from tests.fuzz.training_setups import OPTIMIZERS, PLANS, Setup, batch, make, model_of, recomputed
from tests.support.training import full

STEPS = 3


class Run:
    """The script, in one plain process or on ranks; with a ``backend``, under ``dt.compile``: the
    model of some seeds as a whole, the layers of others."""

    def __init__(self, setup: Setup, on_ranks: bool, backend: str = "") -> None:
        self.setup = setup
        torch.manual_seed(setup.seed)
        self.model: Any = model_of(setup)
        options = dict(OPTIMIZERS[setup.optimizer])
        if setup.fused:
            options["fused"] = True
        elif setup.lists is not None:
            options["foreach"] = setup.lists
        optimizer = getattr(torch.optim, setup.optimizer.split()[0])
        self.strategy: Any = None
        if on_ranks:
            self._place()
        elif setup.recompute:
            recompute(self.model, [self.model.get_submodule(n) for n in recomputed(setup)])
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.params, **options)
        if setup.hooks:
            for p in self.params[:2] if setup.degrees[2] == 1 else ():  # a shard refuses them
                p.register_hook(lambda g: g * 0.5)
            self.model[1].register_forward_hook(lambda module, args, out: out * 1.5)
        scale = {"init_scale": 64.0, "growth_interval": 2}
        self.scaler: Any = torch.amp.GradScaler("cpu", enabled=setup.amp == "fp16", **scale)
        if on_ranks:
            self.scaler = self.strategy.scaler(**scale)
        if backend:
            for part in [self.model] if setup.seed % 3 else self.model:
                dt.compile(part, backend=backend)

    def _place(self) -> None:
        setup = self.setup
        pp, dp, sharding, cp, tp = setup.degrees
        self.strategy = dt.Strategy(
            pp=pp, dp=dp, sharding=sharding, cp=cp, tp=tp, zero_stage=setup.stage, amp=setup.amp,
            accumulate_steps=setup.parts, recompute=recomputed(setup),
            segments=dt.fsdp.SegmentBySize(setup.segment_mb) if setup.segment_mb else None,
        )  # fmt: skip
        self.stages = pipeline.visits(self.strategy.stages(), setup.schedule or "1f1b")
        self.strategy.apply(self.model, plan=PLANS[setup.kind], visits=self.stages)

    def loss(self, x: Any, y: Any) -> Any:
        out = self.model(x)
        if self.setup.kind == "gpt":
            out, y = out.flatten(0, 1), y.flatten()
        return F.cross_entropy(out, y)

    def shares(self, x: Tensor, y: Tensor, bad: bool) -> list[Any]:
        """Forward and backward of each micro-batch; the losses."""
        n, scale = self.setup.parts, float("inf") if bad else 1.0
        losses = []

        def share(part: Any) -> Any:
            with self._autocast():
                loss = self.loss(*part) / n
            losses.append(loss.detach())
            return self.scaler.scale(loss) * scale

        parts = [self._placed(*pair) for pair in zip(x.chunk(n), y.chunk(n), strict=True)]
        if self.strategy is not None and self.setup.schedule:
            pipeline.run(share, parts, self.setup.schedule, stages=self.stages)
            return losses
        for i, part in enumerate(parts):
            with self.strategy.accumulate(self.model, i) if self.strategy else nullcontext():
                share(part).backward()
        return losses

    def _placed(self, x: Tensor, y: Tensor) -> tuple[Any, Any]:
        if self.strategy is None:
            return x, y
        places = self.strategy.batch(1 if self.setup.kind == "gpt" else None)
        first, last = self.stages[0], self.stages[-1]
        return dt.shard_tensor(x, first, places), dt.shard_tensor(y, last, places)

    def _known(self, loss: Any) -> Any:
        """On all ranks, whole."""
        if self.strategy is not None and self.setup.schedule:
            loss = dt.broadcast_value(loss)
        return full(loss)

    def _here(self, *named: Any) -> Iterator[tuple[str, Any]]:
        for name, x in itertools.chain(*named):
            if not isinstance(x, dt.DistTensor) or x.is_initialized:
                yield name, x

    def _autocast(self) -> Any:
        if self.strategy is not None:
            return self.strategy.autocast()
        amp = self.setup.amp
        return torch.autocast("cpu", AMP[amp]) if amp else nullcontext()

    def step(self, number: int) -> dict[str, Any]:
        setup, seen = self.setup, {}
        x, y = batch(setup, number)
        self.optimizer.zero_grad(set_to_none=setup.set_to_none)
        losses = self.shares(x, y, setup.overflow and number == 1)
        seen["loss"] = self._known(sum(losses[1:], losses[0]))
        if setup.clip or setup.edits:
            self.scaler.unscale_(self.optimizer)
        if setup.edits:
            for p in self.params:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        if setup.clip == "value":
            nn.utils.clip_grad_value_(self.params, 0.05)
        elif setup.clip:
            kind = float("inf") if "inf" in setup.clip else 2.0
            seen["norm"] = full(nn.utils.clip_grad_norm_(self.params, 0.3, kind))
        for name, p in self._here(self.model.named_parameters()):
            seen[f"{name}.grad"] = full(p.grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        seen["scale"] = torch.tensor(self.scaler.get_scale())
        if setup.evaluates:
            seen["evaluated"] = self.evaluated(x, y)
        return seen

    def evaluated(self, x: Tensor, y: Tensor) -> Any:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            loss = self.loss(*self._placed(x, y))
        self.model.train()
        return self._known(loss)

    def seen(self) -> list[dict[str, Any]]:
        steps = [self.step(i) for i in range(STEPS)]
        held = self._here(self.model.named_parameters(), self.model.named_buffers())
        return [*steps, {name: full(x) for name, x in held}]


def problems(setup: Setup) -> list[str]:
    """What differs on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        expected = Run(setup, False).seen()
        got = Run(setup, True).seen()
    found: list[str] = []
    for number, (mine, plain) in enumerate(zip(got, expected, strict=True)):
        where = f"step {number}" if number < STEPS else "at the end"
        for name, value in mine.items():
            bounds = tolerance(setup, number, name, plain[name])
            if bounds is None:
                continue
            try:
                torch.testing.assert_close(value, plain[name], **bounds, equal_nan=True)
            except AssertionError as error:
                found.append(f"{where}, {name}: {' '.join(str(error).split())[:300]}")
    return found


def tolerance(setup: Setup, number: int, name: str, plain: Tensor | None) -> Any:
    """(rtol, atol) of what was seen under ``name`` in this step, or at the end; None: any value."""
    rtol, atol = 1e-8, 1e-9
    if setup.amp and number == STEPS:
        rtol, atol = 0.1, OPTIMIZERS[setup.optimizer]["lr"]
    elif setup.amp and name.endswith("grad"):
        if number:  # of parameters that differ
            return None
        finite = plain is not None and bool(plain.isfinite().all())
        rtol, atol = 0.2, 0.2 * (float(plain.abs().max()) + 1e-3) if finite else 0.0
    elif setup.amp:
        rtol, atol = 0.1, 0.02
    return {"rtol": rtol, "atol": atol}


def run(
    setups: Sequence[Setup], progress: str = "",
    differing: Callable[[Setup], list[str]] = problems,
) -> list[str]:  # fmt: skip
    """Reports of the set-ups that fail; runs on every rank. ``progress``: see ``tell``."""
    reports = []
    for i, setup in enumerate(setups):
        tell(progress, i)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, differing(setup))
        lines = [f"  rank {r}: {line}" for r, some in enumerate(told) for line in some[:6]]
        if lines:
            reports.append("\n".join([str(setup), *lines, ""]))
    return reports


def main(first: int, last: int, world: int) -> int:
    """How many of these seeds fail; each is printed."""
    return each_on_ranks(world, run, [make(seed, world) for seed in range(first, last)], 300.0)


if __name__ == "__main__":
    from tests.fuzz import fuzz_training  # not __main__: the ranks find its functions by name

    fuzz(__doc__, "set-ups", fuzz_training.main)
