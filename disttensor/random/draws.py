"""The policies of random numbers, and the numbers of one call.

Random numbers depend on the position in the program, not on the rank: every random call takes the
next number of a counter that is the same on all ranks (counter.py). There are two policies
(``rng``):

    "invariant"   numbers by global element index (philox.py): any mesh and placement gives the same
                  bits. The default of factories, initialization and sampling
    "fast"        torch's own generator and kernels, seeded for this call and for this rank's place
                  on the axes that split the tensor. The default of dropout and its like

Replicas draw the same numbers, shards different ones, and torch's own generator does not move. At
optimizer steps the ranks compare the seeds and counts of their calls
(``compare_programs.record_draw``). A recomputation under activation checkpointing repeats the calls
of its forward: see disttensor.autograd.activation_checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from disttensor import observe
from disttensor.autograd import activation_checkpoint
from disttensor.checks import check_dropout
from disttensor.comm import compare_programs
from disttensor.core.layout import Axes
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec
from disttensor.random import counter, distributions
from disttensor.random.philox import Source, derive
from disttensor.settings import Setting
from disttensor.torch_private import current_backward, no_dispatch, no_function_mode
from ops.answer import default_generator
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
    >>> with dt.random.rng("invariant"):
    ...     y = torch.nn.functional.dropout(x, 0.5)
    >>> bool(((y == 0) | (y == 2)).all())
    True
    """


class Note(NamedTuple):
    """The state that decides the numbers of one random call."""

    seed: int
    call: int
    invariant: bool


class RandomDraw:
    """The random numbers of one call on one mesh (``ops.local.DrawProtocol``)."""

    __slots__ = ("invariant", "key", "mesh")

    def __init__(self, note: Note, mesh: ProcessMesh) -> None:
        self.key = note.seed, note.call
        self.invariant = note.invariant
        self.mesh = mesh

    def numbers(
        self, kind: str, piece: Any, dtype: torch.dtype, device: Any, **options: Any
    ) -> Tensor:
        """Draws the numbers of ``piece``. ``kind``: a function of distributions.py."""
        draw: Callable[..., Tensor] = getattr(distributions, kind)
        bare = piece
        if isinstance(piece, DistSpec):  # drawn without users' own placements, then resharded
            bare = piece.with_layout(piece.layout.without_custom())
        source = Source(*self.key, bare.shape, bare.local_box, device)
        numbers = draw(source, dtype, **options)
        return numbers if bare is piece else cross_mesh.run(numbers, bare, piece)

    def seeded(self, axes: Axes, device: torch.device) -> Seeded:
        return Seeded(derive(*self.key) + _place(self.mesh, axes), device)


def draw(mesh: ProcessMesh, default: str, generator: torch.Generator | None = None) -> RandomDraw:
    """Starts the next random call. All ranks make it alike, also ranks without a piece.

    default: the policy outside ``rng``. generator: the user's, in the same state on all ranks: it
    draws one int64 as the seed. torch's default generator counts as None.
    """
    where = activation_checkpoint.current_run()
    found = activation_checkpoint.repeated_note(where)
    if found is None:
        invariant = (rng.current() or default) == "invariant"
        if generator is None or generator is default_generator(generator.device):
            found = Note(*counter.count(), invariant)
        else:
            found = Note(_number_of(generator), 0, invariant)
        compare_programs.record_draw(mesh, found.seed, found.call)
    if generator is None or where is not None:
        activation_checkpoint.add_note(where, found)
    return RandomDraw(found, mesh)


def generator_in(args: Any, kwargs: Any) -> torch.Generator | None:
    """Returns the generator among the arguments of a call, or None."""
    every = (*args, *(kwargs or {}).values())
    return next((a for a in every if isinstance(a, torch.Generator)), None)


def generator_for_one(mesh: ProcessMesh, generator: torch.Generator) -> torch.Generator:
    """Returns a generator for one call that runs whole on each rank, in ``fork_generators``. The
    user's generator draws one number, also on ranks off the mesh."""
    if generator is default_generator(generator.device):
        return generator
    note = draw(mesh, "fast", generator).key
    return torch.Generator(generator.device).manual_seed(derive(*note))


def _number_of(generator: torch.Generator) -> int:
    counter.note_generator(generator)
    with no_dispatch(), no_function_mode():
        number = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(number.random_(generator=generator))


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    check_dropout(p)  # as the local function does on ranks of the mesh
    return p == 0.0 or not training


def _alpha_dropout(
    input: Any, p: float = 0.5, training: bool = False, inplace: bool = False
) -> bool:
    return _dropout(input, p, training)


def _rrelu(
    input: Any, lower: float = 0.0, upper: float = 0.0, training: bool = False,
    inplace: bool = False, generator: Any = None,
) -> bool:  # fmt: skip
    return not training


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> bool:  # fmt: skip
    return not dropout_p


# Name (without a trailing "_") -> whether a call in its one form draws nothing, for functions whose
# rules draw or not by the values of a call.
DRAWS_NOTHING: dict[str, Callable[..., bool]] = {
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _dropout,
    "native_dropout": lambda input, p, train=True: train is False,
    "rrelu": _rrelu,
    "scaled_dot_product_attention": _attention,
}


class Seeded:
    """Seeds torch's generator of the device with ``seed`` inside its block, and restores it
    afterwards."""

    __slots__ = ("device", "generator", "seed", "state")

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed & (1 << 63) - 1
        self.generator = default_generator(device)

    def __enter__(self) -> Seeded:
        self.state = self.generator.get_state()
        counter._State.inside += 1
        self.generator.manual_seed(self.seed)
        return self

    def __exit__(self, *_: object) -> None:
        self.generator.set_state(self.state)
        counter._State.inside -= 1


def _show_seeds() -> None:
    for o in observe.seeing_calls():
        o.seed()


def _place(mesh: ProcessMesh, axes: Axes) -> int:
    """Returns the number of this rank's place on ``axes``."""
    place, number = mesh.coordinate or (0,) * mesh.ndim, 0
    for a in sorted(axes):
        number = number * mesh.shape[a] + place[a]
    return number


class _SeededGenerators:
    """Seeds torch's generators of the CPU and of the mesh's device in the block, and restores
    them. ``drew``: whether the block drew from them."""

    def __init__(self, mesh: ProcessMesh, seed: int) -> None:
        devices = [mesh.device] if mesh.device.type == "cpu" else [torch.device("cpu"), mesh.device]
        self.each = [Seeded(seed, device) for device in devices]
        self.drew = False

    def _states(self) -> list[Tensor]:
        with no_dispatch(), no_function_mode():
            return [one.generator.get_state() for one in self.each]

    def __enter__(self) -> None:
        for one in self.each:
            one.__enter__()
        self.first = self._states()
        _show_seeds()

    def __exit__(self, *_: object) -> None:
        with no_dispatch(), no_function_mode():
            self.drew = not all(map(torch.equal, self.first, self._states()))
        for one in self.each:
            one.__exit__()
        _show_seeds()


class fork_generators:
    """Seeds torch's generators alike on all ranks of one place on ``axes``, and restores them. The
    block counts as a random call only if it draws: whether a function falls back may depend on the
    mesh.

    Blocks nest. A block has the number of the first random call inside, and hashes in how many
    blocks of this number it is, so that no two seeds are equal.
    """

    def __init__(self, mesh: ProcessMesh, axes: Axes = ()) -> None:
        self.mesh, self.axes = mesh, axes

    def __enter__(self) -> None:
        self.where = activation_checkpoint.current_run()
        note = activation_checkpoint.next_note(self.where, _is_counted)
        self.is_new = note is None
        if note is None:
            seed, calls = counter.get_state()
            note = Note(seed, calls + 1, False)
        self.note, self.around = note, counter._State.fork
        key = note[:2]
        depth = self.around[1] + 1 if self.around[0] == key else 1
        self.seeded = _SeededGenerators(
            self.mesh, derive(*key, depth) + _place(self.mesh, self.axes)
        )
        self.seeded.__enter__()
        counter._State.fork = key, depth

    def __exit__(self, *_: object) -> None:
        counter._State.fork = self.around
        self.seeded.__exit__()
        if self.seeded.drew:
            if self.is_new:
                # raises an error if the forward drew less
                activation_checkpoint.repeated_note(self.where)
                counter.count()
                compare_programs.record_draw(self.mesh, self.note.seed, self.note.call)
            activation_checkpoint.add_note(self.where, self.note)


def _is_counted(note: Any) -> bool:
    """Returns True for a random call that draws from no generator of the user."""
    return type(note) is Note and note.call > 0


class LaterDraws:
    """The numbers that the backward of a node draws for regular tensors. They are counted in the
    forward: a rank off the mesh runs no backward."""

    def __init__(self, mesh: ProcessMesh) -> None:
        inside = current_backward() != -1 and activation_checkpoint.current_run() is None
        self.key = counter.get_state() if inside else draw(mesh, "fast").key
        self.mesh, self.runs = mesh, 0

    def seeded(self) -> _SeededGenerators:
        """Seeds torch's generators alike on all ranks for one run, and restores them."""
        self.runs += 1
        return _SeededGenerators(self.mesh, derive(*self.key, 0, self.runs))
