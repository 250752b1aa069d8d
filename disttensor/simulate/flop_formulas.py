"""Formulas for the FLOPs of operators that torch's counter leaves out, and the operators that need
none, because they do a few operations for each element that they read or write."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Formula = Callable[..., float]
_aten = torch.ops.aten


def _rnn(times: int) -> Formula:
    """Products of the gates with the inputs and with the states, at each of the steps: Hochreiter
    and Schmidhuber, "Long short-term memory", 1997."""

    def count(x: Any, w: Any, u: Any, *_: Any, **__: Any) -> float:
        return times * 2 * math.prod(x.shape[:-1]) * (w.numel() + u.numel())

    return count


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> float:
    """Products of groups: each row of ``a``, or column of ``b``, is in one of them."""
    groups = a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1
    return 2 * a.numel() * b.shape[-1] / groups


def _fourier(x: Any, dims: Any, *_: Any, out_val: Any, **__: Any) -> float:
    """5 n log2(n) for a complex transform of n elements, and half of it for a real one: Frigo and
    Johnson, "The design and implementation of FFTW3", 2005."""
    real = not (x.is_complex() and out_val.is_complex())
    whole = out_val if x.is_complex() else x
    length = math.prod(whole.shape[d] for d in dims)
    return (2.5 if real else 5.0) * whole.numel() * math.log2(max(2, length))


def _matrix(cubes: float, per_column: float = 0.0) -> Formula:
    """``cubes`` n^3 for a matrix, and ``per_column`` n^2 for each column of the right-hand side:
    Golub and Van Loan, "Matrix computations", 2013, chapters 3 and 4."""

    def count(a: Any, *rest: Any, **_: Any) -> float:
        columns = [x.numel() for x in rest if isinstance(x, torch.Tensor) and x.ndim > 1]
        return cubes * a.shape[-1] * a.numel() + per_column * a.shape[-1] * sum(columns)

    return count


def _as_of(kernel: Any) -> Formula:
    """Torch's formula for the kernel of a GPU that computes the same."""
    return lambda *args, **kwargs: formulas()[kernel](*args, **kwargs)


# By the first argument and the others, as given; ``out_val`` is the result.
_FORMULAS: dict[Any, Formula] = {
    _aten.mkldnn_rnn_layer: _rnn(1),
    _aten.mkldnn_rnn_layer_backward: _rnn(2),
    _aten._grouped_mm: _grouped,
    _aten.mv: lambda a, *_, **__: 2 * a.numel(),
    _aten.addmv: lambda _, a, *__, **___: 2 * a.numel(),
    **dict.fromkeys((_aten.dot, _aten.vdot), lambda a, *_, **__: 2 * a.numel()),
    **dict.fromkeys((_aten._fft_r2c, _aten._fft_c2r, _aten._fft_c2c), _fourier),
    _aten._linalg_solve_ex: _matrix(2 / 3, 2),
    _aten.linalg_lu_factor_ex: _matrix(2 / 3),
    _aten.linalg_lu_solve: _matrix(0, 2),
    _aten.linalg_solve_triangular: _matrix(0, 1),
    _aten.linalg_cholesky_ex: _matrix(1 / 3),
    _aten.linalg_inv_ex: _matrix(2),
    _aten._euclidean_dist: lambda a, b, **_: 2 * a.numel() * b.shape[-2],
    _aten._cdist_forward: lambda a, b, *_, **__: 3 * a.numel() * b.shape[-2],
    _aten._cdist_backward: lambda _, a, b, *__, **___: 4 * a.numel() * b.shape[-2],
    _aten._scaled_dot_product_flash_attention_for_cpu: _as_of(
        _aten._scaled_dot_product_flash_attention
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _as_of(
        _aten._scaled_dot_product_flash_attention_backward
    ),
}

_TAGS = {torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy}
_CHEAP = re.compile(  # parts of the names of other operators that move, compare or sum elements
    "_to|alias|amp_|aminmax|arange|assert|bernoulli|bin|bucketize|cat$|cauchy|clone|complex|copy"
    "|cum|diag|dropout|embedding|empty|exponential|eye|fill|flip|fold|foreach|full|fused|gather"
    "|geometric|glu|grid_sampl|histc|im2col|index|is_|isin|kthvalue|lift|loss|mask|median|mode"
    "|multinomial|nonzero|norm|ones|pad|poisson|polar|pool|prelu|put|rand|repeat|resize|roll"
    "|scatter|searchsorted|select|set|shuffle|slice|softmax|sort|space|split|stack|take|topk|trace"
    "|tri[lu]|uniform|unique|unsafe_view|upsample|window|zero"
)


@cache
def formulas() -> Any:
    """Returns torch's table of formulas, to which programs may add. Its module is imported at the
    first use, because the import makes operators."""
    return importlib.import_module("torch.utils.flop_counter").flop_registry


def is_counted_by_torch(func: Any) -> bool:
    return func._overloadpacket in formulas()


def flop_formula(func: Any) -> Formula | None:
    """Returns the formula for the FLOPs of an operator, or None."""
    packet = func._overloadpacket
    found: Formula | None = formulas().get(packet)
    return found or _FORMULAS.get(packet)


def is_cheap(func: Any) -> bool:
    """Returns True if the time of an operator without a formula is its memory traffic."""
    name = func._overloadpacket.__name__
    if func.namespace not in ("aten", "prims", "disttensor"):
        return False
    plain: Any = getattr(_aten, name.removesuffix("_").removesuffix("_backward"), None)
    forms = [getattr(plain, overload) for overload in plain.overloads()] if plain else []
    return bool(_CHEAP.search(name)) or any(_TAGS & {*form.tags} for form in (func, *forms))
