"""``out=``: what plain torch gives or refuses, for every placement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import fallbacks, line, randint, randn
from tests.support.pool import on_ranks

X, Y, N = randn(6, 4, seed=1), randn(6, 4, seed=2), randint(-5, 6, (6, 4), seed=3)
DTYPES = torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128
# Each: a call, and the shapes of out=
CALLS: dict[str, tuple[Any, ...]] = {
    "add": (lambda x, out: torch.add(x, 0.5, out=out), (6, 4)),
    "mul": (lambda x, out: torch.mul(x, x, out=out), (6, 4)),
    "add of integers": (lambda x, out: torch.add(as_placed(N, x), 2, out=out), (6, 4)),
    "div": (lambda x, out: torch.div(x, 2, out=out), (6, 4)),
    "gt": (lambda x, out: torch.gt(x, 0, out=out), (6, 4)),
    "exp": (lambda x, out: torch.exp(x, out=out), (6, 4)),
    "cat": (lambda x, out: torch.cat([x, x], out=out), (12, 4)),
    "amax": (lambda x, out: torch.amax(x, 1, out=out), (6,)),
    "clamp": (lambda x, out: torch.clamp(x, 0, 1, out=out), (6, 4)),
    "where": (lambda x, out: torch.where(x > 0, x, -x, out=out), (6, 4)),
}  # fmt: skip


def as_placed(t: Tensor, like: Any) -> Tensor:
    return (
        dt.shard_tensor(t, like.process_mesh, like.placements)
        if isinstance(like, dt.DistTensor)
        else t
    )


def outcome(call: Any, x: Any, out: Tensor) -> tuple[str, Any]:
    try:
        got = call(x, out)
    except (RuntimeError, TypeError) as error:
        return type(error).__name__, None
    assert got is out
    return "", out.full_tensor() if isinstance(out, dt.DistTensor) else out


@on_ranks(2)
def test_out_refuses_what_torch_refuses_and_gives_what_torch_gives() -> None:
    mesh = line()
    for name, (call, shape) in CALLS.items():
        for dtype in DTYPES:
            for grad in (False, True):
                plain = X.clone().requires_grad_(grad)
                said, want = outcome(call, plain, torch.zeros(shape, dtype=dtype))
                for layout in (Shard(0), Replicate()):
                    x = dt.shard_tensor(X, mesh, [layout]).requires_grad_(grad)
                    for out in (
                        dt.zeros(*shape, mesh=mesh, placements=[layout], dtype=dtype),
                        torch.zeros(shape, dtype=dtype),
                    ):
                        with fallbacks():
                            heard, got = outcome(call, x, out)
                        # some functions of torch refuse safe casts too
                        fine = bool(heard) == bool(said) or torch.can_cast(X.dtype, dtype)
                        assert fine, (name, dtype, grad, layout, heard, said)
                        assert not grad or bool(heard) == bool(said), (name, dtype)
                        if want is not None:
                            torch.testing.assert_close(got, want)
    # Nothing is written before an error, and the result is the type that torch returns.
    x = dt.shard_tensor(X, mesh, [Shard(0)])
    largest = torch.max(x, 1, out=(torch.empty(6).double(), torch.empty(6, dtype=torch.int64)))
    assert type(largest) is torch.return_types.max
    assert torch.equal(largest.values, X.amax(1))
    with torch.no_grad():
        out = dt.zeros(6, 4, mesh=mesh, placements=[Shard(1)], dtype=torch.float64)
        assert torch.add(x.requires_grad_(), 1, out=out) is out
    assert torch.equal(out.full_tensor(), X + 1)
