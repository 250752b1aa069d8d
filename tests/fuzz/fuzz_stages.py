"""Random programs whose tensors live on several meshes, run on stage meshes and as one process
would.

The programs are those of ``tests.fuzz.fuzz_writer``, whose every operation happens on one mesh, and
operations that go from mesh to mesh. Beside values and gradients this compares what a backward
would transfer: for each tensor the cross-mesh reshards that its graph reaches, which all ranks of
one must agree on (where they do not, they would wait for each other for ever; nothing has to hang
to find it). By hand, the failures made smaller::

    python -m tests.fuzz.fuzz_stages --seeds 0:500 --world 2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import disttensor as dt
from disttensor import ProcessMesh
from disttensor.autograd.cross_mesh import CrossMesh
from tests.fuzz import fuzz_programs, fuzz_writer
from tests.fuzz.command_line import each_on_ranks, fuzz, shrunk, tell
from tests.fuzz.fuzz_world import Program, World, placements, stays_put
from tests.fuzz.fuzz_writer import Writer, search
from tests.support import oracle

# Meshes of programs in a world of this size: apart, overlapping, one in another, the whole world
MESHES: dict[int, tuple[Any, ...]] = {
    2: (((0,), (1,)), ((0,), (1,), (0, 1)), ((0, 1), (1,)), ((1,), (0, 1)), ((0, 1), (1, 0))),
    4: (
        ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,)), ((0,), (1, 2), (3,)), ((0, 1, 2, 3), (1, 2)),
        ((0, 1), (1, 2), (3,)),
        (((0, 1), (2, 3)), (1,), (3, 2)), ((0, 1), (2,), (0, 1, 2, 3)), ((1, 3), (0, 2)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class StageProgram(Program):
    """``meshes``: ranks of each mesh; the last line makes ``losses``, a list."""

    meshes: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"# meshes {self.meshes}\n{super().__str__()}"


@dataclass
class StageWorld(World):
    """Places are ``"mesh: placements"``; ``to`` stays on the mesh, ``move`` goes to another and
    gives a copy."""

    meshes: list[ProcessMesh] | None = None

    def names(self) -> dict[str, Any]:
        found = {**super().names(), "move": self.move, "anew": self.anew}
        del found["full"], found["plain"]
        return found

    def _given(self, value: Tensor, where: str) -> Any:
        mesh, words = self._place(where)
        self.mesh = mesh
        return super()._given(value, words)

    def _place(self, where: str) -> tuple[ProcessMesh | None, str]:
        stage, words = where.split(":")
        return None if self.meshes is None else self.meshes[int(stage)], words

    def to(self, x: Any, where: str) -> Any:
        self.mesh, words = self._place(where)
        return super().to(x, words)

    def move(self, x: Any, where: str) -> Any:
        mesh, words = self._place(where)
        return x.clone() if mesh is None else dt.reshard(x, mesh, placements(words))

    def anew(self, x: Any) -> Any:
        """``x``, after random numbers that do not show: every rank has to count them."""
        return x + torch.rand_like(x.detach()) * 0


class StageWriter(Writer):
    """``now``: the mesh of the operation that is written; ``home``: that of each variable."""

    def __init__(self, seed: int, meshes: Sequence[Any]) -> None:
        super().__init__(seed, 1)
        self.meshes = meshes
        self.world: StageWorld = StageWorld()
        self.env = self.world.names()
        self.fixed = set(self.env)
        self.home: dict[str, int] = {}
        self.now = self.target = 0

    def floats(self, ok: Any = lambda t: True) -> list[str]:
        return [k for k in super().floats(ok) if self.home.get(k) == self.now]

    def at(self, stage: int, ndim: int, partial: bool = True) -> str:
        self.axes = 2 if isinstance(self.meshes[stage][0], tuple) else 1
        return f"{stage}: " + super().where(ndim, partial=partial)

    def where(self, ndim: int, grad: bool = True, partial: bool = True) -> str:
        return self.at(self.now, ndim, partial)

    def other(self) -> int:
        self.target = self.one(*(s for s in range(len(self.meshes)) if s != self.now))
        return self.target

    def add(self, line: str) -> bool:
        if "full(" in line or "plain(" in line:
            return False
        if not super().add(line):
            return False
        for k in self.env:
            if k not in self.fixed:
                self.home.setdefault(k, self.target)
        return True

    def starts(self) -> None:
        shapes = self.one(*fuzz_writer.FAMILIES)
        for i in range(self.rng.randint(2, 5)):
            shape = self.one(*shapes)
            self.now = self.target = self.rng.randrange(len(self.meshes))
            n = self.next_number()
            kind = "leaf" if i == 0 or self.chance(0.75) else "data"
            name = self.new()
            self.add(f"{name} = {kind}({n}, {shape}, {self.where(len(shape))!r})")
            if self.chance(0.4):
                self.add(f"{self.new()} = {name} * 1.0")

    def op(self) -> None:
        self.now = self.one(*self.home.values())
        self.target = self.now
        if self.chance(0.4):
            for _ in range(20):
                self.target = self.now
                with contextlib.suppress(LookupError, ValueError, IndexError):
                    if self.add(self.one(cross, cross, several, region, masked)(self)):
                        return
            return
        super().op()

    def finish(self) -> None:
        terms = []
        for now in {*self.home.values()}:
            self.now = self.target = now
            names = self.floats(lambda t: t.requires_grad)
            for k in self.rng.sample(names, min(len(names), self.rng.randint(0, 2))):
                weight = f"const({self.next_number()}, {tuple(self.value(k).shape)})"
                form = self.one("({x} * {w}).sum()", "({x} ** 2).sum()", "{x}.sum()")
                term = self.new()
                self.add(f"{term} = {form.format(x=k, w=weight)}")
                terms.append(term)
        if not terms:
            raise LookupError
        if self.chance(0.6):  # one loss, on a mesh of any kind
            end = self.rng.randrange(len(self.meshes))
            terms = [k if self.home[k] == end else f"move({k}, {self.at(end, 0)!r})" for k in terms]
            terms = [" + ".join(terms)]
        if not self.add(f"losses = [{', '.join(terms)}]"):
            raise LookupError

    def program(self, name: str) -> StageProgram:
        end = self.one("backward", "backward", "list", "twice", "grad", "inputs")
        return StageProgram(tuple(self.lines), end, name, tuple(self.meshes))


def cross(w: StageWriter) -> str:
    x = w.any_of()
    stage, ndim = w.other(), w.value(x).ndim
    form = w.one(
        *["{n} = move({x}, {p!r})"] * 8,
        "{n} = move({x}.detach(), {p!r})",
        "with torch.no_grad(): {n} = move({x}, {p!r})",
        "{n} = move(anew({x}), {p!r})",
        "{n} = move({x}[{x} > 0.1], {q!r})",
        "{n} = move({x}.sum(), {z!r})",
    )
    places = {"p": w.at(stage, ndim), "q": w.at(stage, 1), "z": w.at(stage, 0)}
    return form.format(n=w.new(), x=x, **places)


def masked(w: StageWriter) -> str:
    """Integers and booleans of one mesh, used on another."""
    y = w.any_of()
    here, v = w.now, w.value(y)
    w.now = w.other()
    x = w.any_of(lambda t: t.shape == v.shape and t.ndim > 0)
    p = w.at(here, v.ndim, partial=False)
    w.now = w.target = here
    d = fuzz_writer.dim(w, v)
    form = w.one(
        "torch.where(move({x} > 0.1, {p!r}), {y}, 0.5)",
        "{y}.masked_fill(move({x} > 0.1, {p!r}), 0.25)",
        "{y}.gather({d}, move({x}.argsort({d}), {p!r}))",
        "{y} * move({x} > 0, {p!r}).double()",
        "{y} + move({x}.argmax({d}, keepdim=True), {p!r})",
    )
    return f"{w.new()} = " + form.format(x=x, y=y, p=p, d=d)


def several(w: StageWriter) -> str:
    """Functions of several results, and results that do not depend on every argument."""
    x = w.any_of()
    v = w.value(x)
    d = fuzz_writer.dim(w, v)
    y = w.any_of(lambda t: t.shape == v.shape)
    two = w.form(
        """
        torch.std_mean({x}, {d}) | torch.var_mean({x}) | torch.aminmax({x}, dim={d})
        {x}.max({d}) | {x}.min({d}) | {x}.topk(1, {d})
        {x}.sort({d}) | torch.kthvalue({x}, 1, {d}) | torch.cummax({x}, {d}) | torch.frexp({x})
        torch.broadcast_tensors({x}, {y})
        torch.meshgrid({x}.flatten()[:2], {y}.flatten()[:3], indexing='ij')
        torch._foreach_mul([{x}, {y}], 2.0)
        torch._foreach_add([{x}, {x}], [{y}, {x}]) | {x}.mode({d}) | torch.linalg.slogdet({x})
        {x}.median({d})
        torch.unique({x}, return_inverse=True) | torch.atleast_1d({x}, {y})
        torch.linalg.qr({x} + 1)
        """
    )
    one = w.form(
        """
        {x}.sign() * {y} | {x}.round() | torch.floor_divide({x}, 2) * {y}
        torch.zeros_like({x}) + {y} | {x}.new_zeros({x}.shape)
        torch.heaviside({x}, {y}) | {x}.fmod(0.7) | torch.where({x} > 0, {x}, {x}.detach())
        {x}.floor() + {x} | torch.trunc({x})
        torch.copysign({x}, {y}) | torch.bucketize({x}, {y}.flatten().sort().values).double()
        {x}.nonzero().double()
        F.dropout({x}, 0.0, True) | F.dropout({x}, 1.0, True) + {y} | torch.mul({x}, 0)
        anew({x}) * {y}
        torch.lerp({x}, {y}, 0.0) | torch.addcmul({x}, {y}, {y}, value=0)
        {x}.argmax({d}).double() | {x}.isnan().double()
        torch.block_diag({x}, {x}) | torch.cat([{x}, {y}], {d})[:1]
        torch.xlogy({x}, {y}.abs() + 1) | {x}.expand_as({y}).clone()
        torch.nn.functional.normalize({x}, dim={d}) | torch.cdist({x}, {y})
        F.cosine_similarity({x}, {y}, {d}) | torch.trapz({x})
        F.scaled_dot_product_attention({x}, {y}, {x})
        F.batch_norm({x}, None, None, training=True) | {x}.index_fill(0, torch.tensor([0]), 0.5)
        """
    )
    if w.chance(0.5):
        return f"{w.new()}, {w.new()} = {two.format(x=x, y=y, d=d)}"
    return f"{w.new()} = {one.format(x=x, y=y, d=d)}"


def region(w: StageWriter) -> str:
    """A region that is computed again, with transfers inside."""
    x, y = w.any_of(), w.any_of()
    here, there, ndim = w.now, w.other(), w.value(x).ndim
    p, q = w.at(there, ndim), w.at(here, ndim)
    form, w.target = w.one(
        ("move((a * b.sum()).tanh(), {p!r}).sin() * 2", there),
        ("move(a.sin(), {p!r}) * move(b.sum(), {z!r}) + move(a.exp(), {p!r})", there),
        ("move(move(a.tanh(), {p!r}).exp(), {q!r}).sin() * b.sum()", here),
        ("(a * b.sum()).tanh().cos()", here),
    )
    text = form.format(p=p, q=q, z=w.at(there, 0))
    return f"{w.new()} = ckpt(lambda a, b: {text}, {x}, {y})"


def make(seed: int, world: int) -> StageProgram:
    """The program of a seed: 5 to 15 operations."""
    meshes = MESHES[world][seed % len(MESHES[world])]
    name = f"seed {seed}, world of {world}"
    return search(seed, lambda s: StageWriter(s, meshes), (5, 15), name, steady)


# Running ------------------------------------------------------------------------------------------


def forward(program: StageProgram, world: StageWorld) -> dict[str, Any]:
    env = world.names()
    for i, line in enumerate(program.lines):
        error: Exception | None = None
        try:
            exec(compile(line, f"<line {i}: {line}>", "exec"), env)
        except Exception as e:
            error = e
        if world.meshes is not None:  # all go on, or none
            errors = gathered(f"{type(error).__name__}: {error}" if error else "")
            if any(errors) and not error:
                raise Elsewhere("; ".join(filter(None, errors))) from None
        if error:
            raise error
    return env


class Elsewhere(Exception):
    """Another rank raised."""


def backward(program: StageProgram, world: StageWorld, losses: list[Any]) -> dict[str, Any]:
    leaves = {f"leaf {n}": x for n, x in world.leaves.items()}
    targets = list(leaves.values())
    if program.end == "grad":
        targets += world.kept
        names = [*leaves, *(f"kept {i}" for i in range(len(world.kept)))]
        got = torch.autograd.grad(losses, targets, allow_unused=True)
        return dict(zip(names, got, strict=True))
    if program.end == "list":
        torch.autograd.backward(losses)
    elif program.end == "inputs":
        torch.autograd.backward(losses, inputs=targets[::2])
    else:
        for loss in losses:
            for _ in range(1 + (program.end == "twice")):
                loss.backward(retain_graph=True)
    grads = {n: x.grad for n, x in leaves.items()}
    return {**grads, **{f"kept {i}": x.grad for i, x in enumerate(world.kept)}}


def steady(program: StageProgram) -> bool:
    """Do values and gradients stay put when the inputs change by rounding errors?"""

    def run(jitter: float) -> list[Any]:
        world = StageWorld(jitter=jitter)
        env = forward(program, world)
        grads = backward(program, world, env["losses"])
        return [*tensors(env, world).values(), *grads.values()]

    return stays_put(run)


def tensors(env: dict[str, Any], world: StageWorld) -> dict[str, Any]:
    found = {k: v for k, v in env.items() if k not in world.names() and isinstance(v, Tensor)}
    return {**found, **{f"loss {i}": x for i, x in enumerate(env["losses"])}}


def gathered(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def transfers(x: Any) -> set[tuple[int, tuple[int, ...], str]]:
    """What a backward from ``x`` transfers, as this rank sees it: (tag, ranks, what) of each."""
    found, seen, queue = set(), set(), [x.local.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == f"{CrossMesh.__name__}Backward":
            (src, _), (dst, _), tag = node.ends
            ranks = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks}))
            found.add((tag & 0xFFFF, ranks, f"{src!r} on {src.mesh!r} to {dst!r} on {dst.mesh!r}"))
        queue += [n for n, _ in node.next_functions]
    return found


def disagreements(values: dict[str, Any]) -> list[str]:
    """Tensors for which ranks of a transfer do not agree whether its gradient goes back."""
    mine = {k: transfers(x) for k, x in values.items()}
    everyone = gathered(mine)
    out = []
    for k, x in values.items():
        for tag, ranks, what in sorted(set().union(*(e[k] for e in everyone))):
            have = [r for r in ranks if (tag, ranks, what) in everyone[r][k]]
            if have != list(ranks):
                out.append(
                    f"{k} ({x.spec!r}): a backward of the transfer {tag} ({what}) only on ranks "
                    f"{have}, without {[r for r in ranks if r not in have]}"
                )
    return out


def problems(program: StageProgram) -> list[str]:
    """What differs; collective, the same on every rank."""
    plain = StageWorld()
    plain_env = forward(program, plain)
    plain_values = tensors(plain_env, plain)
    plain_grads = backward(program, plain, plain_env["losses"])
    meshes = [ProcessMesh(m, fuzz_programs.NAMES[: torch.tensor(m).ndim]) for m in program.meshes]
    world = StageWorld(meshes=meshes)
    with oracle.fallbacks():
        try:
            env = forward(program, world)
        except Exception as error:
            refusal = any(text in str(error) for text in fuzz_programs.REFUSALS)
            text = f"{type(error).__name__}: {str(error)[:700]}{fuzz_programs.where(error)}"
            return fuzz_programs.everyone([] if refusal else [text])
        values = tensors(env, world)
        found = disagreements(values)
        full = {k: v.detach().full_tensor(everywhere=True) for k, v in values.items()}
        for k, want in plain_values.items():
            v = values[k]
            where = f"{k} ({v.spec!r} on {v.spec.mesh!r})"
            if v.requires_grad != want.requires_grad:
                found.append(
                    f"{where}: requires_grad {v.requires_grad}, plain {want.requires_grad}"
                )
            found += fuzz_programs.difference(where, full[k], want.detach())
        found = fuzz_programs.everyone(found)
        if found:
            return found
        grads = backward(program, world, env["losses"])
        owners = {**{f"leaf {n}": x for n, x in world.leaves.items()}}
        owners |= {f"kept {i}": x for i, x in enumerate(world.kept)}
        there = gathered({k: g is not None and owners[k].is_initialized for k, g in grads.items()})
        for k, want in plain_grads.items():
            inside = list(owners[k].spec.mesh.ranks)
            have = [r for r in inside if there[r][k]]
            where = f"gradient of {k} ({owners[k].spec!r})"
            if not have:
                if want is not None and bool(want.any()):
                    found.append(f"{where}: none, plain {want}")
            elif have != inside:
                found.append(f"{where}: on ranks {have} of {inside}")
            elif owners[k].is_initialized:
                mine = grads[k].detach().full_tensor()
                wanted = torch.zeros_like(mine) if want is None else want
                found += fuzz_programs.difference(where, mine, wanted)
        return fuzz_programs.everyone(found)


def run(programs: Sequence[StageProgram], progress: str = "", shrink: bool = False) -> list[str]:
    """Reports of the programs that fail; runs on every rank. ``progress``: see ``tell``."""
    reports = []
    for i, program in enumerate(programs):
        tell(progress, i)
        found = problems(program)
        if found:
            if shrink:
                program = shrunk(program, simpler, lambda p: steady(p) and bool(problems(p)))
                found = problems(program)
            reports.append("\n".join([str(program), *found, ""]))
    return reports


def simpler(program: StageProgram) -> Iterator[StageProgram]:
    for i in reversed(range(len(program.lines) - 1)):
        yield replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
    if program.end != "backward":
        yield replace(program, end="backward")


def main(first: int, last: int, world: int) -> int:
    """How many of these seeds fail; each is printed."""
    programs = [make(seed, world) for seed in range(first, last)]
    return each_on_ranks(world, run, programs, 60.0, True)


if __name__ == "__main__":
    from tests.fuzz import fuzz_stages  # not __main__: the ranks find its functions by name

    fuzz(__doc__, "programs", fuzz_stages.main)
