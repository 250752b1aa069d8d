"""Philox: the published vectors, any piece equals the whole bit for bit, and the distributions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from disttensor.core.layout import Box
from disttensor.random import distributions, philox, reproducible_math

HALF = (torch.float16, torch.bfloat16)
REAL = (torch.float64, torch.float32, *HALF)
COMPLEX = (torch.complex64, torch.complex128)
DRAWS: list[tuple[Callable[..., Tensor], torch.dtype, dict[str, Any]]] = [
    *((distributions.uniform, dtype, {"low": -0.3, "high": 0.7}) for dtype in (*REAL, *COMPLEX)),
    *((distributions.normal, dtype, {"mean": 0.1, "std": 3.0}) for dtype in (*REAL, *COMPLEX)),
    *((distributions.truncated_normal, dtype, {}) for dtype in REAL),
    *((distributions.exponential, dtype, {}) for dtype in REAL),
    (distributions.bernoulli, torch.bool, {"p": 0.3}),
    (distributions.bernoulli, torch.float32, {"p": 0.3}),
    (distributions.integers, torch.int64, {"low": -5, "high": 1 << 40}),
    (distributions.integers, torch.uint8, {"low": 0, "high": 256}),
]
draws = pytest.mark.parametrize(
    ("draw", "dtype", "options"), DRAWS, ids=[f"{f.__name__}-{str(d)[6:]}" for f, d, _ in DRAWS]
)


def whole(draw: Callable[..., Tensor], shape: Any, dtype: torch.dtype, **options: Any) -> Tensor:
    shape = (shape,) if isinstance(shape, int) else shape
    seed, call = options.pop("seed", 7), options.pop("call", 3)
    return draw(piece_of(shape, seed=seed, call=call), dtype, **options)


def piece_of(
    shape: Any, offset: Any = None, sizes: Any = None, seed: int = 7, call: int = 3,
    device: str = "cpu",
) -> philox.Source:  # fmt: skip
    """Where the numbers of a box come from; without one, of the whole."""
    box = Box((0,) * len(shape), shape) if offset is None else Box(offset, sizes)
    return philox.Source(seed, call, shape, box, device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Shape, dtype and every byte."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.contiguous(), b.contiguous()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_bits_are_the_published_vectors(counter: str, key: str, expected: str) -> None:
    c, k = words(counter), words(key)
    position = c[0] | c[1] << 32
    position -= (position >> 63) << 64
    index = torch.full((5,), position)
    lanes = philox.bits(k[0] | k[1] << 32, c[2] | c[3] << 32, index)
    assert [lane.tolist() for lane in lanes] == [[word] * 5 for word in words(expected)]
    assert index.tolist() == [position] * 5, "the caller's index is not changed"


def reference(seed: int, call: int, index: int) -> list[int]:
    """Philox4x32-10 again, in Python integers."""
    m = 0xFFFFFFFF
    c = [index & m, index >> 32 & m, call & m, call >> 32 & m]
    k0, k1 = seed & m, seed >> 32 & m
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k0, b & m, (a >> 32) ^ c[3] ^ k1, a & m]
        k0, k1 = (k0 + 0x9E3779B9) & m, (k1 + 0xBB67AE85) & m
    return c


def test_bits_match_python_integers() -> None:
    index = torch.tensor([0, 1, 2, 17, 2**32 - 1, 2**32, 2**40 + 5, 2**62])
    for seed, call in [(0, 0), (1, 2), (2**63 - 1, 2**33 + 1), (2**64 - 1, 5), (-1, 5)]:
        expected = [reference(seed, call, i) for i in index.tolist()]
        assert torch.stack(philox.bits(seed, call, index), 1).tolist() == expected
    assert len(philox.bits(0, 0, index, lanes=2)) == 2


def test_values_match_python_integers() -> None:
    lanes = [reference(7, 3, i) for i in range(50)]
    wide = [(a << 21 | b >> 11) * 2.0**-53 for a, b, _, _ in lanes]
    assert whole(distributions.uniform, 50, torch.float64).tolist() == wide
    narrow = [(a >> 8) * 2.0**-24 for a, _, _, _ in lanes]
    assert whole(distributions.uniform, 50, torch.float32).tolist() == narrow
    ranges = [(0, 2), (-3, 4), (0, 2**32), (5, 2**32 + 6), (0, 2**63), (-(2**63), 2**63), (9, 10)]
    for low, high in ranges:
        big = [a << 96 | b << 64 | c << 32 | d for a, b, c, d in lanes]
        expected = [low + (r * (high - low) >> 128) for r in big]
        assert (
            whole(distributions.integers, 50, torch.int64, low=low, high=high).tolist() == expected
        )


def test_normal_has_the_same_bits_on_every_machine() -> None:
    got = whole(distributions.normal, 4, torch.float64, mean=1.0, std=2.0)
    assert [x.hex() for x in got.tolist()] == [
        "-0x1.91a5378f9f04ep-1",
        "-0x1.02f7900007ba0p+0",
        "-0x1.49e34050bb40cp-1",
        "-0x1.c57ff9ced3d12p-1",
    ]


# ---- pieces --------------------------------------------------------------------------------------

BOXES = [
    ((), (), ()),
    ((0,), (0,), (0,)),
    ((5, 0, 3), (2, 0, 0), (3, 0, 3)),
    ((1,), (0,), (1,)),
    ((7,), (2,), (5,)),
    ((7,), (7,), (0,)),
    ((6, 5), (0, 0), (6, 5)),
    ((6, 5), (4, 0), (2, 5)),
    ((6, 5), (0, 3), (6, 2)),
    ((6, 5), (1, 1), (3, 1)),
    ((3, 4, 5, 6), (1, 0, 2, 0), (2, 4, 3, 6)),
    ((3, 4, 5, 6), (0, 1, 0, 5), (3, 2, 5, 1)),
    ((3, 4, 5, 6), (2, 1, 0, 0), (1, 3, 5, 6)),
    ((2, 1, 9, 1), (0, 0, 4, 0), (2, 1, 5, 1)),
]


def slices(offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))


def global_index(shape: tuple[int, ...], box: Box, device: str) -> Tensor:
    """Returns the row-major index in ``shape`` of each element of the box."""
    out = torch.empty(box.shape, dtype=torch.int64, device=device)
    for where, index in philox._chunks(philox._spans(shape, box), philox._chunk(device), device):
        out.view(-1)[where] = index
    return out


@pytest.mark.parametrize(("shape", "offset", "sizes"), BOXES, ids=str)
def test_global_index_is_the_position_in_the_whole(
    shape: tuple[int, ...], offset: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    full = torch.arange(math.prod(shape)).view(shape)
    got = global_index(shape, Box(offset, sizes), "cpu")
    assert got.dtype == torch.int64
    assert torch.equal(got, full[slices(offset, sizes)])


@pytest.mark.parametrize("step", [1, 2, 7, 16])
def test_global_index_is_the_same_for_any_chunk(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "_chunk", lambda device: step)
    for shape, offset, sizes in BOXES:
        full = torch.arange(math.prod(shape)).view(shape)
        got = global_index(shape, Box(offset, sizes), "cpu")
        assert torch.equal(got, full[slices(offset, sizes)])


def test_global_index_beyond_32_bits() -> None:
    shape, offset = (1 << 20, 1 << 20), ((1 << 20) - 2, (1 << 20) - 3)
    assert global_index(shape, Box(offset, (2, 3)), "cpu").tolist() == [
        [(offset[0] + i << 20) + offset[1] + j for j in range(3)] for i in range(2)
    ]
    got = distributions.normal(piece_of(shape, offset, (2, 3), 1, 2), torch.float32)
    assert got.unique().numel() == 6


@draws
def test_boxes_equal_the_whole(
    draw: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for shape, offset, sizes in BOXES:
        full = whole(draw, shape, dtype, **options)
        piece = draw(piece_of(shape, offset, sizes), dtype, **options)
        assert piece.dtype == dtype and piece.is_contiguous()
        assert same_bits(piece, full[slices(offset, sizes)])


def pieces(n: int) -> Iterator[tuple[int, int]]:
    """(start, length) of all short lengths at odd places, and of torch.chunk's cuts."""
    for length in [*range(1, 68), 127, 128, 129, 1000]:
        for start in (0, 1, 5, n - length):
            yield start, length
    for parts in (2, 3, 7):
        step = -(-n // parts)
        for start in range(0, n, step):
            yield start, min(step, n - start)


@draws
def test_pieces_of_every_size_equal_the_whole(
    draw: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    n = 4099
    full = whole(draw, n, dtype, **options)
    for start, length in pieces(n):
        piece = draw(piece_of((n,), (start,), (length,)), dtype, **options)
        assert same_bits(piece, full[start : start + length]), (start, length)


@draws
def test_chunks_leave_no_seam(
    draw: Callable[..., Tensor],
    dtype: torch.dtype,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, offset, sizes = (9, 7, 11), (2, 0, 3), (6, 7, 5)
    expected = draw(piece_of(shape, offset, sizes), dtype, **options)
    for step in (1, 3, 5, 64, 100):
        monkeypatch.setattr(philox, "_chunk", lambda device, step=step: step)
        assert same_bits(draw(piece_of(shape, offset, sizes), dtype, **options), expected)


def test_large_piece_equals_the_whole() -> None:
    full = whole(distributions.normal, (300, 1001), torch.float32)
    piece = distributions.normal(piece_of((300, 1001), (1, 500), (299, 501)), torch.float32)
    assert same_bits(piece, full[1:, 500:])


def test_bernoulli_takes_probabilities_of_the_piece() -> None:
    p = torch.linspace(0, 1, 5003)
    full = whole(distributions.bernoulli, 5003, torch.float32, p=p)
    piece = distributions.bernoulli(piece_of((5003,), (1001,), (3,)), torch.float32, p=p[1001:1004])
    assert same_bits(piece, full[1001:1004])
    assert full[0] == 0 and full[-1] == 1
    assert abs((full - p).mean().item()) < 0.02
    grid = p[:4998].view(7, 714).t()  # not contiguous
    assert torch.equal(
        whole(distributions.bernoulli, (714, 7), torch.bool, p=grid),
        whole(distributions.bernoulli, (714, 7), torch.bool, p=grid.contiguous()),
    )


def test_narrow_dtypes_are_the_wide_ones_rounded() -> None:
    wide = whole(distributions.normal, 999, torch.float64)
    assert same_bits(whole(distributions.normal, 999, torch.float32), wide.float())
    assert same_bits(whole(distributions.normal, 999, torch.bfloat16), wide.float().bfloat16())
    wide = whole(distributions.uniform, 999, torch.float64)
    assert (wide - whole(distributions.uniform, 999, torch.float32)).abs().max() < 2.0**-24


def test_draws_are_plain_values_in_any_mode() -> None:
    expected = whole(distributions.normal, 9, torch.float32)
    state = torch.random.get_rng_state()
    with torch.inference_mode():
        assert same_bits(whole(distributions.normal, 9, torch.float32), expected)
    with torch.device("meta"):
        assert same_bits(whole(distributions.normal, 9, torch.float32), expected)
        assert whole(distributions.uniform, 9, torch.float32, low=1, high=2).min() >= 1
        assert distributions.permutation(1, 2, 9, "cpu").device.type == "cpu"
    assert not expected.requires_grad
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator is not touched"


def test_meta_has_shape_and_no_work() -> None:
    huge = (1 << 30, 1 << 20)
    got = distributions.normal(piece_of(huge, device="meta"), torch.bfloat16)
    assert got.shape == huge and got.dtype == torch.bfloat16 and got.is_meta


# ---- distributions -------------------------------------------------------------------------------

N = 1 << 17


def ks(sample: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """sqrt(n) times the Kolmogorov-Smirnov distance: above 2.2 once in 10,000 samples."""
    u = cdf(sample.double().flatten().sort().values)
    n = u.numel()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return math.sqrt(n) * torch.maximum(steps[1:] - u, u - steps[:-1]).max().item()


def phi(x: Tensor) -> Tensor:
    return torch.special.ndtr(x)


def moments(sample: Tensor) -> tuple[float, float]:
    return sample.double().mean().item(), sample.double().var().item()


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_distributions(dtype: torch.dtype, seed: int) -> None:
    def sample(draw: Callable[..., Tensor], **options: Any) -> Tensor:
        return whole(draw, N, dtype, seed=seed, **options)

    assert ks(sample(distributions.uniform), lambda x: x) < 2.2
    assert ks(sample(distributions.uniform, low=-3.0, high=5.0), lambda x: (x + 3) / 8) < 2.2
    assert ks(sample(distributions.normal), phi) < 2.2
    assert (
        ks(sample(distributions.normal, mean=-1.0, std=0.02), lambda x: phi((x + 1) / 0.02)) < 2.2
    )
    assert ks(sample(distributions.exponential, rate=2.0), lambda x: -torch.expm1(-2 * x)) < 2.2
    mass = math.erf(math.sqrt(2.0))
    assert (
        ks(sample(distributions.truncated_normal), lambda x: (phi(x) - (1 - mass) / 2) / mass) < 2.2
    )


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_moments(dtype: torch.dtype) -> None:
    for draw, mean, var in [
        (distributions.uniform, 1 / 2, 1 / 12),
        (distributions.normal, 0.0, 1.0),
        (distributions.exponential, 1.0, 1.0),
        (distributions.truncated_normal, 0.0, 0.7737413),
    ]:
        got_mean, got_var = moments(whole(draw, N, dtype))
        assert abs(got_mean - mean) < 4.5 * math.sqrt(var / N)
        assert abs(got_var / var - 1) < 0.02
    fourth = whole(distributions.normal, N, dtype).double().pow(4).mean().item()
    assert abs(fourth - 3) < 0.15


@pytest.mark.parametrize("rate", [1e4, 1e5])
def test_small_exponential_numbers_of_half_precision(rate: float) -> None:
    sample = whole(distributions.exponential, N, torch.float16, rate=rate)
    assert abs(moments(sample)[0] * rate - 1) < 0.02 and sample.min() > 0


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_parts_are_independent(dtype: torch.dtype) -> None:
    z = torch.view_as_real(whole(distributions.normal, N, dtype, mean=2.0, std=3.0)).double()
    assert (z.mean(0) - 2.0).abs().max() < 0.03
    assert (torch.cov(z.T) - 4.5 * torch.eye(2)).abs().max() < 0.1
    z = torch.view_as_real(whole(distributions.uniform, N, dtype)).double()
    assert abs(torch.corrcoef(z.T)[0, 1].item()) < 0.015


def test_neighbours_are_uncorrelated() -> None:
    x = whole(distributions.normal, N, torch.float64)
    rows = [x[:-1], x[1:], whole(distributions.normal, N, torch.float64, call=4)[:-1]]
    rows.append(whole(distributions.normal, N, torch.float64, seed=8)[:-1])
    off = torch.corrcoef(torch.stack(rows)) - torch.eye(4)
    assert off.abs().max() < 0.015


@pytest.mark.parametrize("n", [2, 3, 7, 10, 1000])
def test_integers_are_flat(n: int) -> None:
    x = whole(distributions.integers, N, torch.int64, low=-1, high=n - 1)
    counts = torch.bincount(x + 1, minlength=n).double()
    assert counts.numel() == n
    chi2 = ((counts - N / n) ** 2 / (N / n)).sum().item()
    assert chi2 < n - 1 + 4 * math.sqrt(2 * (n - 1)) + 8


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli_rate(p: float) -> None:
    rate = whole(distributions.bernoulli, N, torch.float64, p=p).mean().item()
    assert abs(rate - p) <= 4.5 * math.sqrt(p * (1 - p) / N)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (1.0, 2.0), (-1.0, 1.0), (-0.1, 0.1), (3.0, 3.0), (-2.0, 0.0)]
)
def test_uniform_stays_below_high(dtype: torch.dtype, low: float, high: float) -> None:
    x = whole(distributions.uniform, N, dtype, low=low, high=high)
    first, last = torch.tensor([low, high], dtype=dtype)
    assert x.min() >= first
    assert (x < last).all() if low < high else (x == first).all()


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_uniform_of_the_extreme_words(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def extreme(seed: int, call: int, index: Tensor) -> tuple[Tensor, ...]:
        return (torch.full_like(index, 0xFFFFFFFF),) * 4

    monkeypatch.setattr(philox, "bits", extreme)
    for low, high in [(0.0, 1.0), (1.0, 2.0), (-1.0, 0.0), (100.0, 101.0)]:
        x = whole(distributions.uniform, 3, dtype, low=low, high=high)
        assert (x < high).all() and (x >= low).all()
    assert whole(distributions.exponential, 3, dtype).min() > 0
    assert whole(distributions.normal, 3, dtype).isfinite().all()
    assert (whole(distributions.bernoulli, 3, dtype, p=1.0) == 1).all()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (2.0, 3.0), (-9.0, -6.0), (5.0, math.inf)])
def test_truncated_normal_keeps_its_bounds(low: float, high: float) -> None:
    x = whole(distributions.truncated_normal, N, torch.float64, low=low, high=high)
    assert x.min() >= low and x.max() <= high
    below, above = (torch.special.ndtr(doubles(-abs(v))) for v in (low, high))
    if low >= 0:
        assert ks(-x, lambda v: (phi(v) - above) / (below - above)) < 2.2
    elif high <= 0:
        assert ks(x, lambda v: (phi(v) - below) / (above - below)) < 2.2


def test_permutation() -> None:
    for n in (0, 1, 2, 17, 1000):
        assert torch.equal(distributions.permutation(1, 2, n, "cpu").sort().values, torch.arange(n))
    assert torch.equal(
        distributions.permutation(1, 2, 99, "cpu"), distributions.permutation(1, 2, 99, "cpu")
    )
    assert not torch.equal(
        distributions.permutation(1, 2, 99, "cpu"), distributions.permutation(1, 3, 99, "cpu")
    )
    places = torch.stack([distributions.permutation(1, c, 5, "cpu") for c in range(2000)])
    counts = torch.stack([torch.bincount(column, minlength=5) for column in places.T])
    assert (counts - 400).abs().max() < 90


@draws
def test_seeds_and_calls_differ(
    draw: Callable[..., Tensor], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    keys = [(0, 0), (0, 1), (1, 0), (0, 1 << 32), (1 << 32, 0), (1 << 63, 0)]
    got = [whole(draw, 64, dtype, seed=s, call=c, **options) for s, c in keys]
    assert not any(torch.equal(a, b) for i, a in enumerate(got) for b in got[:i])


def test_derive_spreads_and_depends_on_everything() -> None:
    args = [
        (0,),
        (0, 0),
        (0, 0, 0),
        (0, 1),
        (1, 0),
        (1,),
        (-1,),
        (0, 1, 2),
        (0, 2, 1),
        (2**64 + 5, 0),
    ]
    seen = {philox.derive(*a) for a in args}
    seen |= {philox.derive(5, call, rank) for call in range(100) for rank in range(100)}
    assert len(seen) == len(args) + 10_000
    assert all(0 <= x < 1 << 63 for x in seen)
    torch.Generator().manual_seed(philox.derive(2**63, 1))
    ones = statistics.mean(philox.derive(i).bit_count() for i in range(1000))
    assert abs(ones - 31.5) < 0.6


# ---- elementary functions ------------------------------------------------------------------------


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ulps(got: Tensor, expected: Tensor) -> float:
    gap = torch.nextafter(expected.abs(), doubles(math.inf)) - expected.abs()
    return ((got - expected).abs() / gap).max().item()


def test_log_and_sine_are_accurate() -> None:
    u = whole(distributions.uniform, N, torch.float64)[1:]
    x = torch.cat([u, 1 - u * 1e-9, u * 1e-290, doubles(2.3e-308, 1.0, 0.5**0.5, 1e300)])
    assert ulps(reproducible_math.log(x), x.log()) <= 3
    t = torch.cat([u, -u, u * 1e-9, doubles(-1.0, 0.0, 1.0)])
    assert ulps(reproducible_math.sin_half_pi(t), (t * (math.pi / 2)).sin()) <= 4


def test_normal_quantile_is_accurate() -> None:
    p = whole(distributions.uniform, 2000, torch.float64)
    p = torch.cat([p, p * 1e-5, p * 1e-30, doubles(1e-300, 0.075, 0.925, 1 - 1e-12)])
    expected = [statistics.NormalDist().inv_cdf(v) for v in p.tolist()]
    torch.testing.assert_close(
        reproducible_math.normal_quantile(p), doubles(*expected), rtol=1e-13, atol=1e-14
    )


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "dtype", "options", "error", "message"),
    [
        (distributions.uniform, torch.int32, {}, TypeError, "integers"),
        (distributions.normal, torch.int32, {}, TypeError, "floating"),
        (
            distributions.uniform,
            torch.float32,
            {"low": 2.0, "high": 1.0},
            ValueError,
            "low <= high",
        ),
        (distributions.uniform, torch.float16, {"low": -6e4, "high": 7e4}, ValueError, "finite"),
        (distributions.uniform, torch.float32, {"high": math.nan}, ValueError, "low <= high"),
        (distributions.normal, torch.float32, {"std": -1.0}, ValueError, "std=-1.0"),
        (distributions.exponential, torch.float32, {"rate": 0.0}, ValueError, "positive"),
        (distributions.bernoulli, torch.float32, {"p": 1.5}, ValueError, "0 <= p <= 1"),
        (distributions.bernoulli, torch.float32, {"p": torch.ones(3)}, ValueError, "this piece"),
        (distributions.integers, torch.int64, {"low": 3, "high": 3}, ValueError, "low < high"),
        (distributions.integers, torch.int64, {"low": 0, "high": 2**63 + 1}, ValueError, "int64"),
        (distributions.truncated_normal, torch.float32, {"low": 3.0}, ValueError, "low <= high"),
    ],
)
def test_bad_options(
    draw: Callable[..., Tensor],
    dtype: torch.dtype,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        whole(draw, 4, dtype, **options)


@pytest.mark.parametrize(
    ("offset", "sizes"), [((0,), (2, 3)), ((3, 0), (2, 3)), ((-1, 0), (2, 3)), ((0, 0), (2, 4))]
)
def test_a_box_outside_the_tensor(offset: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"global shape \(4, 3\)"):
        distributions.normal(piece_of((4, 3), offset, sizes), torch.float32)
