"""FLOPs of operators that torch's counter leaves out, and the warning of operators without any."""

from __future__ import annotations

import math

import torch
from torch import nn

from disttensor.simulate import simulate
from disttensor.simulate.flop_formulas import is_cheap

aten = torch.ops.aten


def products():
    a, b = torch.ones(64, 16, dtype=torch.bfloat16), torch.ones(4, 16, 32, dtype=torch.bfloat16)
    return torch._grouped_mm(a, b, offs=torch.arange(16, 65, 16, dtype=torch.int32))


CALLS = [
    (lambda: nn.LSTM(8, 16)(torch.ones(5, 3, 8)), 2 * 15 * (64 * 8 + 64 * 16)),
    (products, 2 * 64 * 16 * 32),
    (lambda: torch.ones(6, 7).mv(torch.ones(7)), 2 * 42),
    (lambda: torch.fft.rfft2(torch.ones(16, 8)), 2.5 * 128 * math.log2(128)),
    (lambda: torch.fft.irfft(torch.ones(4, 9, dtype=torch.complex64)), 2.5 * 64 * 4),
    (lambda: torch.fft.fft(torch.ones(4, 8, dtype=torch.complex64)), 5 * 32 * 3),
    (lambda: torch.linalg.solve(torch.eye(6), torch.ones(6, 4)), int(2 * 216 / 3 + 2 * 36 * 4)),
    (lambda: torch.linalg.cholesky(torch.eye(6)), 216 // 3),
    (lambda: torch.cdist(torch.ones(5, 8), torch.ones(7, 8), 1.0), 3 * 5 * 7 * 8),
    (lambda: torch.cdist(torch.ones(30, 8), torch.ones(40, 8)), 2 * 30 * 40 * 8),
]


def test_flops_of_operators_that_torch_does_not_count():
    def step():
        for call, _ in CALLS:
            call()

    report = simulate(lambda: step, 1)
    assert [e.flops for e in report.kinds[0].events if getattr(e, "flops", 0)] == [
        int(flops) for _, flops in CALLS
    ]
    assert not report.warnings


def test_an_operator_without_a_formula_is_named():
    def step():
        torch.linalg.eigh(torch.eye(8))

    (text,) = simulate(lambda: step, 1).warnings
    assert "no formula for the FLOPs of _linalg_eigh (" in text and "test_flop_formulas.py:" in text


def test_elementwise_operators_and_copies_need_no_formula():
    for name in (
        "add_", "gelu_backward", "copy_", "native_layer_norm", "sum", "gather", "_foreach_addcdiv_",
        "_fused_adamw_", "embedding_dense_backward", "nll_loss_forward", "hardtanh_backward",
        "max_pool2d_with_indices", "le_", "bernoulli_", "arange", "cumsum",
    ):  # fmt: skip
        packet = getattr(aten, name)
        assert is_cheap(getattr(packet, packet.overloads()[0])), name


def test_products_are_not_cheap():
    for name in ("mm", "_linalg_svd", "convolution", "_linalg_eigh", "ormqr"):
        packet = getattr(aten, name)
        assert not is_cheap(getattr(packet, packet.overloads()[0])), name
