"""Programs in which a tensor is derived from another one (a reshard, a view, a reduction that is
kept), the source or the result is changed afterwards (in place, ``data =``, hooks, freezing), and
both are used again, forward and backward: the values, gradients and errors of one process.

    python -m tests.fuzz.fuzz_changes --seeds 0:2000 --world 2
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

import disttensor as dt
from disttensor import DistTensor, ProcessMesh
from tests.fuzz.command_line import each_seed, fuzz, report_of, tell
from tests.fuzz.fuzz_programs import (
    difference,
    everyone,
    mesh_for,
    refused,
    simpler_cases,
    where,
    whole,
)
from tests.fuzz.fuzz_world import Program, World, execute, numbers, placements
from tests.support import oracle, pool

SECONDS = 30.0
MODIFIED = "modified by an inplace operation"
SHAPES = {2: [(2,)], 4: [(4,), (2, 2)]}  # of meshes


@dataclass
class Changing(World):
    """A world with reshards that copy, tensors that make a use vary, and a list of what hooks
    saw."""

    seen: list[Any] = field(default_factory=list)
    modes: ExitStack = field(default_factory=ExitStack)

    def names(self) -> dict[str, Any]:
        own = ("moved", "varying", "see", "replayed", "step", "packed")
        return super().names() | {name: getattr(self, name) for name in own}

    def moved(self, x: Any, where: str) -> Any:
        if not isinstance(x, DistTensor) or list(x.placements) == placements(where):
            return x.clone()
        return self.to(x, where)

    def varying(self, x: Any, number: int = 50) -> Any:
        """Returns a tensor of the shape of x, split over the first axis of the mesh."""
        others = self.mesh.ndim - 1 if self.mesh is not None else 0
        where = " ".join(["S0" if x.ndim else "R", *["R"] * others])
        return self._given(numbers(number, tuple(x.shape)), where)

    def see(self, g: Any) -> None:
        self.seen.append(None if g is None else g.detach().clone())

    def replayed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn if self.mesh is None else dt.replay(fn)

    def step(self, x: Any, **options: Any) -> None:
        """One step of an optimizer with a gradient of its own; x keeps its gradient. In one process
        it takes torch's loop: autograd does not count what a fused step writes."""
        kept, x.grad = x.grad, (x * 0.5).detach()
        options = options if self.mesh is not None else {}
        torch.optim.SGD([x], 0.5, **options).step()
        x.grad = kept

    def packed(self) -> None:
        """Saved tensors go through hooks from here on."""
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 1.0,), lambda box: box[0])
        self.modes.enter_context(hooks)


# The leaf w and the source x; {a}, {s}, {b}, {c}: placements
SOURCES = {
    "leaf": ("w = leaf(1, (4, 4), {a!r})", "x = w"),
    "result": ("w = leaf(1, (4, 4), {a!r})", "x = w * 1.0"),
    "pending": ("w = leaf(1, (4, 4, 4), {s!r})", "x = w.sum(0)"),
    "frozen": ("w = leaf(1, (4, 4), {a!r}).requires_grad_(False)", "x = w"),
    "view": ("w = leaf(1, (2, 8), {a!r})", "x = (w * 1.0).view(4, 4)"),
}
DERIVED = {
    "reshard": "h = moved(x, {b!r})",
    "two reshards": "h = moved(moved(x, {b!r}), {c!r})",
    "view": "h = x.t()",
    "flat view": "h = x.view(16)",
    "slice": "h = x[1:]",
    "unsqueezed": "h = x.unsqueeze(0)",
    "view of a reshard": "h = moved(x, {b!r}).t()",
    "reshard of a view": "h = moved(x.t(), {b!r})",
    "detached": "h = x.detach()",
    "cheap": "h = x * 2",
    "relu": "h = torch.relu(x)",
    "reduced": "h = x.exp()",
    "gathered": "h = x.softmax(0)",
    "product": "h = x @ x.t()",
    "recomputed": "h = ckpt(lambda t: (t * 2).sin() + 1, x)",
    "recomputed view": "h = ckpt(lambda t: (t * 2).sin() + 1, x.t())",
    "recorded": "f = replayed(lambda t: (t * 2).t() + t.sum(0)); h = f(x); h = f(x)",
    "same": "h = x",
}
CHANGES = {
    "mul": "{t}.mul_(3)", "zero": "{t}.zero_()", "item": "{t}[0] = 7.0",
    "add": "{t}.add_(varying({t}))", "fill": "{t}.masked_fill_({t} > 0, 0.5)",
    "copy": "{t}.copy_(const(7, tuple({t}.shape)))", "list": "torch._foreach_mul_([{t}], 3)",
    "data": "{t}.data = ({t} * 3).detach()", "data of a split": "{t}.data = varying({t})",
    "data write": "{t}.data.mul_(3)", "data item": "{t}.data[0] = 7.0",
    "detach write": "{t}.detach().mul_(3)",
    "set": "with torch.no_grad(): {t}.set_(({t} * 3).detach())", "detach": "{t}.detach_()",
    "freeze": "{t}.requires_grad_(False)",
    "unfreeze": "{t}.requires_grad_()", "no grad": "with torch.no_grad(): {t}.mul_(3)",
    "no grad copy": "with torch.no_grad(): {t}.copy_(const(7, tuple({t}.shape)))",
    "no grad item": "with torch.no_grad(): {t}[1] = 7.0",
    "transpose": "{t}.t_()", "unsqueeze": "{t}.unsqueeze_(0)",
    "step": "step({t})", "fused": "step({t}, fused=True)", "list step": "step({t}, foreach=True)",
    "delete": "del {t}", "collect": "import gc; gc.collect()",
    "hook": "hook({t}, lambda g: g.clamp(max=0.5))", "look": "hook({t}, see)",
    "double": "hook({t}, lambda g: g * 2)", "keep": "keep({t})",
    "post": "{t}.register_post_accumulate_grad_hook(lambda p: see(p.grad))",
    "post write": "{t}.register_post_accumulate_grad_hook(lambda p: see(p.grad.mul_(2)))",
    "node": "{t}.grad_fn.register_hook(lambda given, got: None)",
    "removed": "hook({t}, lambda g: g * 5).remove()" , "no gradient": "{t}.grad = None",
    "gradient": "see({t}.grad)", "packed": "packed()",
    "between": "((h * 2).sum() + (x * varying(x, 51)).sum()).backward(retain_graph=True)",
    "between split": "(h * varying(h, 52)).sum().backward(retain_graph=True)",
    "freeze and back": "{t}.requires_grad_(False); see({t}.grad); {t}.requires_grad_()",
    "double data": "{t}.data = {t}.data", "view write": "{t}.t().mul_(3)",
    "inference": "with torch.inference_mode(): see({t} * 2)",
}  # fmt: skip
VIEWS = r"x\.(view|t|unsqueeze)\(|x\[1:\]|\.view\(|\.t\(\)"
USES = (
    "", "(h * varying(h)).sum()", "(h * 2).sum()", "(x * varying(x)).sum()", "(x * 2).exp().sum()",
    "(w * varying(w)).sum()", "(h ** 2).sum()",
)  # fmt: skip
PLACES = ("R", "S0", "S1", "P", "Pavg")


@dataclass(frozen=True)
class Case:
    program: Program
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.program}\n# mesh {self.shape}"


def make(seed: int, world: int) -> Case:
    draw = random.Random(f"changes {seed} in {world}")
    shape = draw.choice(SHAPES[world])

    def places(kinds: Sequence[str] = PLACES) -> str:
        words = [draw.choice(kinds) for _ in shape]
        return " ".join("P" if "P" in words and w == "Pavg" else w for w in words)

    marks = {"a": places(), "s": places(("S0", "R")), "b": places(), "c": places(PLACES[:3])}
    lines = [*draw.choice([*SOURCES.values()]), draw.choice([*DERIVED.values()])]
    lines = [line.format(**marks) for line in lines]
    if lines[0].endswith("(False)") and "x." in lines[-1]:
        lines[-1] = "h = x * 2"  # torch gives a view of a frozen leaf a graph when it is unfrozen
    terms = []
    for _ in range(draw.choice((1, 1, 2))):
        before = draw.choice(USES)
        if before:
            terms.append(f"u{len(terms)}")
            lines.append(f"{terms[-1]} = {before}")
        lines.append(draw.choice([*CHANGES.values()]).format(t=draw.choice("xxwh")))
    for after in draw.sample(USES[1:], draw.choice((1, 2))):
        terms.append(f"u{len(terms)}")
        lines.append(f"{terms[-1]} = {after}")
    lines.append("loss = " + " + ".join(terms))
    text = "\n".join(lines)
    written = re.search(r"no_grad|\] =|_\(", text.replace("requires_grad_(", ""))
    if written and ("hook(" in text or "keep(" in text) and re.search(VIEWS, text):
        return make(seed + 1_000_000, world)  # torch itself crashes
    end = draw.choice(("backward", "backward", "twice"))
    return Case(Program(tuple(lines), end, f"seed {seed}"), shape)


def outcome(program: Program, world: Changing) -> dict[str, Any]:
    """Returns the values, gradients and what hooks saw, or the error."""
    try:
        with world.modes:
            values, grads = execute(program, world)
    except Exception as error:
        return {"error": error}
    seen = {f"seen {i}": g for i, g in enumerate(world.seen)}
    return values | {f"gradient of {k}": g for k, g in grads.items()} | seen


def hides_a_write(program: Program) -> bool:
    """Returns True if a tensor that a graph may have saved is written where neither torch nor its
    ``allow_mutation_on_saved_tensors`` notices: by ``.data``, or through a view."""
    lines = program.lines
    used = next((i for i, line in enumerate(lines) if line[0] == "u" or "backward" in line), 0)
    return any(re.search(r"\.data\b|\[[01]\] =|\.t\(\)\.mul_", line) for line in lines[used:])


def expected(program: Program) -> dict[str, Any]:
    """Returns the outcome in one process. Where torch refuses a saved tensor that was written, that
    of a torch which kept the old value: DistTensors may save a reduced or gathered value, which the
    write does not reach. The mode that keeps it does not see what functions of lists write."""
    plain = outcome(program, Changing())
    if MODIFIED in str(plain.get("error")) and "_foreach_" not in str(program):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            return outcome(program, Changing()) | {"may raise": True}
    return plain


# Of a graph with the old layout, after ``data =`` of another; our refusals; torch's alone
OURS = "its data were set to a value of another layout", "nothing was moved"
BY_NAME = (
    "whose backward expects a gradient in its layout",
    "an argument of a checkpointed region, has been modified",
    "its gradient was reduced together with that of earlier backwards",
    "do not pass through it any more",
)
THEIRS = (
    "a view of a leaf Variable that requires grad is being used in an in-place operation",
    "saved tensor that has been detached in-place",
)


def problems(program: Program, mesh: ProcessMesh) -> list[str]:
    """Returns the differences from one process; collective."""
    plain = expected(program)
    may_raise = plain.pop("may raise", False) or "error" in plain
    with oracle.fallbacks(), dt.debugging.compare_ranks(SECONDS):
        ours = outcome(program, Changing(mesh))
        try:
            fulls = {k: whole(v) for k, v in ours.items() if k != "error"}
        except Exception as error:
            ours = {"error": error}
    error = ours.get("error")
    if error is not None:
        ours_only = isinstance(error, (dt.errors.MismatchError, RecursionError))
        to_another = any(".data = varying(" in line for line in program.lines)
        moved = to_another and any(text in str(error) for text in OURS)
        named = any(text in str(error) for text in BY_NAME)
        right = refused(error) or moved or named or (may_raise and not ours_only)
        text = f"{type(error).__name__}: {str(error)[:600]}{where(error)}"
        return everyone([] if right else [text])
    if "error" in plain:
        if any(text in str(plain["error"]) for text in (*THEIRS, MODIFIED)):
            return everyone([])
        return everyone([f"no error; torch: {str(plain['error'])[:200]}"])
    found: list[str] = []
    if hides_a_write(program) or (may_raise and re.search(VIEWS + r"|detach\(", str(program))):
        plain, ours = ({k: v for k, v in x.items() if " " not in k} for x in (plain, ours))
    for k in {**plain, **ours}:
        mine, want = fulls.get(k), plain.get(k)
        if isinstance(mine, torch.Tensor) and isinstance(want, torch.Tensor):
            found += difference(k, mine, want.detach())
            if ours[k].requires_grad != want.requires_grad:
                found.append(f"{k}: requires_grad {ours[k].requires_grad}")
        elif any(x is not None and bool(x.any()) for x in (mine, want)):
            found.append(f"{k}: {mine}, plain {want}")
    return everyone(found)


def run(cases: Sequence[Case], progress: str = "") -> list[str]:
    """Returns reports of the cases that fail, up to the first after which ranks may be out of step;
    runs on every rank. ``progress``: see ``tell``."""
    reports = []
    for i, case in enumerate(cases):
        tell(progress, i)
        found = problems(case.program, mesh_for(case.shape))
        if found:
            reports.append("\n".join([str(case), *(text[:1500] for text in found), ""]))
            if any("MismatchError" in text for text in found):
                break
    return reports


def failure(case: Case) -> str:
    """Returns the report of a case, or "" if it is right."""
    world = math.prod(case.shape)
    report = report_of(world, run, case)
    if "MismatchError" in report:
        pool.stop(world)
    return report


def is_defined(program: Program) -> bool:
    """Returns True if each line reads names that lines before it assign."""
    known: set[str] = set()
    for line in program.lines:
        names = [n for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Name)]
        names = [n for n in names if re.fullmatch(r"[wxhfu]\d*", n.id)]
        known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
        if not known.issuperset(n.id for n in names):
            return False
    return True


def main(first: int, last: int, world: int) -> int:
    return each_seed(range(first, last), world, make, failure, simpler_cases(is_defined))


if __name__ == "__main__":
    from tests.fuzz import fuzz_changes  # not __main__: the ranks find its functions by name

    fuzz(__doc__, "programs", fuzz_changes.main)
