"""Caches the results of operators on tensors without data: torch needs a fifth of a millisecond for
one, and a step has thousands of equal calls. The process of a rank begins with the results of those
before it."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from disttensor.pytree import Uncacheable, collect, key_of_contents, rebuild
from disttensor.simulate.flop_formulas import flop_formula, is_counted_by_torch
from disttensor.torch_private import FakeTensor, as_meta, fake_like, no_dispatch, storage_id
from ops.answer import KNOWN

Tensor = torch.Tensor
_MOST = 1 << 17  # calls that are remembered
_TORCH = os.path.dirname(torch.__file__) + os.sep
_META = torch.device("meta")
_aten = torch.ops.aten
_Operator: Any = type(_aten.add.Tensor)
_EMPTY = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip


class _Out(NamedTuple):
    """A tensor of a result.

    of      the argument that it is (``same``) or is a view of; None: it is a new tensor
    reach   bytes of its storage up to its last element
    like    a fake tensor of the same device
    """

    of: int | None
    same: bool
    shape: Any
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    reach: int
    like: FakeTensor


class Cost(NamedTuple):
    """The cost of an operator, see ``events.Op``. ``views``: it makes no new tensor."""

    flops: int
    nbytes: int
    dtype: torch.dtype
    views: bool
    causal: tuple[int, ...] = ()


_known: dict[Any, tuple[Any, Cost]] = {}
_answers: dict[str, dict[Any, Any]] = {"cpu": {}, "cuda": {}}  # ``KNOWN``, by type of device


def run(func: Any, args: Any, kwargs: Any, mode: Any) -> tuple[Any, Cost]:
    """Returns ``func(*args, **kwargs)`` in the FakeTensorMode ``mode``, and its cost."""
    try:
        # torch reads the default dtype in factories and promotions of numbers
        around = mode, torch.get_default_dtype(), flop_formula(func)
        key = func, around, key_of_contents((args, kwargs), _key_of_tensor)
        found = _known.get(key)
    except Uncacheable:
        out = func(*args, **kwargs)
        return out, cost(func, args, kwargs, out)
    if found is not None:
        return _made(found[0], args, kwargs, mode), found[1]
    tensors: list[Any] = collect((args, kwargs), [])
    before = [t.shape for t in tensors]
    out = func(*args, **kwargs)
    spent = cost(func, args, kwargs, out)
    if [t.shape for t in tensors] == before and len(_known) < _MOST:  # none was resized
        with contextlib.suppress(Uncacheable):
            _known[key] = _noted(out, tensors, mode), spent
    return out, spent


class _Pickler(pickle.Pickler):
    def persistent_id(self, x: Any) -> Any:
        if isinstance(x, _Operator):
            return x._overloadpacket.__name__, x._overloadname
        return (x.fake_device,) if type(x) is FakeTensor else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, mode: Any) -> None:
        super().__init__(io.BytesIO(data))
        self.mode = mode

    def persistent_load(self, name: Any) -> Any:
        if len(name) == 1:
            return _like(self.mode, *name)
        return getattr(getattr(_aten, name[0]), name[1])


def begin_rank(device_type: str) -> int:
    """Lets the engine know torch's answers of earlier ranks only. Returns the number of remembered
    calls, for ``known_since``."""
    KNOWN.clear()  # autocast and attention are of another device there
    KNOWN.update(_answers[device_type])
    return len(_known)


def known_since(count: int, device_type: str) -> bytes:
    """Returns the results after the first ``count``, and torch's answers, for another process."""
    out, entries = io.BytesIO(), []
    for (func, around, contents), found in itertools.islice(_known.items(), count, None):
        if func.namespace == "aten" and around[2] is flop_formula(func):
            entries.append((func, around[1], contents, found))
    earlier = _answers[device_type]
    answers = {key: found for key, found in KNOWN.items() if key not in earlier and _is_own(key[0])}
    try:
        _Pickler(out).dump((entries, answers))
    except (TypeError, AttributeError, pickle.PicklingError):  # it would only save time
        return b""
    return out.getvalue()


def _is_own(func: Any) -> bool:
    """Returns True for a function of torch that has the same name in another process: no operator
    of a library, and no function that the program put in place of another."""
    code = getattr(func, "__code__", None)
    builtin = type(func).__module__ == "builtins"
    return builtin and (code is None or code.co_filename.startswith(_TORCH))


def add_known(data: bytes, mode: Any, device_type: str) -> None:
    """Adds the results of another process."""
    if not data:
        return
    entries, answers = _Unpickler(data, mode).load()
    for func, dtype, contents, found in entries:
        _known[func, (mode, dtype, flop_formula(func)), contents] = found
    _answers[device_type].update(answers)


def cost(func: Any, args: Any, kwargs: Any, out: Any) -> Cost:
    """Returns the cost of the kernel of ``func``, with or without data."""
    ins: list[Tensor] = collect((args, kwargs), [])
    outs: list[Tensor] = [out] if isinstance(out, Tensor) else collect(out, [])
    if not outs and func._schema.is_mutable:  # of a list of tensors
        given = zip(func._schema.arguments, args)  # noqa: B905
        outs = collect([a for s, a in given if _written(s)], [])
        outs += collect([kwargs[s.name] for s in func._schema.arguments
                      if s.kwarg_only and s.name in kwargs and _written(s)], [])  # fmt: skip
    count = flop_formula(func)
    flops = count(*args, **kwargs, out_val=out) if count is not None else 0
    views = func.is_view or not outs
    numbers = (t.dtype for t in (*outs, *ins) if t.is_floating_point() or t.is_complex())
    dtype = next(numbers, torch.int64)
    if dtype.is_complex:  # of a product of two complex numbers torch counts one of four products
        dtype, flops = dtype.to_real(), flops * (4 if is_counted_by_torch(func) else 1)
    nothing = views or func._overloadpacket in _EMPTY
    nbytes = 0 if nothing else sum(map(_touched, ins)) + sum(map(_touched, outs))
    return Cost(int(flops), nbytes, dtype, views, _causal(func, args, kwargs) if flops else ())


def _causal(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    """Returns the numbers of queries and keys of an attention with ``is_causal``, else (). The
    numbers are the last dim but one."""
    at = _causal_at(func)
    if at is None:
        return ()
    given = [args[i] if i < len(args) else kwargs.get(name, False) for name, i in at]
    return (given[0].shape[-2], given[1].shape[-2]) if given[2] else ()


@cache
def _causal_at(func: Any) -> list[tuple[str, int]] | None:
    """Returns the positions of queries, keys and ``is_causal`` in the arguments."""
    names = [a.name for a in func._schema.arguments]
    wanted = "query", "key", "is_causal"
    return [(n, names.index(n)) for n in wanted] if {*wanted} <= {*names} else None


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _touched(t: Tensor) -> int:
    """Returns the bytes that are read or written; expanded elements count once."""
    there = math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)
    return min(there * t.itemsize, _reach(t.shape, t.stride(), 0, t.itemsize))


def _reach(shape: Any, strides: Any, offset: int, itemsize: int) -> int:
    """Returns the bytes of a storage up to the last element."""
    if 0 in shape:
        return 0
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return int(last + 1) * itemsize


def _key_of_tensor(x: Any) -> Any:
    kind = type(x)
    if kind is FakeTensor and x.constant is None and not x.dtype.is_complex:
        return x.shape, x.stride(), x.dtype, x.storage_offset(), x.fake_device
    if kind is Tensor:
        return kind, x.shape, x.stride(), x.dtype, x.device
    raise Uncacheable


def _noted(out: Any, tensors: list[Any], mode: Any) -> Any:
    """Returns a description of ``out``: an _Out, a list or tuple of them, None."""
    if out is None:
        return None
    if type(out) in (list, tuple):
        return rebuild(out, [_noted(o, tensors, mode) for o in out])
    if type(out) is not FakeTensor or out.constant is not None:
        raise Uncacheable
    of = next((i for i, t in enumerate(tensors) if t is out), None)
    same = of is not None
    if not same:
        mine = storage_id(out.untyped_storage())
        ids = [storage_id(t.untyped_storage()) for t in tensors]
        of = ids.index(mine) if mine in ids else None
    shape, strides, offset = out.shape, out.stride(), int(out.storage_offset())
    reach = _reach(shape, strides, offset, out.itemsize)
    return _Out(of, same, shape, strides, offset, out.dtype, reach, _like(mode, out.fake_device))


@cache
def _like(mode: Any, device: torch.device) -> FakeTensor:
    return FakeTensor(mode, torch.empty(0, device=_META), device)


def _made(noted: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    """Returns the result that ``noted`` describes."""
    of = noted.of if type(noted) is _Out else -1
    if of is None or (of == 0 and isinstance(args[0], Tensor)):  # mostly
        return _again(noted, args, mode)
    return _again(noted, collect((args, kwargs), []), mode)


def _again(noted: Any, tensors: Sequence[Any], mode: Any) -> Any:
    if noted is None:
        return None
    if type(noted) is not _Out:
        return rebuild(noted, [_again(n, tensors, mode) for n in noted])
    if noted.of is None:
        with no_dispatch():
            bare = torch.empty_strided(noted.shape, noted.stride, dtype=noted.dtype, device=_META)
        return fake_like(noted.like, bare)
    source = tensors[noted.of]
    if noted.same:
        return source
    storage = source.untyped_storage()
    with no_dispatch():
        if storage.nbytes() >= noted.reach:
            bare = torch.empty(0, dtype=noted.dtype, device=_META)
            bare.set_(storage, noted.offset, noted.shape, noted.stride)
            return fake_like(noted.like, bare)
    with as_meta(mode):  # its memory was freed, which set_ would give back
        if source.dtype != noted.dtype:
            source = source.view(noted.dtype)
        bare = torch.as_strided(source, noted.shape, noted.stride, noted.offset)
    return fake_like(noted.like, bare)
