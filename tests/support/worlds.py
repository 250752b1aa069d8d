"""What tests of the runtime share: a body on four ranks and in a world of one, layouts, and
comparison."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import disttensor as dt
from disttensor import Partial, ProcessMesh, Replicate, Shard
from tests.support.pool import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LAYOUTS = [
    (R, R), (S0, R), (R, S1), (S0, S1), (S1, S0), (S0, S0), (Shard(0, order=1), Shard(0, order=0)),
    (P, R), (S0, P), (P, P), (Partial("max"), S1), (Partial("avg"), R),
]  # fmt: skip
FEW = [(R, R), (S0, S1), (P, S0)]


def grid() -> ProcessMesh:
    """2x2 on four ranks, 1x1 in a world of one."""
    n = 2 if dist.get_world_size() == 4 else 1
    return ProcessMesh(torch.arange(n * n).reshape(n, n), ("dp", "tp"))


def everywhere(body: Callable[..., None]) -> Callable[..., None]:
    """Decorator: run the body on four ranks and in a world of one."""
    runs = {n: on_ranks(n)(body) for n in (1, 4)}

    @functools.wraps(body)
    def test(world: int, **kwargs: Any) -> None:
        runs[world](**kwargs)

    first = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = inspect.signature(body).parameters.values()
    del test.__wrapped__  # type: ignore[attr-defined]
    test.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
    test.on_ranks_timeout = 60.0  # type: ignore[attr-defined]
    return pytest.mark.parametrize("world", [1, 4])(test)


def counted(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """1, 2, 3, ... in ``shape``."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def same(a: Any, b: Any) -> None:
    """``a``, said of a DistTensor, is ``b``, said of the plain tensor."""
    if isinstance(a, dt.DistTensor):
        assert isinstance(b, torch.Tensor), (a, b)
        assert a.shape == b.shape and a.dtype == b.dtype, (a, b)
        a, b = a.detach().full_tensor(), b.detach()
    if isinstance(b, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(b, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif isinstance(b, (list, tuple)) and not isinstance(b, torch.Size):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert type(a) is type(b) and a == b, (a, b)


def compare(expressions: list[str], x: Any, plain: torch.Tensor, **names: Any) -> None:
    """Each expression of ``x`` is the same for both; all that differ are named."""
    failed = []
    for text in expressions:
        try:
            want = eval(text, {"torch": torch, "np": np, **names}, {"x": plain})
            same(eval(text, {"torch": torch, "np": np, **names}, {"x": x}), want)
        except Exception as error:
            failed.append(f"{text}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
