"""Programs on plain tensors that use what disttensor changes; run with "with" or "without" it.

Prints a JSON object: program -> what came out, or the error.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

if __name__ == "__main__" and sys.argv[1] == "with":
    import disttensor  # noqa: F401

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Program = Callable[[], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def values(*tensors: Any) -> list[Any]:
    return [None if t is None else t.detach().double().flatten().tolist() for t in tensors]


def params() -> list[Any]:
    made = [nn.Parameter(torch.arange(n, dtype=torch.float32) - 1) for n in (3, 5, 1)]
    for p in made[:2]:
        p.grad = torch.linspace(-4, 9, p.numel())
    return made


# Clipping -----------------------------------------------------------------------------------------


@program
def clip_norm() -> Any:
    out = []
    for order in (2.0, 1.0, float("inf"), 0.0):
        for foreach in (None, True, False):
            ps = params()
            norm = nn.utils.clip_grad_norm_(ps, 1.5, order, foreach=foreach)
            out.append(values(norm, *[p.grad for p in ps]))
    return out


@program
def clip_forms() -> Any:
    ps = params()
    found = [nn.utils.clip_grad_norm_(ps[0], 0.5), nn.utils.clip_grad_norm_(iter(ps), 0.25)]
    found.append(nn.utils.clip_grad_norm_((p for p in ps), 0.1, "inf"))
    found += [nn.utils.clip_grad_norm_([], 1.0), nn.utils.get_total_norm([p.grad for p in ps[:2]])]
    nn.utils.clip_grads_with_norm_(ps, 0.01, torch.tensor(3.0))
    return values(*found, *[p.grad for p in ps])


@program
def clip_value() -> Any:
    out = []
    for foreach in (None, True, False):
        ps = params()
        nn.utils.clip_grad_value_(ps, 2.0, foreach=foreach)
        out.append(values(*[p.grad for p in ps]))
    nn.utils.clip_grad_value_((p for p in ps), 1.0)
    return out, values(*[p.grad for p in ps])


@program
def clip_value_of_nothing() -> Any:
    nn.utils.clip_grad_value_(params()[2], 1.0)


@program
def clip_error_if_nonfinite() -> Any:
    ps = params()
    ps[0].grad[1] = float("inf")
    nn.utils.clip_grad_norm_(ps, 1.0)
    nn.utils.clip_grad_norm_(ps, 1.0, error_if_nonfinite=True)


@program
def clip_empty_generator() -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        norm = nn.utils.clip_grad_norm_((p for p in ()), 1.0)
    return values(norm), [str(w.message) for w in seen]


# Checkpoint ---------------------------------------------------------------------------------------


def region(x: Any, w: Any = 2.0) -> Any:
    return F.dropout((x * w).sin(), 0.5) * F.dropout(x.cos(), 0.2)


def gradients(run: Callable[[Any, Any], Any]) -> Any:
    torch.manual_seed(4)
    x, w = torch.randn(5, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    out = run(x, w)
    out.sum().backward()
    return values(out, x.grad, w.grad, torch.rand(3))


@program
def checkpoint_plain() -> Any:
    return [
        gradients(lambda x, w, how=how: checkpoint(region, x * 2, w, **how))
        for how in (
            {"use_reentrant": True},
            {"use_reentrant": False},
            {"use_reentrant": False, "preserve_rng_state": False},
            {"use_reentrant": False, "determinism_check": "none"},
            {"use_reentrant": False, "debug": True},
            {"use_reentrant": False, "early_stop": False},
        )
    ]


@program
def checkpoint_nested() -> Any:
    def inner(x: Any, w: Any) -> Any:
        return region(checkpoint(region, x + 1, w, use_reentrant=False), w)

    return [
        gradients(lambda x, w: checkpoint(inner, x, w, use_reentrant=False)),
        gradients(lambda x, w: checkpoint(inner, x, w=w, use_reentrant=False)),
    ]


@program
def checkpoint_of_sequence() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    return gradients(lambda x, w: checkpoint_sequential(model, 2, x * w, use_reentrant=False))


@program
def checkpoint_contexts() -> Any:
    save = torch.utils.checkpoint.create_selective_checkpoint_contexts

    def contexts() -> Any:
        return save([torch.ops.aten.sin.default])

    return gradients(
        lambda x, w: checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)
    )


@program
def checkpoint_that_changes() -> Any:
    runs: list[int] = []

    def changing(x: Any) -> Any:
        runs.append(1)
        return x.sin() if len(runs) == 1 else x[:2].sin()

    return gradients(lambda x, w: checkpoint(changing, x * w, use_reentrant=False))


@program
def checkpoint_that_fails() -> Any:
    def failing(x: Any) -> Any:
        raise ValueError("in the forward")

    return gradients(lambda x, w: checkpoint(failing, x * w, use_reentrant=False))


@program
def checkpoint_twice() -> Any:
    x = torch.randn(4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = checkpoint(lambda t: t.sin() * t, x * 1, use_reentrant=False).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    return values(g, h)


# Custom functions ---------------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Any, by: float) -> Any:
        return a * by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.by, None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any) -> Any:
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (a,) = ctx.saved_tensors
        return g * 3 * a**2


class Once(Cube):
    backward = staticmethod(torch.autograd.function.once_differentiable(Cube.backward))


def double_backward(function: Any) -> Any:
    x = torch.arange(1.0, 4.0, requires_grad=True)
    (g,) = torch.autograd.grad(function.apply(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)
    return values(g, h)


@program
def custom() -> Any:
    x = torch.arange(3.0, requires_grad=True)
    (g,) = torch.autograd.grad(Scale.apply(x, 3.0).sum(), x)
    f = torch.func.grad(lambda t: Scale.apply(t, 5.0).sum())(torch.ones(2))
    v = torch.func.vmap(lambda t: Scale.apply(t, 2.0))(torch.ones(2, 3))
    return values(g, f, v), double_backward(Cube), Scale.apply.__name__


@program
def custom_once_differentiable() -> Any:
    return double_backward(Once)


# Scaler, zero_grad, init --------------------------------------------------------------------------


@program
def scaler() -> Any:
    out = []
    for make in (torch.optim.SGD, torch.optim.AdamW):
        scale = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        ps = params()
        optimizer = make(ps, lr=0.1)
        for i in range(4):
            optimizer.zero_grad()
            scale.scale(sum((p * p).sum() for p in ps)).backward()
            if i == 1:
                ps[0].grad[0] = float("nan")
            scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
            out.append((scale.get_scale(), values(*ps)))
    return out


@program
def scaler_unscales_once() -> Any:
    scale = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(params(), lr=0.1)
    scale.scale(torch.ones(()))
    scale.unscale_(optimizer)
    scale.unscale_(optimizer)


@program
def zero_grad() -> Any:
    out = []
    for none in (True, False):
        model = nn.Linear(2, 2)
        for of in (model, torch.optim.SGD(model.parameters(), lr=1.0)):
            model(torch.ones(1, 2)).sum().backward()
            of.zero_grad(set_to_none=none)
            out.append(values(model.weight.grad, model.bias.grad))
    return out


@program
def init() -> Any:
    torch.manual_seed(0)
    made = []
    for name in ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_",
                 "orthogonal_", "eye_", "zeros_"):  # fmt: skip
        made.append(getattr(nn.init, name)(torch.empty(4, 3)))
    made += [nn.init.sparse_(torch.empty(4, 3), 0.5), nn.init.dirac_(torch.empty(3, 3, 2))]
    generator = torch.Generator().manual_seed(1)
    made.append(nn.init.trunc_normal_(torch.empty(9), 0.0, 1.0, -0.5, 2.0, generator=generator))
    return values(*made)


@program
def optimizers() -> Any:
    out = []
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS):
        ps = params()[:2]
        optimizer = make(ps, lr=0.1)

        def closure(ps: Any = ps, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = sum((p * p).sum() for p in ps)
            loss.backward()
            return loss

        optimizer.step(closure)
        out.append(values(*ps))
    return out


# Compiled -----------------------------------------------------------------------------------------


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    out = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        torch.manual_seed(2)
        out.append(torch.compile(function, fullgraph=True, backend=backend)(*args))
    return out


@program
def compile_clip_norm() -> Any:
    ps = params()
    norms = [compiled(lambda f=f: nn.utils.clip_grad_norm_(ps, 1.0, foreach=f)) for f in (None, 0)]
    return values(*norms[0], *norms[1], *[p.grad for p in ps])


@program
def compile_clip_value() -> Any:
    ps = params()[:2]
    compiled(lambda: nn.utils.clip_grad_value_(ps, 0.5))
    return values(*[p.grad for p in ps])


@program
def compile_total_norm() -> Any:
    grads = [p.grad for p in params()[:2]]
    return values(*compiled(lambda: nn.utils.get_total_norm(grads)))


@program
def compile_checkpoint() -> Any:
    x = torch.arange(6.0, requires_grad=True)
    out = compiled(lambda t: checkpoint(lambda s: s.sin().cos(), t, use_reentrant=False), x)
    sum(o.sum() for o in out).backward()
    return values(*out, x.grad)


@program
def compile_custom() -> Any:
    x = torch.arange(3.0, requires_grad=True)
    out = compiled(Cube.apply, x)
    sum(o.sum() for o in out).backward()
    return values(*out, x.grad)


@program
def compile_with_custom_inside() -> Any:
    x = torch.arange(3.0, requires_grad=True)
    out = compiled(lambda t: Cube.apply(t) + Scale.apply(t, 2.0), x)
    sum(o.sum() for o in out).backward()
    return values(*out, x.grad)


@program
def compile_zero_grad() -> Any:
    model = nn.Linear(2, 2)

    def run(x: Any) -> Any:
        model.zero_grad()
        return model(x)

    compiled(run, torch.ones(1, 2))
    return values(model.weight.grad)


@program
def compile_init() -> Any:
    return [values(*compiled(f, torch.empty(4, 3))) for f in (nn.init.zeros_, nn.init.eye_)]


@program
def compile_trunc_normal() -> Any:
    return values(*compiled(nn.init.trunc_normal_, torch.empty(4, 3)))


@program
def compile_step() -> Any:
    ps = params()[:2]
    torch._dynamo.reset()
    torch.compile(torch.optim.SGD(ps, lr=0.1).step, backend="eager")()
    return values(*ps)


def main() -> None:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, run in PROGRAMS.items():
        try:
            found[name] = run()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:300]}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
