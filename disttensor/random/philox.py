"""Random numbers by global position: Philox4x32-10 keyed by seed, call and element index.

The value of an element depends on (seed, call, its row-major index in the *global* tensor) and on
nothing else, so any piece of a tensor can be drawn alone, on any rank and any device, and has the
same bits as that piece of the whole. A narrower dtype gets the float64 value, rounded (uniform:
from the leading bits), so that a float32 model starts as the float64 model does.

Every function below takes (seed, call, shape, offset, local_shape, dtype, device): the global
shape, and the box of it that is wanted. Work goes in chunks; beside the result a call holds a few
MiB. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from disttensor.random.reproducible_math import exp, log, normal_quantile, sin_half_pi

Device = torch.device | str
_M32 = 0xFFFFFFFF
_M64 = 0xFFFFFFFFFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_KEY0, _KEY1 = 0x9E3779B9, 0xBB67AE85
_HALVES = (torch.float16, torch.bfloat16)


def bits(seed: int, call: int, index: Tensor, lanes: int = 4) -> tuple[Tensor, ...]:
    """``lanes`` (1 to 4) int64 tensors, each holding a uint32 per element of ``index`` (int64).

    Philox4x32-10 of the counter (index low, index high, call low, call high) under the key (seed
    low, seed high). Products wrap modulo 2^64: the high half is read by a shift and a mask.
    """
    k0, k1 = seed & _M32, seed >> 32 & _M32
    c0 = index & _M32
    c1 = index >> 32
    c2 = torch.full_like(c0, call & _M32)
    c3 = torch.full_like(c0, call >> 32 & _M32)
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(10):  # c1 and c3 carry dirty high halves until the end
        torch.mul(c0, _MUL0, out=p0)
        torch.mul(c2, _MUL1, out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0)
        torch.bitwise_right_shift(p0, 32, out=c2)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_M32)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_M32)
        c1, c3, p0, p1 = p1, p0, c3, c1
        k0, k1 = k0 + _KEY0 & _M32, k1 + _KEY1 & _M32
    return (c0, c1.bitwise_and_(_M32), c2, c3.bitwise_and_(_M32))[:lanes]


def derive(seed: int, *ints: int) -> int:
    """A 63-bit hash of ``seed`` and ``ints`` (order matters), to seed a torch.Generator.

    One splitmix64 finalizer per word: Steele, Lea and Flood, OOPSLA 2014.
    """
    state = 0
    for word in (seed, *ints):
        state = (state + (word & _M64) + 0x9E3779B97F4A7C15) & _M64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _M64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _M64
        state ^= state >> 31
    return state >> 1


# ---- which elements ------------------------------------------------------------------------------

Span = tuple[int, int, int]  # (global size, offset, local size) of one dim


def _spans(shape: Sequence[int], offset: Sequence[int], local_shape: Sequence[int]) -> list[Span]:
    """The box in as few dims as possible: a whole dim joins the one before, or one of length 1."""
    if not len(shape) == len(offset) == len(local_shape) or any(
        o < 0 or n < 0 or o + n > size
        for size, o, n in zip(shape, offset, local_shape, strict=False)
    ):
        raise ValueError(
            f"random numbers: the box at {tuple(offset)} of sizes {tuple(local_shape)} does not "
            f"lie in the global shape {tuple(shape)}: pass this rank's offset and sizes"
        )
    out: list[Span] = [(1, 0, 1)]
    for size, start, length in zip(shape, offset, local_shape, strict=True):
        last_size, last_start, last_length = out[-1]
        if length == size or last_length == 1:
            out[-1] = (last_size * size, last_start * size + start, last_length * length)
        else:
            out.append((size, start, length))
    return out


def _row_starts(rows: Sequence[Span], start: int, stop: int, device: Device) -> Tensor:
    """Global row number of the local rows ``start`` to ``stop``."""
    position = torch.arange(start, stop, device=device)
    out = torch.zeros_like(position)
    stride = 1
    for size, first, length in reversed(rows):
        out += (position % length + first) * stride
        position //= length
        stride *= size
    return out


def _chunk(device: Device) -> int:
    """Elements at a time: what fits into a core's cache, or fills an accelerator."""
    if torch.device(device).type != "cpu":
        return 1 << 20
    return torch.get_num_threads() << 15  # torch gives a thread no less than 2^15 elements


def _chunks(spans: Sequence[Span], step: int, device: Device) -> Iterator[tuple[slice, Tensor]]:
    """(where in the flat local tensor, global index): whole rows, or parts of a long one."""
    *rows, (size, first, length) = spans
    n_rows = math.prod(span[2] for span in rows)
    if not n_rows * length:
        return
    cols = min(length, step)
    at_once = step // cols
    for r in range(0, n_rows, at_once):
        base = _row_starts(rows, r, min(r + at_once, n_rows), device) * size
        for c in range(0, length, cols):
            along = torch.arange(first + c, first + min(c + cols, length), device=device)
            index = (base[:, None] + along).flatten()
            yield slice(r * length + c, r * length + c + index.numel()), index


def global_index(
    shape: Sequence[int], offset: Sequence[int], local_shape: Sequence[int], device: Device
) -> Tensor:
    """int64 of ``local_shape``: the row-major index in ``shape`` of each element of the box."""
    out = torch.empty(tuple(local_shape), dtype=torch.int64, device=device)
    for where, index in _chunks(_spans(shape, offset, local_shape), _chunk(device), device):
        out.view(-1)[where] = index
    return out


def _draws(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    device: Device,
) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """(where in the flat local tensor, its four lanes), chunk by chunk; nothing on ``meta``."""
    spans = _spans(shape, offset, local_shape)
    if torch.device(device).type != "meta":
        for where, index in _chunks(spans, _chunk(device), device):
            yield where, bits(seed, call, index)


# ---- lanes to numbers ----------------------------------------------------------------------------


def _unit(high: Tensor, low: Tensor, digits: int = 53) -> Tensor:
    """[0, 1) in float64 with ``digits`` bits, up to 53: the leading ones of the two lanes."""
    if digits <= 32:
        return (high >> (32 - digits)).to(torch.float64).mul_(2.0**-digits)
    word = (high << (digits - 32)).bitwise_or_(low >> (64 - digits))
    return word.to(torch.float64).mul_(2.0**-digits)


def _open_unit(high: Tensor, low: Tensor) -> Tensor:
    """(0, 1) in float64, symmetric about 1/2: the odd multiples of 2^-53."""
    word = (high << 21).bitwise_or_(low >> 11).bitwise_or_(1)
    return word.to(torch.float64).mul_(2.0**-53)


def _standard(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Standard normal numbers in float64.

    Box-Muller, sqrt(-2 log u) sin(pi/2 t) with u in (0, 1), t in (-1, 1): the sine of a uniform
    angle in a half circle has the law of the cosine on the whole.
    """
    radius = log(_open_unit(a, b)).mul_(-2.0).sqrt_()
    return sin_half_pi(_open_unit(c, d).mul_(2.0).sub_(1.0)).mul_(radius)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to ``dtype``; to the half types by way of float32 on every device alike."""
    return value.to(torch.float32).to(dtype) if dtype in _HALVES else value.to(dtype)


def _as_real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.complex128 else torch.float32


def _need_floating(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(
            f"{name}: {dtype} cannot hold its values; use a floating dtype, "
            "or integers() or bernoulli()"
        )


def uniform(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    low: float = 0.0,
    high: float = 1.0,
) -> Tensor:
    """[low, high), the bounds first rounded to ``dtype``; float64 from 53 bits, all others from 24.

    Never ``high`` itself: what rounds up to it becomes the value below. Complex: both parts.
    """
    if dtype.is_complex:
        real, part = _as_real(dtype), (*local_shape, 2)
        pair = uniform(
            seed, call, (*shape, 2), (*offset, 0), part, real, device, low=low, high=high
        )
        return torch.view_as_complex(pair)
    _need_floating("uniform", dtype)
    edges = torch.tensor([low, high], dtype=torch.float64, device="cpu").to(dtype)
    top = torch.nextafter(edges[1], edges[0]).item()
    first, last = edges.tolist()
    if not (first <= last and math.isfinite(last - first)):
        raise ValueError(
            f"uniform: low={low}, high={high} in {dtype}: need low <= high, both finite"
        )
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    digits = 53 if dtype == torch.float64 else 24
    plain = (first, last) == (0.0, 1.0) and dtype not in _HALVES
    for where, (a, b, _, _) in _draws(seed, call, shape, offset, local_shape, device):
        value = _unit(a, b, digits)
        if not plain:
            value.mul_(last - first).add_(first)
        out.view(-1)[where] = value if plain else _rounded(value, dtype).clamp_(max=top)
    return out


def normal(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    mean: float = 0.0,
    std: float = 1.0,
) -> Tensor:
    """Normal numbers. Complex: each part has std / sqrt(2), and ``mean`` is real, as in torch.

    |value - mean| < 8.6 std.
    """
    if dtype.is_complex:
        real, part = _as_real(dtype), (*local_shape, 2)
        scale = std * math.sqrt(0.5)
        pair = normal(seed, call, (*shape, 2), (*offset, 0), part, real, device, std=scale)
        pair.select(-1, 0).add_(mean)
        return torch.view_as_complex(pair)
    _need_floating("normal", dtype)
    if not std >= 0.0:
        raise ValueError(f"normal: std={std}: a standard deviation is 0 or more")
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, lanes in _draws(seed, call, shape, offset, local_shape, device):
        out.view(-1)[where] = _rounded(_standard(*lanes).mul_(std).add_(mean), dtype)
    return out


def truncated_normal(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
) -> Tensor:
    """Normal numbers given that they lie in [low, high], by the quantile of a uniform number."""
    _need_floating("truncated_normal", dtype)
    if not (low <= high and std > 0.0):
        raise ValueError(
            f"truncated_normal: low={low}, high={high}, std={std}: need low <= high, std > 0"
        )
    z_low, z_high = (low - mean) / std, (high - mean) / std
    mirrored = z_low > 0.0  # Phi is fine-grained in its lower tail only
    if mirrored:
        z_low, z_high = -z_high, -z_low
    p_low, p_high = (0.5 * math.erfc(-z * math.sqrt(0.5)) for z in (z_low, z_high))
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, (a, b, _, _) in _draws(seed, call, shape, offset, local_shape, device):
        value = normal_quantile(_open_unit(a, b).mul_(p_high - p_low).add_(p_low))
        value.mul_(-std if mirrored else std).add_(mean).clamp_(low, high)
        out.view(-1)[where] = _rounded(value, dtype)
    return out


def exponential(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    rate: float = 1.0,
) -> Tensor:
    """-log(u) / rate, always positive: what would round to 0 is the smallest normal number."""
    _need_floating("exponential", dtype)
    if not rate > 0.0:
        raise ValueError(f"exponential: rate={rate}: need a positive rate")
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, (a, b, _, _) in _draws(seed, call, shape, offset, local_shape, device):
        value = log(_open_unit(a, b)).div_(-rate)
        out.view(-1)[where] = _rounded(value, dtype).clamp_(min=torch.finfo(dtype).tiny)
    return out


def log_normal(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    mean: float = 1.0,
    std: float = 2.0,
) -> Tensor:
    """e to the power of normal numbers."""
    _need_floating("log_normal", dtype)
    if not std > 0.0:
        raise ValueError(f"log_normal: std={std}: need a positive std")
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, lanes in _draws(seed, call, shape, offset, local_shape, device):
        out.view(-1)[where] = _rounded(exp(_standard(*lanes).mul_(std).add_(mean)), dtype)
    return out


def cauchy(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    median: float = 0.0,
    sigma: float = 1.0,
) -> Tensor:
    """median + sigma tan(pi/2 t), t in (-1, 1); the cosine is the sine of the other angle."""
    _need_floating("cauchy", dtype)
    if not sigma > 0.0:
        raise ValueError(f"cauchy: sigma={sigma}: need a positive sigma")
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, (a, b, _, _) in _draws(seed, call, shape, offset, local_shape, device):
        t = _open_unit(a, b).mul_(2.0).sub_(1.0)
        value = sin_half_pi(t).div_(sin_half_pi(1.0 - t.abs()))
        out.view(-1)[where] = _rounded(value.mul_(sigma).add_(median), dtype)
    return out


def geometric(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    p: float = 0.5,
) -> Tensor:
    """Trials up to the first success: ceil(log u / log(1 - p)), at least 1."""
    if not 0.0 < p < 1.0:
        raise ValueError(f"geometric: p={p}: need 0 < p < 1")
    scale = math.log1p(-p)
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, (a, b, _, _) in _draws(seed, call, shape, offset, local_shape, device):
        value = log(_open_unit(a, b)).div_(scale).ceil_().clamp_(min=1.0)
        out.view(-1)[where] = _rounded(value, dtype)
    return out


def bernoulli(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    p: float | Tensor = 0.5,
) -> Tensor:
    """1 with probability ``p`` (a number, or a tensor of ``local_shape`` for this piece), else 0.

    53 bits are compared: p = 0 never gives 1, p = 1 always. A tensor's range is not checked.
    """
    if isinstance(p, Tensor):
        if p.shape != torch.Size(local_shape):
            raise ValueError(
                f"bernoulli: p has shape {tuple(p.shape)}, this piece has {tuple(local_shape)}: "
                "pass the probabilities of this piece"
            )
        odds = p.detach().reshape(-1)
    elif not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: p={p} is no probability: need 0 <= p <= 1")
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, (a, b, _, _) in _draws(seed, call, shape, offset, local_shape, device):
        level = odds[where].to(torch.float64) if isinstance(p, Tensor) else p
        out.view(-1)[where] = (_unit(a, b) < level).to(dtype)
    return out


def integers(
    seed: int,
    call: int,
    shape: Sequence[int],
    offset: Sequence[int],
    local_shape: Sequence[int],
    dtype: torch.dtype,
    device: Device,
    low: int = 0,
    high: int = 2,
) -> Tensor:
    """Integers in [low, high), of any range that int64 can hold, as ``dtype``.

    floor(r n / 2^128) with r the four lanes and n = high - low: each value's probability is within
    2^-128 of 1/n, where a 64-bit modulo is off by up to 2^-64.
    """
    if not -(1 << 63) <= low < high <= 1 << 63:
        raise ValueError(f"integers: low={low}, high={high}: need low < high, both within int64")
    n = high - low
    limbs = [n >> shift & _M32 for shift in (0, 32, 64) if n >> shift]
    out = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    for where, lanes in _draws(seed, call, shape, offset, local_shape, device):
        r = lanes[::-1]  # least significant first
        product = [torch.zeros_like(r[0]) for _ in range(len(r) + len(limbs))]
        for j, limb in enumerate(limbs):  # uint64 in int64: limb * word + two words never overflows
            carry = torch.zeros_like(r[0])
            for i, word in enumerate(r):
                term = (word * limb).add_(product[i + j]).add_(carry)
                product[i + j] = term & _M32
                carry = term.bitwise_right_shift_(32).bitwise_and_(_M32)
            product[j + len(r)] = carry
        value = product[4] if len(limbs) == 1 else product[4] | product[5] << 32
        out.view(-1)[where] = (value + low).to(dtype)
    return out


def permutation(seed: int, call: int, n: int, device: Device) -> Tensor:
    """A permutation of range(n), int64, whole on every rank: the order of n 64-bit keys.

    Equal keys (probability about n^2 / 2^65) keep their order.
    """
    keys = torch.empty(n, dtype=torch.int64, device=device)
    for where, (a, b, _, _) in _draws(seed, call, (n,), (0,), (n,), device):
        keys[where] = (a << 32).bitwise_or_(b)
    return torch.argsort(keys, stable=True)
