"""Factors: which dims of the tensors of one call are the same dim, and which dims may be split.

Every dim of every tensor is given a letter (any hashable; a tuple of letters for a dim that merges
several, major first; None for a dim that stays whole, as one of size 1 that broadcasts). A mesh
axis splits a *factor*: every tensor dim with that letter. See ``Factors`` for the kinds of factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from disttensor.core.layout import Axes, Layout, layout_of
from disttensor.core.placement import Placement

Letter = Hashable
Dims = tuple[Any, ...]
Terms = tuple[Set[int], ...]


class NoRule(LookupError):
    """Raised if a function has no rule, or its rule does not cover this call: the call falls
    back."""


class Arg:
    """A tensor argument as rules see it: shape, layout and dtype, no data.

    Users give placements (one per mesh axis); ``index`` is its number among the tensors of the
    call.
    """

    __slots__ = ("dtype", "index", "layout", "placements", "shape")

    def __init__(
        self, shape: Sequence[int], placements: Sequence[Placement] | None = None,
        dtype: Any = None, *,
        layout: Layout | None = None, index: int = -1,
    ) -> None:  # fmt: skip
        self.shape = tuple(shape)
        self.placements = placements
        self.dtype = dtype
        self.layout: Layout = layout  # type: ignore[assignment]
        self.index = index

    def placed(self, mesh_ndim: int, index: int) -> Arg:
        """Returns this argument with its layout on a mesh and its number, after checking its
        placements."""
        layout = self.layout or layout_of(self.placements or (), len(self.shape), mesh_ndim)
        return Arg(
            self.shape,
            self.placements,
            self.dtype,
            layout=layout,
            index=index,
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * (self.dtype.itemsize if self.dtype is not None else 4)

    def __repr__(self) -> str:
        return f"Arg({list(self.shape)}, {self.placements or self.layout})"


LocalMaker = Callable[[Any], Callable[..., Any]]


@dataclass(slots=True)
class Factors:
    """How shardings pass through one call.

    Args:
        inputs, outputs: letters of each tensor argument (in order of appearance) and of each result
        sizes: size of each letter that only results or merged dims have; of a letter of inputs, if
            their dims differ
        reduced: letters that only inputs have -> the pending reduction of the result if they are
            split ("sum", "max", ...), or "inner": the local function reduces inside and its result
            is replicated
        unsplittable: letters that must not be split; so is every letter that is neither in all
            outputs nor reduced
        divisible_only: letters that may be split only without remainder (of dims that split or
            merge)
        linear_terms: the call is a sum of products: for each term the arguments in which it is
            linear. The result may be P(sum) if every term is P(sum): by one P operand, by a split
            reduced letter, or by joining: a replicated operand becomes P(sum), whole on the first
            rank of the axis and zero on the others. (): linear in no argument, Partial inputs are
            reduced first.
        moves: the call only moves elements: a Partial of any reduction passes through
        shapes: global shapes of the outputs, if letters do not determine them
        local: called once per plan: ``local(call)`` returns the function that runs on locals
        independent: letters along which ``local`` treats each index separately, at any position of
            the global tensor (``Balanced``); without ``local``, all letters that may be split
        views: for each result the number of the argument whose memory it shares, or None; torch
            gives it for its functions (``ops/check_call.py``)
        rematerialize: the number of a tensor: the call is cheap to repeat, so a use of the result
            that varies repeats it with a use of this tensor, instead of all-reducing the gradient
        metadata_only: arguments of which only shape and dtype matter (zeros_like): never resharded
        targets: arguments that an in-place function writes: they keep their layouts
        side_writes: arguments that a function writes in addition to its result (running
            statistics): an axis that splits them takes their letter, no other axis does
        per_item: a function on lists consists of independent calls: for each call its Factors, with
            its own letters, and the numbers of its arguments. Arguments of no item are shared by
            all items, and replicated.
        halo: letters whose split dims need elements of other ranks: letter -> the bytes that a rank
            receives if the letter is split in n. They stay split if a gather would cost as much or
            more.
        co_split: letters that an axis may split although it splits another letter too: letter ->
            such axes. Tensors with the letter are not resharded there; the local function combines
            the two.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: dict[Letter, int] = field(default_factory=dict)
    reduced: Mapping[Letter, str] = field(default_factory=dict)
    unsplittable: Set[Letter] = frozenset()
    divisible_only: Set[Letter] = frozenset()
    linear_terms: Terms = ()
    moves: bool = False
    shapes: tuple[tuple[int, ...], ...] | None = None
    local: LocalMaker | None = None
    independent: Set[Letter] = frozenset()
    views: tuple[int | None, ...] = ()
    rematerialize: int | None = None
    metadata_only: Set[int] = frozenset()
    targets: tuple[int, ...] = (0,)
    side_writes: Set[int] = frozenset()
    per_item: tuple[tuple[Factors, tuple[int, ...]], ...] = ()
    halo: Mapping[Letter, Callable[[int], float]] = field(default_factory=dict)
    co_split: Mapping[Letter, Axes] = field(default_factory=dict)

    @property
    def view(self) -> bool:
        """Returns True if a result shares memory with an argument."""
        return any(number is not None for number in self.views)

    def replace(self, **changes: Any) -> Factors:
        """Returns a copy with some fields changed."""
        made = Factors(*_fields(self))  # a fifth of the time of dataclasses.replace
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    def with_sizes(self, shapes: Iterable[Sequence[int]]) -> Factors:
        """Returns these factors with the sizes of letters that inputs of these shapes have, and
        that the rule has not given. Raises NoRule if such a letter has two sizes in the inputs."""
        found: dict[Letter, int] = {}
        for dims, shape in zip(self.inputs, shapes, strict=False):
            for letter, n in zip(dims, shape, strict=False):
                if letter is None or letter in self.sizes or type(letter) is tuple:
                    continue
                if found.setdefault(letter, n) != n:
                    raise NoRule(f"sizes of one letter do not fit: {found[letter]} and {n}")
        return self.replace(sizes={**self.sizes, **found}) if found else self

    def output_shapes(
        self, sizes: Mapping[Letter, int] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the outputs; ``sizes``: of the letters in place of their own."""
        if self.shapes is not None:
            return self.shapes
        n = {**(self.sizes if sizes is None else sizes), None: 1}
        return tuple([
            tuple([math.prod([n[x] for x in d]) if type(d) is tuple else n[d] for d in dims])
            for dims in self.outputs
        ])  # fmt: skip


_fields = attrgetter(*Factors.__slots__)


def pointwise_factors(args: Sequence[Arg], results: int = 1, **options: Any) -> Factors:
    """Returns the letters of broadcasting: dim i from the right is one letter in every argument and
    result. Size 1 broadcasts."""
    ndim = max([len(a.shape) for a in args], default=0)
    sizes: dict[Letter, int] = dict.fromkeys(range(ndim), 1)
    numbered = [[*enumerate(a.shape, ndim - len(a.shape))] for a in args]
    for dims in numbered:
        for i, s in dims:
            if s == 1 or s == sizes[i]:
                continue
            if sizes[i] != 1:
                shapes = ", ".join(str(list(a.shape)) for a in args)
                raise RuntimeError(
                    f"shapes {shapes} do not broadcast: {sizes[i]} and {s} in dim {i}"
                )
            sizes[i] = s
    inputs = tuple([tuple([i if s == sizes[i] else None for i, s in dims]) for dims in numbered])
    return Factors(inputs, (tuple(range(ndim)),) * results, sizes, **options)


def letters(pattern: str, *args: Arg, **options: Any) -> Factors:
    """Returns the factors from a pattern as ``"... m k, k n -> ... m n"`` and the arguments'
    shapes.

    ``...`` stands for any leading dims, aligned at the right and broadcast; ``(a b)`` is a dim that
    merges two (give their sizes with ``sizes=``); ``1`` is a dim of size 1. Letters missing on the
    right are reduced only if ``reduced=`` names them. Raises ValueError if pattern and shapes
    disagree.
    """
    left, right = pattern.split("->")
    sizes: dict[Letter, int] = dict(options.pop("sizes", {}))
    ins = [_tokens(t) for t in left.split(",")]
    outs = [_tokens(t) for t in right.split(",")]
    if len(ins) != len(args):
        raise ValueError(
            f"rule {pattern!r}: {len(ins)} tensors in the pattern, {len(args)} in the call"
        )
    lead = max(
        [a.ndim - len(t) + 1 for t, a in zip(ins, args, strict=True) if "..." in t], default=0
    )
    inputs = []
    for tokens, a in zip(ins, args, strict=True):
        tokens = expand_dots(tokens, lead, a.ndim - len(tokens) + 1)
        if len(tokens) != a.ndim:
            raise ValueError(f"rule {pattern!r}: a tensor of shape {list(a.shape)} does not fit it")
        for token, s in zip(tokens, a.shape, strict=True):
            if not isinstance(token, tuple) and (s != 1 or token not in sizes):
                if sizes.get(token, 1) not in (1, s):
                    raise NoRule(f"sizes of {token!r} do not fit {pattern!r}: {sizes[token]}, {s}")
                sizes[token] = s
        inputs.append(tokens)
    final = tuple(
        tuple(
            None if t == "1" or (not isinstance(t, tuple) and s != sizes[t]) else t
            for t, s in zip(tokens, a.shape, strict=True)
        )
        for tokens, a in zip(inputs, args, strict=True)
    )
    outputs = tuple(
        tuple(None if t == "1" else t for t in expand_dots(tokens, lead, lead)) for tokens in outs
    )
    return Factors(final, outputs, sizes, **options)


def expand_dots(tokens: list[Any], lead: int, n: int) -> list[Any]:
    """Replaces ``...`` by n letters, numbered so that the last of ``lead`` leading dims align."""
    if "..." not in tokens:
        return tokens
    at = tokens.index("...")
    return [*tokens[:at], *(f".{lead - n + i}" for i in range(n)), *tokens[at + 1 :]]


def _tokens(text: str) -> list[Any]:
    out: list[Any] = []
    group: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            out.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(word)
        else:
            out.append(word)
    return out
