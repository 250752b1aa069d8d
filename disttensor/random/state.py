"""The policy of random numbers; what one call draws.

The position in the program decides, not the rank: every random call takes the next number of a
counter that all ranks keep alike (counter.py). Two policies say what that number becomes (``rng``):

    "invariant"   numbers by global element index (philox.py): any mesh and placement gives the same
                  bits. The default of factories, initialization and sampling
    "fast"        torch's own generator and kernels, seeded for this call and for this rank's place
                  on the axes that split the tensor. The default of dropout and its like

Replicas draw the same, shards draw different numbers, and torch's own generator does not move. At
optimizer steps the ranks compare what their calls drew from (``program.draws``). A recomputation
under activation checkpointing repeats the calls of its forward: see
disttensor.autograd.activation_checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from disttensor.autograd import activation_checkpoint
from disttensor.comm import program
from disttensor.core.layout import Axes
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.random import counter, distributions
from disttensor.random.philox import Source, derive
from disttensor.settings import Setting
from disttensor.torch_private import no_dispatch, no_function_mode
from reshard import cross_mesh

Tensor = torch.Tensor
_POLICIES = ("invariant", "fast")


class rng(Setting, allowed=_POLICIES):
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
        """``kind``: the name of a function of distributions.py."""
        draw: Callable[..., Tensor] = getattr(distributions, kind)
        bare = piece
        if isinstance(piece, DistSpec):  # its box says where rows of a placement of ours lie
            bare = piece.with_layout(piece.layout.without_own())
        source = Source(*self.key, bare.shape, bare.local_box, device)
        numbers = draw(source, dtype, **options)
        return numbers if bare is piece else cross_mesh.run(numbers, bare, piece)

    def seeded(self, axes: Axes, device: torch.device) -> Seeded:
        place = self.mesh.coordinate or (0,) * self.mesh.ndim
        number = 0
        for a in sorted(axes):
            number = number * self.mesh.shape[a] + place[a]
        return Seeded(derive(*self.key) + number, device)


def draw(mesh: ProcessMesh, default: str, generator: torch.Generator | None = None) -> Draw:
    """The next random call: all ranks make it alike, those without a piece too.

    default: the policy outside ``rng``. generator: the user's, in the same state on all ranks: one
    int64 of it is the seed. torch's default generator is as None.
    """
    where = activation_checkpoint.current_run()
    found = activation_checkpoint.replayed(where)
    if found is None:
        invariant = (rng.current() or default) == "invariant"
        if generator is None or generator is _generator(generator.device):
            found = Note(*counter.count(), invariant)
        else:
            found = Note(_number_of(generator), 0, invariant)
        program.draws(mesh, found.seed, found.call)
    if generator is None or where is not None:
        activation_checkpoint.note(where, found)
    return Draw(found, mesh)


def generator_in(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator among the arguments of a call."""
    every = (*args, *(kwargs or {}).values())
    return next((a for a in every if isinstance(a, torch.Generator)), None)


def generator_for_one(mesh: ProcessMesh, generator: torch.Generator) -> torch.Generator:
    """A generator for one call that runs whole on each rank: the user's moves as for any random
    call, on ranks outside the mesh too."""
    note = draw(mesh, "fast", generator).key
    return torch.Generator(generator.device).manual_seed(derive(*note))


def _number_of(generator: torch.Generator) -> int:
    with no_dispatch(), no_function_mode():
        number = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(number.random_(generator=generator))


def _dropout(input: Any, p: float = 0.5, *flags: Any, **named: Any) -> bool:
    return p == 0.0 or not named.get("train", named.get("training", flags[0] if flags else True))


# Which calls draw nothing, of the functions whose rules draw or not by the values of a call (by
# name, without the "_" at its end).
IDLE: dict[str, Callable[..., bool]] = {
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "alpha_dropout": _dropout,
    "feature_alpha_dropout": _dropout,
    "native_dropout": lambda input, p, train=True: train is False,
    "rrelu": lambda input, lower=0.0, upper=0.0, training=False, *_, **__: not training,
    "scaled_dot_product_attention": (
        lambda query, key, value, attn_mask=None, dropout_p=0.0, *_, **__: not dropout_p
    ),
}


class Seeded:
    """``with Seeded(seed, device):`` torch's generator of the device draws from ``seed``;
    afterwards it is as before."""

    __slots__ = ("after", "device", "generator", "seed", "state")

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed & (1 << 63) - 1
        self.generator = _generator(device)

    def __enter__(self) -> Seeded:
        self.state = self.generator.get_state()
        counter._State.inside += 1
        self.generator.manual_seed(self.seed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.generator.set_state(self.state)
        counter._State.inside -= 1


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
    where = activation_checkpoint.current_run()
    note = activation_checkpoint.replayed(where, sure=False)
    if note is None:
        seed, calls = counter.get_state()
        fresh = Note(seed, calls + 1, False)
    else:
        fresh = note
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
            activation_checkpoint.replayed(where)  # an error, where the forward drew less
            counter.count()
            program.draws(mesh, fresh.seed, fresh.call)
        activation_checkpoint.note(where, fresh)
