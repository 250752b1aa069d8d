"""Random numbers: replicas draw the same, shards draw different ones, and torch's own generator is
left alone.

The position in the program decides, not the rank: every random call takes the next number of a
counter that all ranks keep alike. Two policies say what that number becomes (``rng``):

    "invariant"   numbers by global element index (disttensor.random.philox): any mesh and placement gives the same bits.
                  The default of factories, initialization and sampling
    "fast"        torch's own generator and kernels, seeded for this call and for this rank's place on the axes that
                  split the tensor. The default of dropout and its like

A recomputation under activation checkpointing repeats the calls of its forward: see
disttensor.autograd.recompute.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from disttensor.autograd import recompute
from disttensor.layout import Axes
from disttensor.mesh import ProcessMesh
from disttensor.random import philox
from disttensor.random.philox import derive
from disttensor.spec import DistSpec

Tensor = torch.Tensor
_POLICIES = ("invariant", "fast")


class _State:
    """The seed, the number of random calls so far, and the policy that ``rng`` has set."""

    seed = 0
    calls = 0
    policy: str | None = None


def manual_seed(seed: int) -> None:
    """Start the random numbers of DistTensors anew. Every rank gives the same seed.

    >>> dt.manual_seed(7)
    >>> a = dt.rand(3, mesh=mesh)
    >>> dt.manual_seed(7)
    >>> torch.equal(a, dt.rand(3, mesh=mesh, placements=[dt.Shard(0), dt.Replicate()]))
    True
    """
    try:
        _State.seed, _State.calls = operator.index(seed), 0
    except TypeError:
        raise TypeError(
            f"manual_seed({seed!r}): an int is expected, the same on all ranks"
        ) from None


class rng:
    """``with rng("invariant"):`` or ``with rng("fast"):`` chooses the policy for all random calls
    inside.

    "invariant": by global element index, so that every mesh, one process included, draws the same
    bits (dropout masks too). "fast": torch's generator, seeded per call and shard. Raises
    ValueError for another name.

    >>> x = dt.ones(8, mesh=mesh)
    >>> with dt.rng("invariant"):
    ...     y = torch.nn.functional.dropout(x, 0.5)
    >>> bool(((y == 0) | (y == 2)).all())
    True
    """

    def __init__(self, policy: str) -> None:
        if policy not in _POLICIES:
            raise ValueError(
                f"rng({policy!r}): the policies are " + " and ".join(map(repr, _POLICIES))
            )
        self.policy = policy
        self.outer: list[str | None] = []

    def __enter__(self) -> rng:
        self.outer.append(_State.policy)
        _State.policy = self.policy
        return self

    def __exit__(self, *exc: object) -> None:
        _State.policy = self.outer.pop()


class Note(NamedTuple):
    """What decides the numbers of one random call."""

    seed: int
    call: int
    invariant: bool


class Draw:
    """The random numbers of one call on one mesh (``ops.local.Draw``)."""

    __slots__ = ("invariant", "key", "mesh")

    def __init__(self, note: Note, mesh: ProcessMesh) -> None:
        self.key = note.seed, note.call
        self.invariant = note.invariant
        self.mesh = mesh

    def numbers(
        self, kind: str, piece: Any, dtype: torch.dtype, device: Any, **options: Any
    ) -> Tensor:
        """``kind``: a function of disttensor.random.philox."""
        draw: Callable[..., Tensor] = getattr(philox, kind)
        return draw(*self.key, piece.shape, *piece.local_box, dtype, device, **options)

    def seeded(self, axes: Axes, device: torch.device) -> Seeded:
        place = self.mesh.coordinate or (0,) * self.mesh.ndim
        number = 0
        for a in sorted(axes):
            number = number * self.mesh.shape[a] + place[a]
        return Seeded(derive(*self.key) + number, device)


def draw(mesh: ProcessMesh, default: str, generator: torch.Generator | None = None) -> Draw:
    """The next random call: all ranks make it alike, those without a piece too.

    default: the policy outside ``rng``. generator: the user's, in the same state on all ranks: one
    int64 of it is the seed.
    """
    where = recompute.scope()
    found = recompute.drawn(where)
    if found is None:
        invariant = (_State.policy or default) == "invariant"
        if generator is None:
            _State.calls += 1
            found = Note(_State.seed, _State.calls, invariant)
        else:
            device = generator.device
            found = Note(
                int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)),
                0,
                invariant,
            )
    if generator is None or where is not None:
        recompute.note(where, found)
    return Draw(found, mesh)


def _dropout(input: Any, p: float = 0.5, *flags: Any, **named: Any) -> bool:
    return p == 0.0 or not named.get("train", named.get("training", flags[0] if flags else True))


def _native_dropout(input: Any, p: float, train: Any = True) -> bool:
    return train is False


def _rrelu(
    input: Any, lower: float = 0.0, upper: float = 0.0, training: bool = False, *_: Any, **__: Any
) -> bool:
    return not training


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> bool:
    return not dropout_p


# Functions whose rules draw or not by the values of a call, by name without the "_" at its end:
# which calls draw nothing.
IDLE: dict[str, Callable[..., bool]] = {
    "dropout": _dropout, "feature_dropout": _dropout, "alpha_dropout": _dropout,
    "feature_alpha_dropout": _dropout,
    "native_dropout": _native_dropout, "rrelu": _rrelu, "scaled_dot_product_attention": _attention,
}  # fmt: skip


class Seeded:
    """``with Seeded(seed, device):`` torch's generator of the device draws from ``seed``;
    afterwards it is as before."""

    __slots__ = ("after", "device", "generator", "seed", "state")

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed & (1 << 63) - 1
        self.generator = _generator(device)

    def __enter__(self) -> Seeded:
        self.state = self.generator.get_state()
        self.generator.manual_seed(self.seed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.generator.set_state(self.state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def forked(mesh: ProcessMesh, axes: Axes = ()) -> Iterator[None]:
    """torch's generators seeded alike on all ranks of one place on ``axes``, and put back
    afterwards. It counts as a random call only if something was drawn: whether a function falls
    back may depend on the mesh."""
    where = recompute.scope()
    note = recompute.drawn(where)
    fresh = Note(_State.seed, _State.calls + 1, False) if note is None else note
    devices = {"cpu": torch.device("cpu"), mesh.device.type: mesh.device}
    contexts = [Draw(fresh, mesh).seeded(axes, device) for device in devices.values()]
    entered = []
    drawn = False
    try:
        for context in contexts:
            entered.append((context.__enter__(), context.generator.get_state()))
        yield
    finally:
        for context, before in entered:
            drawn = drawn or not torch.equal(before, context.generator.get_state())
            context.__exit__(None, None, None)
    if drawn:
        if note is None:
            _State.calls += 1
        recompute.note(where, fresh)


# Factories ----------------------------------------------------------------------------------------

_PLAIN = frozenset({torch.zeros, torch.ones, torch.empty, torch.full})


def born(fn: Any, spec: DistSpec, args: Any, kwargs: Any) -> Any:
    """This rank's piece of what a random factory gives for the shape of ``spec``, or None for a
    factory that draws nothing.

    A factory that is not torch's own runs on the local shape, its numbers seeded for this call and
    place.
    """
    if fn in _PLAIN:
        return None
    make = _BORN.get(fn)
    device = spec.mesh.device
    if make is None:
        with forked(spec.mesh, tuple(sorted(spec.layout.sharded))):
            return fn(spec.local_shape, *args, dtype=spec.dtype, device=device, **kwargs)
    generator = kwargs.get("generator")
    unknown = [name for name in kwargs if name != "generator"]
    if unknown:
        raise TypeError(f"{fn.__name__} on a mesh: unknown argument {unknown[0]!r}")
    return make(draw(spec.mesh, "invariant", generator), spec, *args)


def _rand(this: Draw, spec: DistSpec) -> Tensor:
    return _either(this, "uniform", spec, lambda shape, **how: torch.rand(shape, **how))


def _randn(this: Draw, spec: DistSpec) -> Tensor:
    return _either(this, "normal", spec, lambda shape, **how: torch.randn(shape, **how))


def _randint(this: Draw, spec: DistSpec, *bounds: int) -> Tensor:
    """``randint(shape, high)`` or ``randint(shape, low, high)``; int64 unless an integer dtype is
    given."""
    low, high = (0, *bounds)[-2:]
    typed = spec.with_dtype(torch.int64) if spec.dtype == torch.get_default_dtype() else spec
    return _either(
        this,
        "integers",
        typed,
        lambda shape, **how: torch.randint(low, high, shape, **how),
        low=low,
        high=high,
    )


def _randperm(this: Draw, spec: DistSpec) -> Tensor:
    dtype = torch.int64 if spec.dtype == torch.get_default_dtype() else spec.dtype
    whole = philox.permutation(*this.key, math.prod(spec.shape), spec.mesh.device).to(dtype)
    return whole.narrow(0, spec.local_box.offset[0], spec.local_shape[0]).clone()


def _either(
    this: Draw, kind: str, spec: DistSpec, fast: Callable[..., Tensor], **options: Any
) -> Tensor:
    device = spec.mesh.device
    if this.invariant:
        return this.numbers(kind, spec, spec.dtype, device, **options)
    with this.seeded(tuple(spec.layout.sharded), device):
        return fast(spec.local_shape, dtype=spec.dtype, device=device)


_BORN: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _rand, torch.randn: _randn, torch.randint: _randint, torch.randperm: _randperm,
}  # fmt: skip
