"""Views: dims are split, merged, renamed, added or dropped; nothing is computed.

view of a local: where torch may view the global tensor, it may view a piece of it with the same strides: only major
dims of a merged group are split. A local that came with other strides (out of a collective, say) is copied, with a
warning, rather than refused: the ranks' strides may differ, and an error on some ranks only would be a hang. What is
lost then is that writes in place through the view reach the base.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ops.dims import front, fronts, letters_of, moved, named, numbers
from ops.factors import Arg, Factors
from ops.infer import NoRule
from ops.regroup import regrouped, resolve
from ops.registry import rule

Tensor = torch.Tensor
Local = Callable[..., Any]


def needed(call: Any) -> bool:
    """Do the sizes of the pieces differ from the global ones (those of a second tensor, which may be split)?"""
    return bool(call.split) or len(call.inputs) > 1


def local_view(call: Any) -> Local:
    """The view with the sizes of this rank's piece."""
    shape = call.outputs[0].local_shape

    def view(input: Tensor, *sizes: Any, **words: Any) -> Tensor:
        try:
            return input.view(shape)
        except RuntimeError:
            warnings.warn(
                f"view: a local of strides {input.stride()} cannot be viewed as {list(shape)} and is copied; "
                "writes in place through the result will not reach the tensor it was taken from",
                stacklevel=2,
            )
            return input.reshape(shape)

    return view if call.split else call.func  # type: ignore[no-any-return]


def local_reshape(call: Any) -> Local:
    """The reshape with the sizes of this rank's piece."""
    shape = call.outputs[0].local_shape
    return (lambda input, *sizes, **words: input.reshape(shape)) if needed(call) else call.func


def local_expand(call: Any) -> Local:
    """The expand with the sizes of this rank's piece."""
    shape = call.outputs[0].local_shape
    return (lambda input, *sizes, **words: input.expand(shape)) if needed(call) else call.func


@rule(torch.Tensor.view, exact=True)
def view(input: Arg, *shape: Any, size: Any = None, dtype: Any = None) -> Factors:
    """dims are split and merged; a split major dim stays split where the pieces are whole rows"""
    kind = dtype if dtype is not None else shape[0] if shape else None
    if isinstance(kind, torch.dtype):
        if input.dtype is None or kind.itemsize != input.dtype.itemsize:
            raise NoRule("view as a dtype of another size")
        return moved(input, letters_of(input), moves=False, view=True)
    return regrouped(input, numbers(shape, size), local=local_view, view=True)


@rule(*named("reshape"), exact=True)
def reshape(input: Arg, *shape: Any, **words: Any) -> Factors:
    """as view"""
    return regrouped(input, numbers(shape, words.get("shape")), local=local_reshape, view=True)


@rule(*named("view_as", "reshape_as"), exact=True)
def reshape_as(input: Arg, other: Arg) -> Factors:
    """as view, with the shape of ``other``"""
    f = regrouped(input, other.shape, local=local_reshape, view=True)
    return f.but(
        inputs=(*f.inputs, (None,) * other.ndim),
        ignored=frozenset({1}),
        moves=False,
        terms=(frozenset({0}),),
    )


@rule(*named("flatten"), exact=True)
def flatten(input: Arg, start_dim: int = 0, end_dim: int = -1) -> Factors:
    """as view"""
    a, b = front(start_dim, input.ndim), front(end_dim, input.ndim)
    shape = input.shape or (1,)
    merged = 1
    for s in shape[a : b + 1]:
        merged *= s
    return regrouped(input, (*shape[:a], merged, *shape[b + 1 :]), local=local_reshape, view=True)


@rule(*named("ravel"), exact=True)
def ravel(input: Arg) -> Factors:
    """as view(-1)"""
    return regrouped(input, (input.numel(),), local=local_reshape, view=True)


@rule(*named("unflatten"), exact=True)
def unflatten(input: Arg, dim: int, sizes: Any) -> Factors:
    """as view"""
    if not isinstance(dim, int):
        raise NoRule("unflatten by name")
    at = front(dim, input.ndim)
    parts = resolve(input.shape[at : at + 1], tuple(sizes))
    return regrouped(
        input, (*input.shape[:at], *parts, *input.shape[at + 1 :]), local=local_reshape, view=True
    )


@rule(*named("squeeze"), exact=True)
def squeeze(input: Arg, *dim: Any, **words: Any) -> Factors:
    """dims of global size 1 go; a dim that is 1 on this rank only stays"""
    if "dim" in words:
        dim = (words["dim"],)
    asked = range(input.ndim) if not dim or dim[0] is None else fronts(numbers(dim), input.ndim)
    gone = tuple(d for d in asked if d < input.ndim and input.shape[d] == 1)
    ins = tuple(None if d in gone else d for d in range(input.ndim))
    out = tuple(d for d in range(input.ndim) if d not in gone)
    sizes: dict[Any, int] = dict(enumerate(input.shape))
    local = lambda call: (
        (lambda input, *dim, **words: input.squeeze(gone)) if call.split else call.func
    )  # noqa: E731
    return Factors((ins,), (out,), sizes, moves=True, view=True, local=local)


@rule(*named("unsqueeze"), exact=True)
def unsqueeze(input: Arg, dim: int) -> Factors:
    """a new dim of size 1"""
    at = front(dim, input.ndim + 1)
    dims = letters_of(input)
    return moved(input, (*dims[:at], None, *dims[at:]), view=True)


@rule(*named("transpose", "swapaxes", "swapdims"), exact=True)
def transpose(input: Arg, dim0: int, dim1: int) -> Factors:
    """the two dims change places"""
    dims = list(letters_of(input))
    if dims:
        a, b = front(dim0, input.ndim), front(dim1, input.ndim)
        dims[a], dims[b] = dims[b], dims[a]
    return moved(input, tuple(dims), view=True)


@rule(*named("t"), torch.Tensor.T.__get__, torch.Tensor.H.__get__, exact=True)
def t(input: Arg, owner: Any = None) -> Factors:
    """the dims in reverse (.T, .H)"""
    return moved(input, letters_of(input)[::-1], view=True)


@rule(*named("adjoint"), torch.Tensor.mT.__get__, torch.Tensor.mH.__get__, exact=True)
def adjoint(input: Arg, owner: Any = None) -> Factors:
    """the last two dims change places (.mT, .mH)"""
    dims = letters_of(input)
    return moved(input, (*dims[:-2], *dims[-2:][::-1]), view=True)


@rule(*named("permute"), exact=True)
def permute(input: Arg, *dims: Any, **words: Any) -> Factors:
    """the dims in another order"""
    order = fronts(numbers(dims, words.get("dims")), input.ndim)
    if sorted(order) != list(range(input.ndim)):
        raise RuntimeError(f"permute(dims): {list(order)} is no order of {input.ndim} dims")
    return moved(input, order, view=True)


@rule(*named("movedim", "moveaxis"), exact=True)
def movedim(input: Arg, source: Any, destination: Any) -> Factors:
    """some dims move, the others keep their order"""
    src, dst = fronts(source, input.ndim), fronts(destination, input.ndim)
    rest = iter(d for d in range(input.ndim) if d not in src)
    at = dict(zip(dst, src, strict=True))
    return moved(
        input, tuple(at[d] if d in at else next(rest) for d in range(input.ndim)), view=True
    )


def expanded(input: Arg, sizes: tuple[int, ...]) -> Factors:
    """Factors of a broadcast to ``sizes`` (-1 keeps a size)."""
    new = len(sizes) - input.ndim
    if new < 0:
        raise RuntimeError(f"expand: {len(sizes)} sizes for a tensor of {input.ndim} dims")
    shape = tuple(input.shape[d - new] if s == -1 and d >= new else s for d, s in enumerate(sizes))
    ins, out = [], []
    for d, s in enumerate(shape):
        kept = d >= new and input.shape[d - new] == s and s != 1
        if d >= new:
            if not kept and input.shape[d - new] != 1:
                raise RuntimeError(
                    f"expand: size {input.shape[d - new]} of dim {d - new} does not become {s}"
                )
            ins.append(d if kept else None)
        out.append(d if kept else None)
    return Factors(
        (tuple(ins),),
        (tuple(out),),
        dict(enumerate(shape)),
        moves=True,
        shapes=(shape,),
        local=local_expand,
        view=True,
    )


@rule(*named("expand", "broadcast_to"), exact=True)
def expand(input: Arg, *size: Any, implicit: bool = False, **words: Any) -> Factors:
    """dims of size 1 are repeated without a copy, new dims come in front"""
    return expanded(input, numbers(size, words.get("size")))


@rule(*named("expand_as"), exact=True)
def expand_as(input: Arg, other: Arg) -> Factors:
    """as expand, with the shape of ``other``"""
    f = expanded(input, other.shape)
    return f.but(
        inputs=(*f.inputs, (None,) * other.ndim),
        ignored=frozenset({1}),
        moves=False,
        terms=(frozenset({0}),),
    )


@rule(*named("diagonal"), exact=True)
def diagonal(input: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Factors:
    """the two dims are whole and become one, the last"""
    a, b = front(dim1, input.ndim), front(dim2, input.ndim)
    rows, cols = input.shape[a], input.shape[b]
    length = max(0, min(rows, cols - offset) if offset >= 0 else min(rows + offset, cols))
    kept = tuple(d for d in range(input.ndim) if d not in (a, b))
    return moved(input, (*kept, "diagonal"), {"diagonal": length}, view=True)


@rule(*named("unfold"), exact=True)
def unfold(input: Arg, dim: int, size: int, step: int) -> Factors:
    """windows of ``dim``, which is whole; their elements are a new last dim"""
    at = front(dim, input.ndim)
    dims: tuple[Any, ...] = letters_of(input)
    windows = (input.shape[at] - size) // step + 1 if input.ndim else 1
    if not input.ndim:
        raise NoRule("unfold of a number")
    return moved(
        input,
        (*dims[:at], "windows", *dims[at + 1 :], "size"),
        {"windows": windows, "size": size},
        view=True,
    )


@rule(*named("contiguous", "detach", "alias"), exact=True)
def same(input: Arg, **words: Any) -> Factors:
    """every dim passes through; the result shares the memory"""
    return moved(input, letters_of(input), view=True)


@rule(*named("clone", "detach_copy"), exact=True)
def clone(input: Arg, **words: Any) -> Factors:
    """every dim passes through"""
    return moved(input, letters_of(input))
