"""What an operator gives on tensors without data, remembered: torch finds it out in a fifth of a
millisecond, and a step asks for the same a thousand times."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from disttensor.torch_private import FakeTensor, as_meta, no_dispatch
from disttensor.tree import flat, rebuilt

Tensor = torch.Tensor
_MOST = 1 << 17  # calls that are remembered
_META = torch.device("meta")


class _Out(NamedTuple):
    """A tensor of a result. ``of``: the argument that it is (``same``) or is a view of; None: it is
    a new one."""

    of: int | None
    same: bool
    shape: Any
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Cost(NamedTuple):
    """Of one operator: see ``events.Op``. ``views``: it gives nothing new."""

    flops: int
    nbytes: int
    dtype: torch.dtype
    views: bool


class _Uncached(Exception):
    pass


_known: dict[Any, tuple[Any, Cost]] = {}


def run(func: Any, args: Any, kwargs: Any, mode: Any) -> tuple[Any, Cost]:
    """``func(*args, **kwargs)`` in the FakeTensorMode ``mode``, and what it costs."""
    try:
        key = (func, _key(args), *[(k, _key(v)) for k, v in kwargs.items()])
        found = _known.get(key)
    except _Uncached:
        out = func(*args, **kwargs)
        return out, cost(func, args, kwargs, out)
    if found is not None:
        return _made(found[0], args, kwargs, mode), found[1]
    tensors: list[Any] = flat((args, kwargs), [])
    before = [t.shape for t in tensors]
    out = func(*args, **kwargs)
    spent = cost(func, args, kwargs, out)
    if [t.shape for t in tensors] == before and len(_known) < _MOST:  # none was resized
        with contextlib.suppress(_Uncached):
            _known[key] = _noted(out, tensors), spent
    return out, spent


def cost(func: Any, args: Any, kwargs: Any, out: Any) -> Cost:
    """What the kernel of ``func`` computes, reads and writes, with or without data."""
    ins: list[Tensor] = flat((args, kwargs), [])
    outs: list[Tensor] = [out] if isinstance(out, Tensor) else flat(out, [])
    if not outs and func._schema.is_mutable:  # of a list of tensors
        outs = flat([a for a, s in zip(args, func._schema.arguments) if _written(s)], [])  # noqa: B905
    count = flop_registry.get(func._overloadpacket)
    flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
    views = func.is_view or not outs
    dtype = next((t.dtype for t in (*outs, *ins) if t.is_floating_point()), torch.int64)
    nbytes = 0 if views else sum(map(_touched, ins)) + sum(map(_touched, outs))
    return Cost(flops, nbytes, dtype, views)


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _touched(t: Tensor) -> int:
    """Bytes that are read or written: of a tensor that was expanded, those that are there."""
    return min(t.nbytes, t.untyped_storage().nbytes())


def _key(x: Any) -> Any:
    kind = type(x)
    if kind is FakeTensor:
        if x.constant is not None or x.dtype.is_complex:
            raise _Uncached
        return x.shape, x.stride(), x.dtype, x.storage_offset(), x.fake_device
    if kind is list or kind is tuple:
        return tuple([_key(e) for e in x])
    if isinstance(x, Tensor):
        raise _Uncached
    return kind, x


def _noted(out: Any, tensors: list[Any]) -> Any:
    """What is to be made again of ``out``: an _Out, a list or tuple of them, None."""
    if out is None:
        return None
    if type(out) in (list, tuple):
        return rebuilt(out, [_noted(o, tensors) for o in out])
    if type(out) is not FakeTensor or out.constant is not None:
        raise _Uncached
    of = next((i for i, t in enumerate(tensors) if t is out), None)
    same = of is not None
    if not same:
        mine = out.untyped_storage()._cdata
        of = next((i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == mine), None)
    return _Out(
        of, same, out.shape, out.stride(), int(out.storage_offset()), out.dtype, out.fake_device
    )


def _made(noted: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    if type(noted) is _Out and noted.of is None:
        return _new(noted, mode)
    return _again(noted, flat((args, kwargs), []), mode)


def _new(one: _Out, mode: Any) -> Any:
    with no_dispatch():
        bare = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=_META)
    return FakeTensor(mode, bare, one.device)


def _again(noted: Any, tensors: list[Any], mode: Any) -> Any:
    if noted is None:
        return None
    if type(noted) is not _Out:
        return rebuilt(noted, [_again(n, tensors, mode) for n in noted])
    if noted.of is None:
        return _new(noted, mode)
    source = tensors[noted.of]
    if noted.same:
        return source
    with as_meta(mode):
        if source.dtype != noted.dtype:
            source = source.view(noted.dtype)
        bare = torch.as_strided(source, noted.shape, noted.stride, noted.offset)
    return FakeTensor(mode, bare, noted.device)
