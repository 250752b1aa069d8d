"""Linear algebra, Fourier transforms, interpolation: what is independent is split, also where a
rank has nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, infer
from ops.empty_pieces import zeros_if_empty
from tests.support.simulate import check_rule

S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()


def randn(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=draw)


A = randn(5, 3, 4, 4)  # 5 over 4 ranks leaves one with nothing
SPD = A @ A.mT + 3 * torch.eye(4, dtype=torch.float64)
B = randn(5, 3, 4, 2)
LU, PIVOTS = torch.linalg.lu_factor(A)
L = torch.linalg.cholesky(SPD)
X = randn(5, 3, 6, 4)


def check(func: Any, *args: Any, **kwargs: Any) -> None:
    assert check_rule(func, *args, tries=8, **kwargs)
    assert check_rule(func, *args, mesh_shape=(4,), tries=4, seed=1, **kwargs)


MATRICES = [
    torch.linalg.cholesky, torch.linalg.cholesky_ex, torch.linalg.det, torch.det,
    torch.linalg.slogdet, torch.logdet,
    torch.linalg.inv, torch.inverse, torch.Tensor.inverse, torch.linalg.eigvalsh,
    torch.linalg.svdvals, torch.linalg.qr,
    torch.matrix_exp, torch.linalg.lu_factor,
]  # fmt: skip


@pytest.mark.parametrize("func", MATRICES, ids=lambda f: f.__name__)
def test_batches_of_matrices_are_split(func: Any) -> None:
    check(func, SPD)
    answer = infer(func, Arg((5, 3, 4, 4), [S0, S1]), mesh_shape=(2, 2))
    assert answer.inputs == ((S0, S1),)
    assert set(answer.outputs) == {(S0, S1)}
    assert infer(func, Arg((5, 3, 4, 4), [S2, P]), mesh_shape=(2, 2)).inputs == ((R, R),)


def test_batches_of_systems_are_split() -> None:
    check(torch.linalg.solve, A, B)
    check(torch.linalg.solve, A, B[..., 0])  # a vector for each matrix
    check(torch.linalg.solve, A[0, 0], B)
    check(torch.cholesky_solve, B, L)
    check(torch.linalg.solve_triangular, L, B, upper=False)
    check(torch.linalg.lu_solve, LU, PIVOTS, B)
    check(torch.linalg.matrix_power, A, 3)
    check(torch.linalg.matrix_power, SPD, -1)
    answer = infer(torch.linalg.solve, Arg((5, 4, 4), [S0]), Arg((4, 2), [R]), mesh_shape=(2,))
    assert (answer.inputs, answer.outputs) == (((S0,), (R,)), ((S0,),))


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_transforms_split_the_other_dims(name: str) -> None:
    for suffix in ("", "2", "n"):
        check(getattr(torch.fft, name + suffix), X)
    check(getattr(torch.fft, name), X, 5, 1)
    check(getattr(torch.fft, name), X, dim=0, norm="ortho")
    check(getattr(torch.fft, name + "n"), X, s=(3, 5))
    check(getattr(torch.fft, name + "n"), X, dim=(0, 2))
    answer = infer(getattr(torch.fft, name), Arg((5, 6), [S0, P]), mesh_shape=(2, 2))
    assert (answer.inputs, answer.outputs) == (((S0, P),), ((S0, P),))
    assert infer(getattr(torch.fft, name), Arg((5, 6), [S1]), mesh_shape=(2,)).inputs == ((R,),)


def test_shifts_split_the_other_dims() -> None:
    check(torch.fft.fftshift, X)
    check(torch.fft.ifftshift, X, dim=(1, 2))
    answer = infer(torch.fft.fftshift, Arg((5, 6), [S0]), dim=1, mesh_shape=(2,))
    assert answer.outputs == ((S0,),)


def test_padding_and_interpolation_split_batch_and_channels() -> None:
    check(F.interpolate, X, scale_factor=2)
    check(F.interpolate, X, size=(3, 7), mode="bilinear", align_corners=True)
    check(F.interpolate, X, scale_factor=0.5, mode="bicubic", antialias=True)
    check(F.pad, X[0], (1, 2), mode="circular")
    check(F.pad, X, (1, 2, 1, 0), mode="reflect")
    check(F.pad, X[0], (1, 2), mode="replicate")
    check(torch.constant_pad_nd, X, (1, 2), 1.5)
    check(torch.constant_pad_nd, X, (1, 0, 0, 0, 2, 1))
    answer = infer(F.interpolate, Arg((5, 3, 4), [S0, P]), scale_factor=2.0, mesh_shape=(2, 2))
    assert (answer.inputs, answer.outputs) == (((S0, P),), ((S0, P),))


def test_a_rank_with_nothing_gives_the_type_of_the_others() -> None:
    class OfNothing:
        func = torch.fft.rfft
        inputs = outputs = (type("Piece", (), {"shape": (5, 4), "local_shape": (0, 3)}),)

    assert zeros_if_empty(OfNothing)(torch.ones(0, 4)).dtype == torch.complex64  # type: ignore[arg-type]
