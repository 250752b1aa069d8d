"""Writing the fuzzer's programs: lines of ordinary torch, executed on plain tensors as the program
grows.

Each ``@op`` gives the text of one statement over what is there; a line that raises, or whose
numbers grow wild, is dropped again.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.fuzz_world import Program, World, steady

# Shapes that meet in one program
FAMILIES = (
    [(5, 3), (5, 3), (3,), (5,), (3, 5), (5, 1), (), (1, 3), (3, 3)],
    [(6, 4), (6, 4), (4,), (6,), (4, 6), (4, 4), (1, 4), (), (8, 4)],
    [(2, 3, 4), (3, 4), (4,), (2, 4, 3), (4, 5), (3, 1), (2, 3, 4), (1,)],
    [(7,), (7,), (7, 2), (2, 7), (1,), (2,), (), (7, 7)],
    [(2, 4, 2, 3), (4, 6), (3,), (2, 3), (8, 6), (3, 2)],
)


class Writer:
    """Grows one program, executing each line on plain tensors."""

    def __init__(self, seed: int, axes: int) -> None:
        self.rng = random.Random(f"{seed} {axes}")
        self.axes = axes
        self.world = World()
        self.env = self.world.names()
        self.fixed = set(self.env)
        self.lines: list[str] = []
        self.frozen: set[int] = set()  # storages that a reshard may share or not: never written
        self.count = 0
        self.number = 0

    # choices

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def one(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def form(self, text: str) -> str:
        """One of the forms that ``text`` lists, separated by bars and line breaks."""
        return self.one(*re.split(r" \| |\s*\n\s*", text.strip()))

    def floats(self, ok: Callable[[Tensor], bool] = lambda t: True) -> list[str]:
        return [
            k
            for k, v in self.env.items()
            if k not in self.fixed and isinstance(v, Tensor) and v.dtype == torch.float64 and ok(v)
        ]

    def any_of(self, ok: Callable[[Tensor], bool] = lambda t: True) -> str:
        names = self.floats(ok)
        if not names:
            raise LookupError
        recent = names[-3:]
        return self.rng.choice(recent if self.chance(0.5) else names)

    def value(self, name: str) -> Tensor:
        return self.env[name]

    def where(self, ndim: int, grad: bool = True, partial: bool = True) -> str:
        kinds = ["R", "R", *(f"S{d}" for d in range(ndim)), *(f"S{d}" for d in range(ndim))]
        if self.chance(0.2):
            kinds += [f"B{d}" for d in range(ndim)]
        if partial:
            kinds += ["P", "P", "Pavg"] if self.chance(0.5) else ["P"]
        words = [self.one(*kinds) for _ in range(self.axes)]
        if "P" in words and "Pavg" in words:  # one reduction for all axes, as for users
            words = ["P" if w == "Pavg" else w for w in words]
        return " ".join(words)

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def next_number(self) -> int:
        self.number += 1
        return self.number

    # growing

    def add(self, line: str) -> bool:
        """Execute the line; keep it if it works and its numbers are tame."""
        before = dict(self.env)
        versions = {
            k: v.detach().clone()
            for k, v in before.items()
            if k not in self.fixed and isinstance(v, Tensor)
        }
        leaves, kept = dict(self.world.leaves), list(self.world.kept)
        try:
            exec(compile(line, "<writing>", "exec"), self.env)
            for k, v in self.env.items():
                if k not in self.fixed and isinstance(v, Tensor) and not tame(v):
                    raise ValueError
            fine = (
                self.differentiable()
                if "_(" in line or "=" in line.replace(" = ", "", 1) or "] =" in line
                else True
            )
        except Exception:
            fine = False
        if not fine:
            self.env.clear()
            self.env.update(before)
            self.world.leaves.clear()
            self.world.leaves.update(leaves)
            self.world.kept[:] = kept
            if any(
                k in versions and not torch.equal(versions[k], before[k].detach())
                for k in versions
                if before[k].numel()
            ):
                raise RuntimeError("a write that failed half way; this seed is given up")
            return False
        self.lines.append(line)
        return True

    def differentiable(self) -> bool:
        ends = [self.env[k] for k in self.floats(lambda t: t.requires_grad)]
        leaves = list(self.world.leaves.values())
        if ends and leaves:
            torch.autograd.grad(
                sum(e.sum() for e in ends), leaves, retain_graph=True, allow_unused=True
            )
        return True

    def starts(self) -> None:
        shapes = self.one(*FAMILIES)
        for _ in range(self.rng.randint(2, 4)):
            shape = self.one(*shapes)
            n = self.next_number()
            where = self.where(len(shape))
            kind = self.rng.random()
            if kind < 0.7 or n == 1:
                self.add(f"v{n} = leaf({n}, {shape}, {where!r})")
            elif kind < 0.85:
                self.add(f"v{n} = data({n}, {shape}, {where!r})")
            else:
                self.add(f"v{n} = plain({n}, {shape})")
            self.count = n
            if self.chance(0.4):
                self.add(f"{self.new()} = v{n} * 1.0")
                self.number = self.count

    def op(self) -> None:
        for _ in range(20):
            try:
                line = self.rng.choices(OPS, weights=WEIGHTS)[0](self)
            except (LookupError, ValueError, IndexError, ZeroDivisionError):
                continue
            if line and self.add(line):
                if any(f" {name}(" in line for name in ("to", "again", "full")):
                    for k in self.floats():
                        if f"{k} =" in line or f"{k}," in line or f"{k})" in line:
                            self.frozen.add(self.value(k).untyped_storage().data_ptr())
                return

    def finish(self) -> None:
        names = self.floats(lambda t: t.requires_grad)
        if not names:
            raise LookupError
        chosen = list(dict.fromkeys([*self.rng.sample(names, min(len(names), 2)), names[-1]]))
        terms = []
        for k in chosen:
            v = self.value(k)
            weight = f"const({self.next_number()}, {tuple(v.shape)})"
            form = self.one(
                "({x} * {w}).sum()",
                "({x} * {w}).sum()",
                "(full({x}) * {w}).sum()",
                "({x} ** 2).sum()",
                "({x} * {w}).mean()" if v.numel() else "{x}.sum()",
                "{x}.sum()",
            )
            terms.append(form.format(x=k, w=weight))
        if not self.add("loss = " + " + ".join(terms)):
            raise LookupError

    def program(self, name: str) -> Program:
        inplace = any(
            "_(" in line or "] =" in line or "=" in line.split(" = ", 1)[0] for line in self.lines
        )
        # torch's formulas save results, whose hooks then run for the second order: not a rule to
        # hold
        once = inplace or any("hook(" in line for line in self.lines)
        end = self.one(
            "backward", "backward", "backward", "twice", "grad", "backward" if once else "double"
        )
        return Program(tuple(self.lines), end, name)


def make(seed: int, axes: int) -> Program:
    """The program of a seed: 3 to 8 operations over 2 to 4 starting tensors. Some seeds need
    several tries."""
    return search(seed, lambda s: Writer(s, axes), (3, 8), f"seed {seed}, {axes} axes", steady)


def search(
    seed: int, writer: Callable[[int], Any], ops: tuple[int, int], name: str,
    good: Callable[[Any], bool],
) -> Any:  # fmt: skip
    """The first program that a writer finishes and that is ``good``."""
    for attempt in range(50):
        w = writer(seed * 100 + attempt)
        with warnings.catch_warnings(), contextlib.suppress(LookupError, RuntimeError):
            warnings.simplefilter("error")
            w.starts()
            for _ in range(w.rng.randint(*ops)):
                w.op()
            w.finish()
            program = w.program(name)
            if good(program):
                return program
    raise RuntimeError(f"no program for seed {seed}")


def tame(v: Tensor) -> bool:
    """Small, and with small numbers."""
    if v.numel() > 300 or v.ndim > 4:
        return False
    return not (v.dtype.is_floating_point and v.numel()) or float(v.detach().abs().max()) < 200


# The pool of operations: each gives the text of a statement ---------------------------------------

Op = Callable[[Writer], "str | None"]
OPS: list[Op] = []
WEIGHTS: list[float] = []


def op(weight: float) -> Callable[[Op], Op]:
    def register(f: Op) -> Op:
        OPS.append(f)
        WEIGHTS.append(weight)
        return f

    return register


def dim(w: Writer, v: Tensor) -> int:
    return w.rng.randrange(-v.ndim, v.ndim) if v.ndim else 0


@op(4)
def unary(w: Writer) -> str:
    x = w.any_of()
    form = w.form(
        """
        torch.tanh({x}) | torch.sigmoid({x}) | torch.sin({x}) | -{x} | {x}.abs() | F.relu({x})
        F.gelu({x}) | F.silu({x}) | {x} * 2 | {x} + 0.5 | 1 - {x} | {x} / 3 | 0.5 * {x}
        {x} ** 2 | {x}.clamp(-0.5, 0.7) | F.softplus({x}) | F.leaky_relu({x}, 0.1) | {x}.clone()
        {x}.double() | {x}.neg() | {x}.exp() | {x}.square()
        torch.masked_fill({x}, {x} > 0.3, 0.25) | F.threshold({x}, 0.1, 0.0)
        F.dropout({x}, 0.5, False) | {x}.tril() | {x}.triu(1) | torch.zeros_like({x}) + {x}
        {x}.new_ones({x}.shape) * {x} | torch.ones_like({x}) | {x}.rsub(1.5) | {x}.nan_to_num()
        """
    )
    return f"{w.new()} = {form.format(x=x)}"


@op(5)
def binary(w: Writer) -> str:
    x, y = w.any_of(), w.any_of()
    form = w.form(
        """
        {x} + {y} | {x} + {y} | {x} - {y} | {x} * {y} | {x} * {y} | torch.maximum({x}, {y})
        torch.where({x} > 0.1, {x}, {y}) | torch.where({x} > 0.1, {x}, 0.5)
        torch.atan2({x}, {y}.abs() + 1) | {x} / ({y} ** 2 + 1) | torch.lerp({x}, {y}, 0.3)
        torch.addcmul({x}, {x}, {y}, value=0.5) | torch.add({x}, {y}, alpha=2)
        torch.sub({x}, {y}, alpha=0.5) | torch.where({x} > {y}, {x}, {y} * 2)
        torch.hypot({x}, {y}) | F.mse_loss({x}, {y}) | F.mse_loss({x}, {y}, reduction='none')
        F.l1_loss({x}, {y}, reduction='sum')
        """
    )
    return f"{w.new()} = {form.format(x=x, y=y)}"


@op(4)
def matmul(w: Writer) -> str:
    x = w.any_of(lambda t: t.ndim >= 1)
    n = w.value(x).shape[-1]
    form = w.form(
        """
        {x} @ {k} | {x} @ {k}.t() | F.linear({x}, {n}) | F.linear({x}, {n}, {b})
        torch.bmm({x}, {y}) | torch.einsum('ij,kj->ik', {x}, {n}) | torch.addmm({b}, {x}, {k})
        torch.outer({v}, {v2}) | torch.matmul({x}, {y}) | {x} @ {x}.transpose(-1, -2)
        torch.dot({v}, {v}) | torch.mv({x}, {v}) | {x} @ {v}
        """
    )
    names = {"x": x, "y": w.any_of(), "k": x, "n": x, "b": x, "v": x, "v2": x}
    with contextlib.suppress(LookupError):
        names["k"] = w.any_of(lambda t: t.ndim == 2 and t.shape[0] == n)
    with contextlib.suppress(LookupError):
        names["n"] = w.any_of(lambda t: t.ndim == 2 and t.shape[1] == n)
    with contextlib.suppress(LookupError):
        names["v"] = w.any_of(lambda t: t.ndim == 1 and t.shape[0] == n)
    with contextlib.suppress(LookupError):
        names["v2"] = w.any_of(lambda t: t.ndim == 1)
    out = w.value(names["n"]).shape[0] if w.value(names["n"]).ndim else 1
    with contextlib.suppress(LookupError):
        names["b"] = w.any_of(lambda t: t.ndim == 1 and t.shape[0] == out)
    return f"{w.new()} = {form.format(**names)}"


def viewed(w: Writer, x: str) -> str:
    v = w.value(x)
    d, e = dim(w, v), dim(w, v)
    shape = list(v.shape)
    kind = w.form(
        """
        flat | split | transpose | permute | unsqueeze | squeeze | expand | merge | T | movedim
        """
    )
    if kind == "flat":
        return w.one(f"{x}.view(-1)", f"{x}.reshape(-1)", f"{x}.flatten()")
    if kind == "split" and v.ndim:
        n = shape[d]
        k = w.one(*[k for k in (2, 3, 4, n) if n and n % k == 0])
        new = [*shape[: d % v.ndim], k, n // k, *shape[d % v.ndim + 1 :]]
        return w.one(
            f"{x}.view({new})", f"{x}.reshape({new})", f"{x}.unflatten({d}, ({k}, {n // k}))"
        )
    if kind == "merge" and v.ndim > 1:
        a = w.rng.randrange(v.ndim - 1)
        new = [*shape[:a], shape[a] * shape[a + 1], *shape[a + 2 :]]
        return w.one(f"{x}.view({new})", f"{x}.flatten({a}, {a + 1})", f"{x}.reshape({new})")
    if kind == "transpose":
        return f"{x}.transpose({d}, {e})"
    if kind == "permute":
        return f"{x}.permute({w.rng.sample(range(v.ndim), v.ndim)})"
    if kind == "unsqueeze":
        return f"{x}.unsqueeze({w.rng.randrange(-v.ndim - 1, v.ndim + 1)})"
    if kind == "squeeze":
        return w.one(f"{x}.squeeze()", f"{x}.squeeze({d})")
    if kind == "expand":
        return w.one(
            f"{x}.expand(2, {', '.join('-1' for _ in shape)})" if shape else f"{x}.expand(3)",
            f"{x}.expand({[2 if s == 1 else s for s in shape]})",
        )
    if kind == "T":
        return f"{x}.t()" if v.ndim == 2 else f"{x}.mT" if v.ndim else f"{x}.t()"
    return f"{x}.movedim({d}, {e})"


@op(6)
def view(w: Writer) -> str:
    return f"{w.new()} = {viewed(w, w.any_of())}"


@op(4)
def reduction(w: Writer) -> str:
    x = w.any_of()
    v = w.value(x)
    f = w.form(
        """
        sum | sum | mean | amax | amin | var | std | norm | logsumexp | max | prod | min | max2
        median2 | softmin | vector_norm | inf | nansum
        """
    )
    keep = w.one("", ", keepdim=True")
    d = dim(w, v)
    if f == "max2":
        return f"{w.new()} = {x}.max({d}{keep}).values"
    if f == "median2":
        return f"{w.new()} = {x}.min({d}{keep})[0]"
    if f == "softmin":
        return f"{w.new()} = {x}.sort({d}).values"
    if f == "vector_norm":
        return f"{w.new()} = torch.linalg.vector_norm({x}, 3)"
    if f == "inf":
        return f"{w.new()} = torch.linalg.vector_norm({x}, float('inf'), {d})"
    if w.chance(0.35) and f != "logsumexp":
        return f"{w.new()} = {x}.{f}()"
    if v.ndim > 1 and w.chance(0.3) and f not in ("max", "min", "prod"):
        ds = tuple(w.rng.sample(range(v.ndim), 2))
        return f"{w.new()} = {x}.{f}(dim={ds}{keep})"
    return f"{w.new()} = {x}.{f}(dim={d}{keep})" + (".values" if f in ("max", "min") else "")


@op(3)
def along(w: Writer) -> str:
    x = w.any_of(lambda t: t.ndim >= 1)
    v = w.value(x)
    d = dim(w, v)
    n = v.shape[-1]
    form = w.form(
        """
        {x}.softmax({d}) | F.log_softmax({x}, {d}) | {x}.cumsum({d}) | F.layer_norm({x}, ({n},))
        F.layer_norm({x}, ({n},), {p}, {q}) | {x}.flip({d}) | {x}.roll(1, {d})
        F.rms_norm({x}, ({n},), {p}) | F.normalize({x}, dim={d}) | {x}.cumprod({d})
        F.glu({x}, {d}) | F.pad({x}, (1, 0)) | torch.logcumsumexp({x}, {d})
        {x}.topk({k}, {d}).values
        """
    )
    p = q = x
    with contextlib.suppress(LookupError):
        p, q = (
            w.any_of(lambda t: tuple(t.shape) == (n,)),
            w.any_of(lambda t: tuple(t.shape) == (n,)),
        )
    return f"{w.new()} = {form.format(x=x, d=d, n=n, p=p, q=q, k=max(1, v.shape[d] // 2))}"


@op(4)
def joining(w: Writer) -> str:
    x = w.any_of(lambda t: t.ndim >= 1)
    v = w.value(x)
    d = dim(w, v)
    f = w.one("cat", "stack", "cat", "chunk", "split", "unbind", "repeat")
    if f == "cat":
        at = d % v.ndim
        y = w.any_of(
            lambda t: (
                t.ndim == v.ndim
                and all(
                    a == b or i == at for i, (a, b) in enumerate(zip(t.shape, v.shape, strict=True))
                )
            )
        )
        return f"{w.new()} = torch.cat([{x}, {y}], {d})"
    if f == "stack":
        y = w.any_of(lambda t: t.shape == v.shape)
        return f"{w.new()} = torch.stack([{x}, {y}], {d})"
    if f == "repeat":
        return w.one(
            f"{w.new()} = {x}.repeat({[w.one(1, 2) for _ in v.shape]})",
            f"{w.new()} = {x}.repeat_interleave(2, {d})",
        )
    n = v.shape[d]
    if f == "chunk":
        return f"{w.new()}, {w.new()} = {x}.chunk(2, {d})"
    if f == "split":
        k = w.rng.randrange(1, n)
        return f"{w.new()}, {w.new()} = {x}.split([{k}, {n - k}], {d})"
    return f"{', '.join(w.new() for _ in range(n))}, = {x}.unbind({d})"


def subscript(w: Writer, v: Tensor) -> str:
    items = []
    for s in v.shape[: w.rng.randint(1, v.ndim)]:
        kind = w.rng.random()
        if kind < 0.35:
            items.append(str(w.rng.randrange(-s, s)))
        elif kind < 0.7:
            a = w.rng.randrange(0, s)
            items.append(w.one(f"{a}:", f":{a + 1}", f"{a}:{a + 2}", "::2"))
        else:
            items.append(":")
    if w.chance(0.2):
        items.insert(w.rng.randrange(len(items) + 1), "None")
    if w.chance(0.15):
        items = ["...", *items]
    return ", ".join(items)


@op(5)
def indexing(w: Writer) -> str:
    x = w.any_of(lambda t: t.ndim >= 1 and t.numel() > 0)
    v = w.value(x)
    d = dim(w, v)
    n = v.shape[d]
    where = w.one("plain", w.where(1, partial=False))
    num = w.next_number() + 1000
    f = w.form(
        """
        sub | sub | sub | narrow | select | index_select | gather | list | tensor | embedding
        mask | take_along | scatter_add | index_add
        """
    )
    if f == "sub":
        return f"{w.new()} = {x}[{subscript(w, v)}]"
    if f == "narrow":
        a = w.rng.randrange(n)
        return f"{w.new()} = {x}.narrow({d}, {a}, {n - a})"
    if f == "select":
        return f"{w.new()} = {x}.select({d}, {w.rng.randrange(-n, n)})"
    if f == "index_select":
        return f"{w.new()} = {x}.index_select({d}, index({num}, (4,), {n}, {where!r}))"
    if f in ("gather", "take_along"):
        where = w.one("plain", w.where(v.ndim, partial=False))
        name = "gather" if f == "gather" else "take_along_dim"
        order = "{d}, {i}" if f == "gather" else "{i}, {d}"
        new, i = w.new(), f"index({num}, {tuple(v.shape)}, {n}, {where!r})"
        return f"{new} = {x}.{name}({order.format(d=d, i=i)})"
    if f == "list":
        return f"{w.new()} = {x}[{[w.rng.randrange(v.shape[0]) for _ in range(3)]}]"
    if f == "tensor":
        shape = w.one((3,), (2, 2), (4,), ())
        where = w.one("plain", w.where(len(shape), partial=False))
        new, square = w.new(), v.ndim > 1 and v.shape[0] == v.shape[1]
        rest = w.one("", ":, ") if square else ""
        return f"{new} = {x}[{rest}index({num}, {shape}, {v.shape[0]}, {where!r})]"
    if f == "embedding":
        x = w.any_of(lambda t: t.ndim == 2)
        shape = w.one((3,), (2, 3), (5,))
        where = w.one("plain", w.where(len(shape), partial=False))
        return (
            f"{w.new()} = F.embedding(index({num}, {shape}, {w.value(x).shape[0]}, {where!r}), {x})"
        )
    if f == "scatter_add":
        where = w.one("plain", w.where(v.ndim, partial=False))
        return (
            f"{w.new()} = {x}.scatter_add({d}, index({num}, {tuple(v.shape)}, {n}, {where!r}), {x})"
        )
    if f == "index_add":
        y = w.any_of(
            lambda t: (
                t.ndim == v.ndim
                and all(
                    a == b
                    for i, (a, b) in enumerate(zip(t.shape, v.shape, strict=True))
                    if i != d % v.ndim
                )
            )
        )
        rows = w.value(y).shape[d]
        return f"{w.new()} = {x}.index_add({d}, index({num}, ({rows},), {n}, {where!r}), {y})"
    return f"{w.new()} = {x}[{x} > 0.2]"


@op(5)
def inplace(w: Writer) -> str:
    x = w.any_of(
        lambda t: (
            not (t.is_leaf and t.requires_grad) and t.untyped_storage().data_ptr() not in w.frozen
        )
    )
    v = w.value(x)
    y = w.any_of()
    target = x
    if w.chance(0.3):
        target = viewed(w, x)
        if "expand" in target:
            raise LookupError
    elif w.chance(0.25) and v.ndim:
        target = f"{x}[{subscript(w, v)}]"
        if w.chance(0.5):
            return f"{target} = {w.one(y, f'{y} * 2', '0.5')}"
        if w.chance(0.3):
            return f"{target} {w.one('+=', '*=')} {w.one(y, '0.5')}"
    form = w.form(
        """
        {t}.add_({y}) | {t}.mul_({y}) | {t}.mul_(0.5) | {t}.add_(0.25) | {t}.relu_() | {t}.tanh_()
        {t}.masked_fill_({x} > 0.2, 0.3) | {t}.copy_({y}) | {t}.sub_({y}, alpha=2)
        {t}.clamp_(-0.5, 0.5) | {t}.zero_() | {t}.neg_() | {t}.addcmul_({y}, {y}, value=0.1)
        {t}.div_(2) | F.relu({t}, inplace=True) | {t}.fill_(0.2) | {t}.lerp_({y}, 0.25) | {t}.exp_()
        {t}.clamp_(min=0.1) | {t}.cumsum_(0) | {t}.tril_() | {t}.sigmoid_()
        """
    )
    line = form.format(t=target, x=x, y=y)
    if v.is_leaf and w.chance(0.3):
        return f"with torch.no_grad(): {line}"
    if target == x and w.chance(0.2):
        return w.one(f"{x} += {y}", f"{x} *= 0.5", f"{x} -= {y}")
    return line


@op(3)
def moving(w: Writer) -> str:
    x = w.any_of()
    v = w.value(x)
    return f"{w.new()} = to({x}, {w.where(v.ndim)!r})"


@op(2)
def special(w: Writer) -> str | None:
    x = w.any_of()
    v = w.value(x)
    kind = w.form(
        """
        detach | full | again | mapped | ckpt | ckpt | no_grad | hook | keep | newleaf | const
        plain | inplace_leaf | where_mask
        """
    )
    if kind == "detach":
        return f"{w.new()} = {x}.detach()"
    if kind in ("full", "again", "mapped"):
        return f"{w.new()} = {kind}({x})"
    if kind == "ckpt":
        y = w.any_of()
        form = w.form(
            """
            a * b + a.sum() | torch.tanh(a) + b | F.gelu(a @ b.t()) | (a + b).softmax(-1) * a
            torch.relu(a).sum(0) * b | (a.reshape(-1) * 2).view(a.shape) * b
            a.t() * 2 + b.sum()
            """
        )
        return f"{w.new()} = ckpt(lambda a, b: {form}, {x}, {y})"
    if kind == "no_grad":
        new, value = w.new(), w.one(f"{x} * 2", viewed(w, x) + " * 1", f"{x}.sum()")
        return f"with torch.no_grad(): {new} = {value}"
    if kind == "hook" and v.requires_grad and v.untyped_storage().data_ptr() not in w.frozen:
        return f"hook({x}, lambda g: g * 2)"
    if (
        kind == "keep"
        and v.requires_grad
        and not v.is_leaf
        and v.untyped_storage().data_ptr() not in w.frozen
    ):
        return f"keep({x})"
    if kind == "newleaf":
        return f"{w.new()} = newleaf({w.next_number() + 500}, {x})"
    if kind == "const":
        return f"{w.new()} = {x} * const({w.next_number()}, {tuple(v.shape)})"
    if kind == "plain":
        return f"{w.new()} = {x} * plain({w.next_number() + 200}, {tuple(v.shape)})"
    if kind == "inplace_leaf" and v.is_leaf and v.untyped_storage().data_ptr() not in w.frozen:
        return f"with torch.no_grad(): {x}.mul_(0.5)"
    if kind == "where_mask":
        return f"{w.new()} = torch.where({x} > 0, {x}, const({w.next_number()}, {tuple(v.shape)}))"
    return None
