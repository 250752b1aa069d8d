"""Ranks as threads: the members of a collective meet at a barrier, so that ranks which disagree are
an error, not a hang."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from disttensor.comm.work import finished
from disttensor.core.layout import box_at
from disttensor.random.draws import Note, RandomDraw

Coordinate = tuple[int, ...]
PATIENCE = 10.0  # seconds that a rank waits for the others
_THREADS = futures.ThreadPoolExecutor(1024)  # kept: to start one takes longer than most bodies


class World:
    """The ranks, and where they meet."""

    def __init__(self, mesh_shape: Coordinate) -> None:
        self.mesh_shape = mesh_shape
        self.all = list(itertools.product(*(range(n) for n in mesh_shape)))
        self.lock = threading.Lock()
        self.drawing = threading.Lock()  # torch's generator is one for all threads
        self.boards: dict[Any, tuple[threading.Barrier, list[Any]]] = {}

    def run(self, body: Callable[[Coordinate], Any]) -> dict[Coordinate, Any]:
        """``body(coordinate)`` on every rank at once, under the caller's autocast: the results by
        coordinate."""
        cast = torch.is_autocast_enabled("cpu")
        out: dict[Coordinate, Any] = {}
        errors: dict[Coordinate, BaseException] = {}

        def work(place: Coordinate) -> None:
            try:
                with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=cast):
                    out[place] = body(place)
            except BaseException as error:
                with self.lock:
                    errors[place] = error
                    for barrier, _ in self.boards.values():
                        barrier.abort()

        futures.wait([_THREADS.submit(work, place) for place in self.all])
        if errors:
            raise next(
                (e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)),
                AssertionError(
                    f"ranks {sorted(set(self.all) - set(errors))} did not come to a collective "
                    f"that {sorted(errors)} wait in"
                ),
            )
        return out

    def members(self, axes: Sequence[int], me: Coordinate) -> list[Coordinate]:
        """The ranks that share all but ``axes`` with ``me``; ``axes`` vary major first."""
        out = []
        for inner in itertools.product(*(range(self.mesh_shape[a]) for a in axes)):
            at = list(me)
            for a, i in zip(axes, inner, strict=True):
                at[a] = i
            out.append(tuple(at))
        return out

    def swap(self, axes: Sequence[int], me: Coordinate, x: Any) -> list[Any]:
        """What the members of ``me``'s group over ``axes`` bring, in their order."""
        members = self.members(axes, me)
        with self.lock:
            barrier, board = self.boards.setdefault(
                (tuple(axes), members[0]),
                (threading.Barrier(len(members), timeout=PATIENCE), [None] * len(members)),
            )
        board[members.index(me)] = x
        barrier.wait()
        got = list(board)
        barrier.wait()
        return got

    def exchange(self, me: Coordinate, tag: tuple[Any, ...], x: Tensor) -> dict[Coordinate, Tensor]:
        """Everybody's x; all come to the same collective, members with one shape."""
        everybody = self.swap(range(len(self.mesh_shape)), me, (tag, x))
        tags = {c: t for c, (t, _) in zip(self.all, everybody, strict=True)}
        alike = all(t[:2] == tag[:2] for t in tags.values()) and all(
            tags[c] == tag for c in self.members(tag[1], me)
        )
        assert alike, f"the ranks disagree about a collective: {tags}"
        return {c: v for c, (_, v) in zip(self.all, everybody, strict=True)}


def reduce_all(pieces: Sequence[Tensor], op: str) -> Tensor:
    stack = torch.stack(list(pieces))
    if op == "sum":
        return stack.sum(0, dtype=stack.dtype)
    if op == "avg":
        return stack.mean(0)
    if op == "prod":
        return stack.prod(0, dtype=stack.dtype)
    if op in ("any", "all"):
        return (stack.any(0) if op == "any" else stack.all(0)).to(stack.dtype)
    return stack.amax(0) if op == "max" else stack.amin(0)


class SimulatedDraw(RandomDraw):
    """ops.local.DrawProtocol: the numbers of one call, whichever it is."""

    def __init__(self, world: World, me: Coordinate, invariant: bool) -> None:
        mesh: Any = SimpleNamespace(coordinate=me, shape=world.mesh_shape, ndim=len(me))
        super().__init__(Note(seed=1, call=2, invariant=invariant), mesh)
        self.alone = world.drawing

    @contextlib.contextmanager
    def seeded(self, axes: Any, device: Any) -> Iterator[None]:  # type: ignore[override]
        with self.alone, super().seeded(axes, device):
            yield


class SimulatedCollectives:
    """ops.local.Collectives among threads."""

    policy = ""  # of random numbers: "invariant", "fast", or as the function has it

    def __init__(self, world: World, me: Coordinate) -> None:
        self.world = world
        self.me = me
        self.log: list[tuple[str, tuple[int, ...], int]] = []

    def gathered(self, kind: str, x: Tensor, axes: tuple[int, ...]) -> list[Tensor]:
        self.log.append((kind, tuple(axes), x.numel()))
        tag = (kind, tuple(axes), tuple(x.shape), x.dtype)
        got = self.world.exchange(self.me, tag, x.detach().clone())
        return [got[place] for place in self.world.members(axes, self.me)]

    def psum(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return _Psum.apply(x, self, axes) if axes else x

    def pvary(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return _Pvary.apply(x, self, axes) if axes else x

    def all_gather(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return _Gather.apply(x, self, axes) if axes else x.unsqueeze(0)

    def all_reduce(self, x: Tensor, op: str, axes: tuple[int, ...]) -> Tensor:
        assert not (x.requires_grad and torch.is_grad_enabled()), "psum has a gradient"
        return reduce_all(self.gathered(f"all_reduce {op}", x, axes), op) if axes else x

    def number(self, axes: tuple[int, ...]) -> int:
        """This rank's among the members of the axes (major first)."""
        at = 0
        for a in axes:
            at = at * self.world.mesh_shape[a] + self.me[a]
        return at

    def fetch(self, x: Tensor, dim: int, have: Any, want: Any, axes: tuple[int, ...]) -> Tensor:
        """By way of the whole: right, and of nothing but the definition."""
        return _Ranges.apply(x, self, dim, have, want, axes)

    def exchange(self, pieces: Sequence[Tensor], numels: Sequence[int], axes: Any) -> Any:
        self.log.append(("exchange", tuple(axes), sum(p.numel() for p in pieces)))
        tag = ("exchange", tuple(axes), len(pieces), pieces[0].dtype)
        everybody = self.world.swap(
            range(len(self.world.mesh_shape)), self.me, (tag, [p.detach().clone() for p in pieces])
        )
        assert all(t[:3] == tag[:3] for t, _ in everybody), "the ranks disagree about an exchange"
        given = dict(zip(self.world.all, [p for _, p in everybody], strict=True))
        mine = self.number(axes)
        got = [given[c][mine].reshape(-1) for c in self.world.members(axes, self.me)]
        assert [x.numel() for x in got] == list(numels), "what comes is not what was sent"
        return finished(got)

    def exchange_rows(self, rows: Tensor, sent: Any, received: Any, axes: Any) -> Tensor:
        width = torch.Size(rows.shape[1:]).numel()
        got = self.exchange(rows.split(list(sent)), [n * width for n in received], axes).wait()
        return torch.cat(got).view(-1, *rows.shape[1:])

    def once(self, make: Callable[[], Any]) -> Any:
        return make()

    def draw(self, default: str, generator: Any = None) -> SimulatedDraw:
        return SimulatedDraw(self.world, self.me, (self.policy or default) == "invariant")

    def reshard(self, x: Tensor, shape: Any, have: Any, want: Any, axes: Any) -> Tensor:
        """By way of the whole: right, and of nothing but the definition."""
        return _Moved.apply(x, self, tuple(shape), have, want, tuple(axes))


class _Moved(torch.autograd.Function):
    """The piece of a tensor in another layout; of a backward what is replicated is pending."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: SimulatedCollectives, shape: Any, have: Any, want: Any,
        axes: Any, backward: bool = False,
    ) -> Tensor:  # fmt: skip
        ctx.with_ = ranks, shape, have, want, axes, backward
        world, everywhere = ranks.world, range(len(ranks.world.mesh_shape))
        took = [a for a in axes if any(a in dim for dim in (*have.dims, *want.dims))]
        ranks.log.append(("reshard", tuple(axes), x.numel()))
        everybody = world.swap(everywhere, ranks.me, x.detach().clone())
        pieces = dict(zip(world.all, everybody, strict=True))
        whole = x.new_zeros(shape)

        def split(layout: Any) -> list[int]:
            return [a for a in took if any(a in dim for dim in layout.dims)]

        for c in world.members(took, ranks.me):
            if backward and any(c[a] != ranks.me[a] for a in took if a not in split(want)):
                continue  # the gradient of a replica is a contribution
            if not backward and any(c[a] for a in took if a not in split(have)):
                continue  # a replica
            at = box_at(shape, have.dims, world.mesh_shape, c)
            assert tuple(pieces[c].shape) == at.shape
            whole[at.slices] += pieces[c]
        return whole[box_at(shape, want.dims, world.mesh_shape, ranks.me).slices].clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ranks, shape, have, want, axes, turned = ctx.with_
        return _Moved.apply(g, ranks, shape, want, have, axes, not turned), *(None,) * 6


class _Ranges(torch.autograd.Function):
    """Member i holds have[i]; it gets, of the sum of all, want[i]. Its transpose is of its kind."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: SimulatedCollectives, dim: int, have: Any, want: Any, axes: Any
    ) -> Tensor:
        ctx.with_ = ranks, dim, have, want, axes
        place = ranks.number(axes)
        assert x.shape[dim] == have[place][1] - have[place][0]
        shape = list(x.shape)
        shape[dim] = max(stop for _, stop in (*have, *want))
        whole = x.new_zeros(shape)
        start, stop = have[place]
        whole.narrow(dim, start, stop - start).add_(x)
        total = reduce_all(ranks.gathered("fetch", whole, axes), "sum")
        start, stop = want[place]
        return total.narrow(dim, start, stop - start).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ranks, dim, have, want, axes = ctx.with_
        return _Ranges.apply(g, ranks, dim, want, have, axes), *(None,) * 5


class _Psum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SimulatedCollectives, axes: tuple[int, ...]) -> Tensor:
        ctx.with_ = ranks, axes
        return reduce_all(ranks.gathered("all_reduce sum", x, axes), "sum")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Pvary.apply(g, *ctx.with_), None, None


class _Pvary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SimulatedCollectives, axes: tuple[int, ...]) -> Tensor:
        ctx.with_ = ranks, axes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Psum.apply(g, *ctx.with_), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SimulatedCollectives, axes: tuple[int, ...]) -> Tensor:
        ctx.with_ = ranks, axes
        return torch.stack(ranks.gathered("all_gather", x, axes))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _TakeOwn.apply(g, *ctx.with_), None, None


class _TakeOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SimulatedCollectives, axes: tuple[int, ...]) -> Tensor:
        ctx.with_ = ranks, axes
        return x[ranks.number(axes)].clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Gather.apply(g, *ctx.with_), None, None
