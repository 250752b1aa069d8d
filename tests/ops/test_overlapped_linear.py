"""Products whose two gradients are two nodes: the bits of torch's own, whatever the strides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ops.linalg.overlapped_linear import overlapped

KINDS = {
    "linear": (F.linear, True),
    "matmul": (lambda x, w, _: x @ w, False),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), False),
}


def gradients(call, turned, x, w, b, grad, apart):
    x, w, b = (None if t is None else t.detach().requires_grad_() for t in (x, w, b))
    out = overlapped(call, x, w, b, turned, [1]) if apart else call(x, w, b)
    out.backward(grad)
    return [out, x.grad, w.grad, None if b is None else b.grad]


@pytest.mark.parametrize("order", ["as made", "input turned", "weight turned", "one gradient"])
@pytest.mark.parametrize("shape", [(33, 65), (3, 5, 16), (2, 64, 128), (2, 3, 5, 16), (0, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_torch(kind, shape, order):
    call, turned = KINDS[kind]
    if kind == "addmm" and len(shape) > 2:
        shape = (shape[0], shape[-1])
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator) for s in (shape, (24, shape[-1])))
    w = w if turned else w.t().contiguous()
    x = x.mT.contiguous().mT if order == "input turned" else x
    w = w.t().contiguous().t() if order == "weight turned" else w
    grad = torch.randn(*shape[:-1], 24, generator=generator)
    grad = torch.ones(()).expand(grad.shape) if order == "one gradient" else grad
    for b in [torch.ones(24)] if kind == "addmm" else [None, torch.ones(24)][: 1 + turned]:
        plain, apart = (gradients(call, turned, x, w, b, grad, a) for a in (False, True))
        for ours, theirs in zip(apart, plain, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
            assert ours is None or ours.stride() == theirs.stride()
