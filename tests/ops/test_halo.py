"""Convolutions keep a dim split that the window slides over: values, gradients, their gradients;
what is sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor.core.placement import Partial, Replicate, Shard
from ops import Arg, infer
from ops.nn.halo import Window
from tests.support.pool import on_ranks
from tests.support.simulate import check_rule

S0, S1, S2, S3, R, P = Shard(0), Shard(1), Shard(2), Shard(3), Replicate(), Partial()


def t(*shape: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=seed)


# (input, weight, options): every size is split over 4, of most the last rank has less or nothing
LINES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 16), (4, 3, 3), {"padding": 1}),
    ((2, 3, 16), (4, 3, 1), {}),
    ((2, 3, 17), (4, 3, 3), {}),
    ((2, 3, 17), (4, 3, 4), {"padding": "same"}),
    ((2, 3, 17), (4, 3, 3), {"padding": "same", "dilation": 3}),
    ((2, 3, 17), (4, 3, 3), {"padding": "valid", "dilation": 2}),
    ((2, 3, 17), (4, 3, 3), {"stride": 2, "padding": 1}),
    ((2, 3, 19), (4, 3, 2), {"stride": 3}),
    ((2, 3, 18), (4, 3, 1), {"stride": 4}),
    ((2, 3, 16), (4, 3, 4), {"stride": 4}),
    ((2, 3, 13), (4, 3, 5), {"padding": 2}),
    ((2, 3, 9), (4, 3, 4), {"padding": 3}),
    ((2, 3, 13), (4, 3, 3), {"padding": 5}),
    ((2, 3, 5), (4, 3, 3), {"padding": 1}),
    ((2, 4, 13), (6, 2, 3), {"groups": 2, "padding": 1}),
    ((2, 4, 13), (4, 1, 3), {"groups": 4}),
    ((3, 17), (4, 3, 3), {"padding": 1}),
]


@pytest.fixture
def any_halo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split dim stays split, however much that sends."""
    monkeypatch.setattr(Window, "halo_share", lambda self, parts: 0.0)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", LINES, ids=str)
def test_lines(case: Any, bias: bool, any_halo: None) -> None:
    x, w, options = case
    rest = (t(w[0]),) if bias else ()
    split, whole = [Shard(len(x) - 1)], [[R]] * (1 + bias)
    for n in (2, 4, 5):
        (got,) = check_rule(
            F.conv1d, t(*x), t(*w), *rest, layouts=[split, *whole], mesh_shape=(n,), twice=True,
            **options
        )  # fmt: skip
        assert got.outputs(1) == (tuple(split),)


PLANES: list[tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    (F.conv2d, (3, 3, 9, 8), (5, 3, 3, 3), {"padding": 1}),
    (F.conv2d, (3, 3, 9, 8), (5, 3, 3, 2), {"stride": (2, 1), "padding": [1, 0]}),
    (F.conv2d, (3, 3, 9, 8), (5, 3, 4, 3), {"padding": "same", "dilation": (1, 2)}),
    (F.conv2d, (3, 4, 9, 8), (6, 2, 3, 3), {"groups": 2, "dilation": 2}),
    (F.conv3d, (2, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"padding": (1, 0, 1)}),
]


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (4,)], ids=str)
@pytest.mark.parametrize("case", PLANES, ids=lambda c: f"{c[0].__name__}{c[3]}")
def test_planes_in_every_layout(case: Any, mesh_shape: Any, any_halo: None) -> None:
    """Both dims, batch, channels, pending sums, two axes on one dim: whatever comes."""
    func, x, w, options = case
    assert check_rule(
        func, t(*x), t(*w), t(w[0]), mesh_shape=mesh_shape, tries=16, atol=1e-8, twice=True,
        **options
    )  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        (S2, S3), (S3, S2), (S2, S2), (Shard(2, order=1), Shard(2, order=0)), (S2, S1), (P, S2),
        (S0, S3),
    ],
    ids=str,
)  # fmt: skip
def test_two_axes(layout: Any, any_halo: None) -> None:
    (got,) = check_rule(
        F.conv2d, t(2, 3, 11, 9), t(4, 3, 3, 3), layouts=[layout, [R, R]], mesh_shape=(2, 3),
        padding=1, twice=True,
    )  # fmt: skip
    channels_are_summed = tuple(P if p == S1 else p for p in layout)
    assert got.outputs(2) == (channels_are_summed,)


WEIGHT = Arg((6, 6, 3, 3), [R])


@pytest.mark.parametrize(
    ("x", "options", "n", "out"),
    [
        (Arg((4, 6, 32, 32), [S2]), {}, 4, S2),
        (Arg((4, 6, 32, 32), [S3]), {"padding": 1, "stride": 2}, 4, S3),
        (Arg((4, 6, 32, 32), [R]), {}, 4, R),  # not split for it
        (Arg((4, 6, 32, 32), [S0]), {}, 4, S0),
        (Arg((1, 6, 8, 8), [S2]), {}, 4, S2),  # 2 rows of others, of 6
        (Arg((8, 6, 8, 8), [S2]), {}, 4, S0),  # more than is exchanged for a part of the batch
        (Arg((1, 6, 9, 9), [S2]), {"dilation": 4}, 4, R),  # the one output row reads all
        (
            Arg((1, 6, 9, 9), [S2]),
            {"padding": 4, "dilation": 4},
            2,
            R,
        ),  # back too, more than a gather
        (Arg((1, 6, 8, 8), [S2]), {"padding": 2, "dilation": 2}, 2, S2),  # as much
    ],
)
def test_kept_where_that_sends_no_more_than_a_gather(
    x: Any, options: Any, n: int, out: Any
) -> None:
    assert infer(F.conv2d, x, WEIGHT, mesh_shape=(n,), **options).outputs == ((out,),)


@pytest.mark.parametrize(
    "options", [{"stride": 2, "padding": "same"}, {"padding": -1}, {"dilation": 0}]
)
def test_what_torch_refuses_has_no_rule(options: Any) -> None:
    x = Arg((4, 6, 32, 32), [S2])
    with pytest.raises((RuntimeError, ValueError)) as plain:
        F.conv2d(torch.ones(x.shape), torch.ones(WEIGHT.shape), **options)
    try:
        outputs = infer(F.conv2d, x, WEIGHT, mesh_shape=(2,), **options).outputs
    except plain.type as error:
        assert str(error) == str(plain.value)
    else:
        assert outputs == ((R,),)


def grads(loss: torch.Tensor, *leaves: torch.Tensor) -> Any:
    return torch.autograd.grad(loss, leaves, create_graph=True)


@on_ranks(4)
def test_only_the_halo_is_sent() -> None:
    mesh = dt.init_mesh((4,), ("sp",))
    full = [t(2, 3, 16, 5).requires_grad_(), t(4, 3, 3, 3).requires_grad_(), t(4).requires_grad_()]
    leaves = [
        dt.shard_tensor(v.detach().clone(), mesh, [p])
        for v, p in zip(full, (S2, R, R), strict=True)
    ]
    leaves = [v.requires_grad_() for v in leaves]
    with dt.debugging.strict(), dt.debugging.record_comms() as log:
        y = F.conv2d(*leaves, padding=1)
    assert y.placements == (S2,)
    row, edges = 2 * 3 * 5 * 8, 1 if mesh.coordinate in ((0,), (3,)) else 2
    assert log.counts() == {"all_to_all": 1}
    assert log.total_bytes == edges * row
    with dt.debugging.record_comms() as log:
        back = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert log.counts() == {"all_to_all": 1}
    assert log.total_bytes == edges * row
    assert [b.placements for b in back] == [(S2,), (P,), (P,)]


CASES: list[Any] = [
    ((2, 3, 16, 5), {"padding": 1}),
    ((2, 3, 14, 5), {"padding": 1, "stride": (2, 1)}),
    ((2, 3, 5, 7), {"padding": 1}),
    (
        (2, 3, 6, 7),
        {"padding": "same", "dilation": 2},
    ),  # a kernel over three ranks; the last has nothing
]


@on_ranks(4)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_ranks_that_communicate(shape: Any, case: Any) -> None:
    """Values, gradients and theirs, on a line and on a plane of ranks, checkpointed and not."""
    with mock.patch.object(Window, "halo_share", lambda self, parts: 0.0):
        mesh = dt.init_mesh(shape, ("a", "b")[: len(shape)])
        size, options = case
        layouts = [(S2, S3)[: len(shape)], (R,) * len(shape), (R,) * len(shape)]
        full = [t(*size).requires_grad_(), t(4, 3, 3, 3).requires_grad_(), t(4).requires_grad_()]
        mine = [
            dt.shard_tensor(v.detach().clone(), mesh, p).requires_grad_()
            for v, p in zip(full, layouts, strict=True)
        ]

        def conv(*args: torch.Tensor) -> torch.Tensor:
            return F.conv2d(*args, **options).tanh()

        plain, ours = conv(*full), conv(*mine)
        again = checkpoint(conv, *mine, use_reentrant=False)
        assert ours.placements == layouts[0]
        torch.testing.assert_close(ours.full_tensor(), plain)
        first = grads(plain.square().sum(), *full)
        firsts = [grads(y.square().sum(), *mine) for y in (ours, again)]
        for other in firsts:
            for a, b in zip(first, other, strict=True):
                torch.testing.assert_close(b.full_tensor(), a)
        second = grads(sum(g.square().sum() for g in first), *full)
        mine_second = grads(sum(g.square().sum() for g in firsts[0]), *mine)
        for a, b in zip(second, mine_second, strict=True):
            torch.testing.assert_close(b.full_tensor(), a)


@on_ranks(4)
def test_under_autocast_ranks_without_output_have_its_dtype() -> None:
    mesh = dt.init_mesh((4,), ("sp",))
    x = dt.shard_tensor(torch.ones(1, 2, 20), mesh, [S2])  # 9 outputs: 3, 3, 3, 0
    with torch.autocast("cpu", torch.bfloat16), dt.debugging.strict():
        y = F.conv1d(x, torch.ones(2, 2, 3), torch.ones(2), stride=2)
    assert y.placements == (S2,) and y.to_local().shape[2] == (0 if mesh.coordinate == (3,) else 3)
    assert y.to_local().dtype == torch.bfloat16
    assert y.full_tensor().unique().tolist() == [7]
