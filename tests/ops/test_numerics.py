"""The numbers where other systems are silently wrong, each on real ranks: value and gradient,
uneven sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from tests.support.oracle import (
    Problem,
    check_op,
    check_program,
    fallbacks,
    grid,
    line,
    place,
    randint,
    randn,
    some_layouts,
)
from tests.support.part import part
from tests.support.pool import on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
INF = float("inf")
WAYS = [("leaf",), ("product", "view"), ("moved",)]
ON_LINE = [[S0], [S1], [P], [R]]
ON_GRID = [[S0, S1], [S1, S0], [S0, S0], [R, S0], [S1, P], [P, P], [P, R]]


def everywhere(func, *shapes, grids=ON_GRID, **options):
    """One function of tensors of these shapes, all in one layout after the other, entering as leaf
    and otherwise: on a grid in half of the layouts and in one of these ways for each part."""
    mesh = line() if torch.distributed.get_world_size() == 2 else grid()
    name = getattr(func, "__name__", "")
    layouts = ON_LINE if mesh.ndim == 1 else part(grids, (len(grids) + 1) // 2, name)
    for n, layout in enumerate(layouts):
        args = [s if isinstance(s, Tensor) else randn(*s, seed=i) for i, s in enumerate(shapes)]
        for ways in part(WAYS, len(WAYS) if mesh.ndim == 1 else 1, f"{name} {n}"):
            check_op(
                func,
                *args,
                layouts=[layout] * len(args),
                mesh=mesh,
                ways=ways,
                weigh=("full", "dist")[n % 2],
                **options,
            )


both = pytest.mark.parametrize("world", [2, 4])


def on_both(body):
    """Run a body on 2 ranks and on 2x2."""
    runs = {2: on_ranks(2)(body), 4: on_ranks(4)(body)}

    def test(world):
        runs[world]()

    test.__name__, test.__doc__, test.on_ranks_timeout = body.__name__, body.__doc__, 60.0
    return both(test)


# Losses -------------------------------------------------------------------------------------------


@on_both
def test_mean_losses_over_shards():
    """DTensor's gradient of mse_loss is world-size times too large."""
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss):
        everywhere(loss, (5, 3), (5, 3))
    everywhere(lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (5, 3), (5, 3))
    everywhere(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (5, 3), (5, 3))
    everywhere(lambda x, y: F.kl_div(x, y.softmax(1), reduction="batchmean"), (5, 3), (5, 3))


@on_both
def test_module_losses():
    everywhere(torch.nn.MSELoss(), (7, 3), (7, 3))
    everywhere(torch.nn.SmoothL1Loss(beta=0.5), (7, 3), (7, 3))


@on_both
def test_cross_entropy_with_batch_sequence_and_vocabulary_split():
    target = randint(0, 7, (5,), seed=1)
    target[1] = target[4] = -100
    layouts = (
        [[S0], [S1], [P], [R]]
        if torch.distributed.get_world_size() == 2
        else [[S0, S1], [S1, S0], [S1, S1], [R, S1], [P, S1], [S0, S0]]
    )
    weight = randn(7, seed=9).abs()
    for options in (
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": weight},
        {"weight": weight, "label_smoothing": 0.2},
        {"ignore_index": 3},
    ):
        t = target.clamp(min=0) if "ignore_index" in options else target
        for layout in layouts:
            where = [layout, [R] * len(layout)] + [None] * ("weight" in options)
            check_op(
                F.cross_entropy,
                randn(5, 7),
                t,
                layouts=where,
                frozen=[1, 2],
                ways=["product"],
                **options,
            )
            batch = [p if p == S0 else R for p in layout]
            where[1] = batch
            check_op(F.cross_entropy, randn(5, 7), t, layouts=where, frozen=[1, 2], **options)


@on_both
def test_cross_entropy_of_ignored_only_is_nan_as_in_torch():
    target = torch.full((5,), -100)
    axes = torch.distributed.get_world_size() // 2
    for layout in ([S0] * axes, [S1] * axes):
        check_op(F.cross_entropy, randn(5, 7), target, layouts=[layout, [R] * axes], grad=False)


@on_ranks(2)
def test_cross_entropy_with_ignored_targets_on_one_rank_only():
    """A mean over shards is over all that count, not a mean of the ranks' means."""
    target = torch.tensor([-100, -100, -100, 2, 4])
    check_op(F.cross_entropy, randn(5, 7), target, layouts=[[S0], [S0]])
    check_op(F.nll_loss, randn(5, 7).log_softmax(1), target, layouts=[[S0], [S0]])


@on_ranks(2)
def test_vocabulary_split_cross_entropy_gathers_no_logits():
    mesh = line()
    logits, target = place(randn(8, 64), mesh, [S1]).requires_grad_(), randint(0, 64, (8,))
    with dt.debugging.record_comms() as log:
        F.cross_entropy(logits, target).backward()
    assert max(r.bytes for r in log) <= 8 * 8 * 2, str(log)  # a number or two per row
    assert {r.kind for r in log} == {"all_reduce"}, str(log)


# Reductions ---------------------------------------------------------------------------------------


@on_both
def test_mean_and_var_of_uneven_shards():
    for dim in (None, 0, 1, (0, 1)):
        everywhere(lambda x: x.mean() if dim is None else x.mean(dim), (5, 3))
        for correction in (0, 1):
            everywhere(lambda x: torch.var(x, dim=dim, correction=correction), (5, 3))
            everywhere(lambda x: torch.std(x, dim=dim, correction=correction), (5, 3))
    everywhere(lambda x: torch.var_mean(x, 0), (5, 3))


@on_both
def test_var_of_numbers_far_from_zero():
    """Sums of squares would lose every digit."""
    everywhere(lambda x: torch.var(x + 1e8, 0), (5, 3), rtol=1e-6, atol=1e-6)


@on_both
def test_norms_over_a_split_dim():
    for p in (2, 1, 3, INF, -INF, 0.5):
        everywhere(lambda x: torch.linalg.vector_norm(x, p), (5, 3))
        everywhere(lambda x: torch.linalg.vector_norm(x, p, 0), (5, 3))
        everywhere(lambda x: x.norm(p, 1), (5, 3))
    everywhere(lambda x: x.norm(), (7, 3))
    everywhere(lambda x: torch.linalg.vector_norm(x, 0), (7, 3), grad=False)


@on_both
def test_logsumexp_over_a_split_dim():
    for dim in (0, 1, (0, 1)):
        everywhere(lambda x: torch.logsumexp(x, dim), (5, 3))
        everywhere(lambda x: torch.logsumexp(x * 500, dim), (5, 3))  # no overflow
    masked = randn(5, 3)
    masked[:3] = -INF
    everywhere(lambda x: torch.logsumexp(x, 1), masked, grad=False)
    everywhere(lambda x: torch.softmax(x, 0), masked, grad=False)


TIES = torch.tensor(
    [[1.0, 2, 2], [3, 2, 0], [3, 1, -3], [0, 2, -3], [3, 2, 1]], dtype=torch.float64
)


def exact(layouts):
    """Without Partial: random pieces do not add up to exact ties."""
    return [la for la in layouts if P not in la]


@on_both
def test_gradients_of_extremes_with_ties():
    """NaN in DTensor. torch divides the gradient among ties (amax, norm) or gives it to the first
    (max with a dim)."""
    mesh = line() if torch.distributed.get_world_size() == 2 else grid()
    for layout in exact(ON_LINE if mesh.ndim == 1 else ON_GRID):
        for way in ("leaf", "product", "view"):
            for func in (
                lambda x: x.max(), lambda x: x.min(), lambda x: x.amax(), lambda x: x.amin(),
                lambda x: x.amax(0), lambda x: x.amax(1), lambda x: x.amin((0, 1)),
                lambda x: x.max(0), lambda x: x.max(1), lambda x: x.min(0),
                lambda x: x.min(1, keepdim=True), lambda x: x.norm(INF), lambda x: x.norm(INF, 0),
                lambda x: torch.linalg.vector_norm(x, INF, 1),
                lambda x: torch.linalg.vector_norm(x, -INF), lambda x: x.median(),
                lambda x: torch.aminmax(x, dim=0), lambda x: x.cummax(0),
            ):  # fmt: skip
                check_op(func, TIES, layouts=[layout], mesh=mesh, ways=[way])


@on_both
def test_gradient_of_norms_at_zero():
    zeros = torch.zeros(5, 3, dtype=torch.float64)
    mesh = line() if torch.distributed.get_world_size() == 2 else grid()
    for layout in exact(ON_LINE if mesh.ndim == 1 else ON_GRID):
        for p in (1, 2, 3, INF):
            check_op(
                lambda x: torch.linalg.vector_norm(x, p, 0), zeros, layouts=[layout], mesh=mesh
            )
            check_op(lambda x: x.norm(p), zeros, layouts=[layout], mesh=mesh)


@on_both
def test_nan_and_inf_propagate():
    x = randn(5, 3)
    x[4, 1], x[0, 2], x[2, 0] = float("nan"), INF, -INF
    mesh = line() if torch.distributed.get_world_size() == 2 else grid()
    for layout in exact(ON_LINE if mesh.ndim == 1 else ON_GRID):
        for func in (
            lambda x: x.max(), lambda x: x.amin(0), lambda x: x.max(0), lambda x: x.min(1),
            lambda x: x.sum(0), lambda x: x.mean(), lambda x: x.norm(INF), lambda x: x.logsumexp(0),
            lambda x: x.argmax(), lambda x: x.argmin(0), lambda x: x.nansum(0),
            lambda x: x.nanmean(), lambda x: x.softmax(0), lambda x: x.isnan().any(),
            lambda x: x.cumsum(0), lambda x: x.sort(0), lambda x: x.topk(2, 0),
            lambda x: torch.where(x.isnan(), 0.0, x).amax(0), lambda x: x.nan_to_num(0.5, 2, -2),
            lambda x: x.prod(),
        ):  # fmt: skip
            check_op(func, x, layouts=[layout], mesh=mesh, grad=False)


@on_both
def test_argmax_without_dim():
    everywhere(
        lambda x: (x.argmax(), x.argmin(), x.argmax(0), x.argmax(1), x.argmin(1, keepdim=True)),
        (5, 3),
        grad=False,
    )
    everywhere(lambda x: (x.argmax(), x.argmin()), (3, 5, 2), grad=False)
    mesh = line() if torch.distributed.get_world_size() == 2 else grid()
    for layout in exact(
        ON_LINE if mesh.ndim == 1 else ON_GRID
    ):  # of equals one index, as torch's first
        check_op(
            lambda x: (x.argmax(0), x.argmin(0), x.max(0), x.min(1)),
            TIES,
            layouts=[layout],
            mesh=mesh,
            grad=False,
        )
        check_op(
            lambda x: (x.argmax(), x.argmin(0)),
            torch.ones(5, 3),
            layouts=[layout],
            mesh=mesh,
            grad=False,
        )


@on_both
def test_empty_shards_in_reductions():
    """One row over two ranks, no rows at all."""
    for shape in ((1, 3), (0, 3), (3, 1), (1, 1)):
        everywhere(
            lambda x: (
                x.sum(),
                x.sum(0),
                x.prod(1),
                x.norm(),
                x.logsumexp(0) if x.numel() else x.sum(),
                (x > 0).any(),
                (x > 0).all(0),
            ),
            shape,
        )
        if shape[0]:
            everywhere(
                lambda x: (
                    x.mean(0),
                    x.amax(0),
                    x.amin(),
                    x.max(),
                    x.min(0),
                    x.argmax(),
                    x.norm(INF, 0),
                    x.softmax(0),
                    x.var(0, correction=0),
                    x.cumsum(0),
                    x.max(1),
                    x.logsumexp(1),
                ),
                shape,
            )
    everywhere(lambda x: (x.mean(), x.sum(1), x.mean(1)), (0, 3), grad=False)  # nan, as torch gives


# Pending reductions -------------------------------------------------------------------------------


@on_both
def test_cast_of_a_partial_reduces_where_it_must():
    """int(a) + int(b) is not int(a + b); a float of another width may stay pending."""
    everywhere(
        lambda x: (
            (x * 3).long(),
            (x * 3).int(),
            x.to(torch.bool),
            x.type(torch.int16),
            (x * 2).to(torch.int64),
        ),
        (5, 3),
    )
    everywhere(lambda x: x.to(torch.float32), (5, 3), rtol=1e-5, atol=1e-5)
    ints = randint(-4, 9, (5, 3))
    everywhere(
        lambda i: (i.double(), i.bool(), i.to(torch.uint8), i.half(), i.to(torch.float32)), ints
    )


@on_both
def test_nonlinear_functions_of_a_partial():
    for f in (
        torch.exp,
        torch.relu,
        torch.abs,
        torch.sign,
        torch.square,
        torch.isnan,
        torch.floor,
        F.gelu,
        F.silu,
        lambda x: x * x,
        lambda x: x**2,
        lambda x: x @ x.T,
        lambda x: 1 / (x + 9),
        lambda x: x > 0,
        lambda x: x == x,
    ):
        everywhere(f, (5, 3))
    everywhere(torch.maximum, (5, 3), (5, 3))
    everywhere(torch.mul, (5, 3), (5, 3))


@on_both
def test_minus_five_x_is_not_two_x_of_a_partial():
    everywhere(
        lambda x: (
            -5 * x == 2 * x,
            -5 * x != 2 * x,
            -5 * x < 2 * x,
            -5 * x,
            2 * x,
            (2 * x) - (-5 * x),
        ),
        (5, 3),
    )
    for p in (Partial("max"), Partial("min")):  # a negative factor turns max into min
        layout = [p] if torch.distributed.get_world_size() == 2 else [p, S0]
        check_op(
            lambda x: (-5 * x, x * 2, x / -2, -x, x + 1, 1 - x, x * 0, x.neg(), x * -1.5),
            randn(5, 3),
            layouts=[layout],
            grad=False,
        )


@on_both
def test_every_kind_of_partial_means_its_reduction():
    axes = torch.distributed.get_world_size() // 2
    for kind in ("sum", "avg", "max", "min"):
        for layout in (
            [Partial(kind)] * axes,
            [Partial(kind), S0][:axes],
            [S1, Partial(kind)][-axes:],
            [Partial(kind), P][:axes],
        ):
            for f in (
                lambda x: x,
                lambda x: x + x,
                lambda x: x * 2,
                lambda x: x.sum(0),
                lambda x: x.exp(),
                lambda x: x.amax(1),
                lambda x: x + 1.5,
                lambda x: x - 3,
                lambda x: x.T,
                lambda x: x[1:4],
                lambda x: x.clone(),
                lambda x: x.mean(),
                lambda x: x.max(),
                lambda x: x @ x.T,
            ):
                check_op(
                    f, randn(5, 3), layouts=[layout], grad=kind in ("sum", "avg"), ways=["leaf"]
                )
    for kind in ("prod", "max", "min", "sum"):
        check_op(
            lambda i: (i + 1, i * 2, i.sum(), i.amax(0), i.prod(0), i > 2, i.T, -i),
            randint(-4, 9, (5, 3)),
            layouts=[[Partial(kind)] + [R] * (axes - 1)],
        )
    for kind in ("any", "all"):
        check_op(
            lambda m: (
                ~m,
                m & m,
                m | m,
                m.any(0),
                m.all(1),
                m.sum(),
                m.T,
                m.float(),
                m.logical_not(),
            ),
            randn(5, 3) > 0,
            layouts=[[Partial(kind)] + [S0] * (axes - 1)],
        )


@on_both
def test_scalar_plus_partial_counts_once():
    everywhere(lambda x: (x + 3.0, 3 - x, x - 1, x + 1 + 1), (5, 3))
    row = randn(3, seed=7)
    axes = torch.distributed.get_world_size() // 2
    check_op(
        lambda x, r: (x + r, r - x, torch.add(x, r, alpha=3)),
        randn(5, 3),
        row,
        layouts=[[P] * axes, None],
    )
    check_op(
        lambda x, w, b: F.linear(x, w, b),
        randn(5, 6),
        randn(4, 6),
        randn(4),
        layouts=[[R] * (axes - 1) + [S1], [R] * (axes - 1) + [S1], [R] * axes],
    )


@on_both
def test_clamp_in_place_on_a_partial():
    axes = torch.distributed.get_world_size() // 2
    for f in (
        lambda x: x.clamp_(-0.1, 0.3),
        lambda x: x.clamp_(min=0),
        lambda x: x.relu_(),
        lambda x: x.add_(1.0),
        lambda x: x.exp_(),
        lambda x: x.zero_(),
        lambda x: x.fill_(2),
        lambda x: x.mul_(3),
    ):
        for layout in ([P] * axes, [P, S0][:axes], [S1, P][-axes:], [Partial("avg")] * axes):
            check_op(f, randn(5, 3), layouts=[layout], inplace=True)


# In place -----------------------------------------------------------------------------------------


@on_both
def test_in_place_functions_keep_the_placement_of_their_target():
    """r.add_(s) must not turn r into a shard."""
    full = [randn(5, 3), randn(5, 3, seed=1)]
    for layouts in some_layouts(full, torch.distributed.get_world_size() // 2, 25, "in place"):
        if layouts[0] is not None:
            for f in (lambda r, s: r.add_(s), lambda r, s: r.mul_(s), lambda r, s: r.copy_(s)):
                check_op(f, *full, layouts=layouts, inplace=True)


@on_ranks(2)
def test_in_place_on_a_leaf_and_its_views():
    mesh = line()
    for layout in ([R], [S0], [S1]):
        p = place(randn(5, 3), mesh, layout)
        full = randn(5, 3)
        view, plain_view = p.t(), full.t()
        with torch.no_grad():
            p.add_(place(randn(5, 3, seed=2), mesh, [S0]))
            full.add_(randn(5, 3, seed=2))
            view.mul_(2)
            plain_view.mul_(2)
            p[1:3].fill_(7.0) if layout == [R] else None
            full[1:3].fill_(7.0) if layout == [R] else None
        assert torch.equal(p.full_tensor(), full) and torch.equal(view.full_tensor(), plain_view)


@on_ranks(2)
def test_writing_to_a_view_that_had_to_be_copied_is_an_error():
    x = place(randn(5, 3), line(), [S0])
    with fallbacks(), pytest.raises(RuntimeError, match="copy"):
        x[1:3].fill_(7.0)
        assert torch.equal(x.full_tensor()[1:3], torch.full((2, 3), 7.0, dtype=torch.float64))
        raise RuntimeError("no copy was needed")


@on_ranks(2)
def test_writing_to_a_copy_leaves_the_tensor():
    for args in ((0, 0, 5), (0, 1, 2), (1, 0, 3)):
        for layout in ([R], [S0], [S1]):
            x = place(randn(5, 3), line(), layout)
            for y in (x.narrow_copy(*args), torch.t_copy(x), torch.squeeze_copy(x)):
                y.fill_(7.0)
            assert torch.equal(x.full_tensor(), randn(5, 3))


# Halves of a split dim ----------------------------------------------------------------------------


@on_both
def test_gated_functions_pair_the_halves_of_the_whole_dim():
    def swiglu(x):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    def swiglu_of_dim_0(x):
        a, b = x.chunk(2, 0)
        return F.silu(a) * b

    everywhere(swiglu, (4, 6))
    everywhere(swiglu_of_dim_0, (6, 3))
    everywhere(lambda x: F.glu(x, -1), (5, 6))
    everywhere(lambda x: F.glu(x, 0), (6, 3))
    everywhere(lambda x: x[..., :3] * x[..., 3:], (5, 6))
    everywhere(lambda x: x[..., ::2] * x[..., 1::2], (5, 6))
    everywhere(lambda x: x.unflatten(1, (2, 3)).prod(1), (5, 6))
    everywhere(lambda x: x.view(5, 3, 2)[..., 0] - x.view(5, 3, 2)[..., 1], (5, 6))
    everywhere(lambda x: torch.stack(x.split([2, 4], 1)[1].chunk(2, 1)), (5, 6))
    everywhere(lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1), (5, 6))


# Types --------------------------------------------------------------------------------------------


@on_both
def test_integer_and_bool_tensors():
    ints = randint(-4, 9, (5, 3))
    mask = randn(5, 3) > 0
    everywhere(
        lambda i: (
            i + 1,
            i * 2,
            i // 2,
            i % 3,
            i / 2,
            i.sum(),
            i.sum(0),
            i.prod(1),
            i.max(),
            i.max(0),
            i.float().mean(),
            i > 2,
            i == i.T.T,
            i.cumsum(0),
            i & 3,
            i << 1,
            -i,
            i.abs(),
            i.clamp(0, 4),
            i + 0.5,
            i.argmax(1),
            i.bitwise_not(),
            i.any(),
            i.sort(0),
        ),
        ints,
    )
    no_partial = {"grids": exact(ON_GRID)}
    axes = torch.distributed.get_world_size() // 2
    for layout in exact(ON_LINE if axes == 1 else no_partial["grids"]):
        check_op(
            lambda m: (
                ~m,
                m & m,
                m | ~m,
                m ^ m,
                m.sum(),
                m.sum(0),
                m.any(),
                m.all(1),
                m.float().mean(0),
                m.long() + 1,
                m + 1,
                m * 2.5,
                m.cumsum(0),
                m.int().max(),
                m.count_nonzero(),
                torch.where(m, 1.0, 0.0),
                m.to(torch.float16),
            ),
            mask,
            layouts=[layout],
        )


@on_both
def test_type_promotion_depends_on_the_kind_of_constant():
    """1, 1.0 and True are one dict key and three dtypes."""
    ints = randint(-4, 9, (5, 3))
    everywhere(
        lambda i: (
            i + 1,
            i + 1.0,
            i + True,
            i * 2,
            i * 2.0,
            i * False,
            torch.where(i > 0, i, 1),
            torch.where(i > 0, i, 1.0),
            i + 1j,
        ),
        ints,
        grad=False,
    )
    everywhere(
        lambda x: (x + 1, x + 1.0, x + True, x * 1j), randn(5, 3, dtype=torch.float32), grad=False
    )


@on_both
def test_float_constants_are_read_anew_in_every_call():
    everywhere(lambda x: tuple(x * k + k for k in (0.5, 2.5, -1.0)), (5, 3))
    everywhere(lambda x: tuple(x.norm(p) for p in (1.0, 2.0, 3.5, INF)), (5, 3))
    everywhere(lambda x: tuple(x.clamp(lo, lo + 0.5) for lo in (-1.0, 0.1)), (5, 3))
    everywhere(lambda x: tuple(torch.pow(x.abs(), p) for p in (2.0, 3.0, 0.5)), (5, 3))
    everywhere(lambda x: tuple(F.leaky_relu(x, s) for s in (0.1, 0.3)), (5, 3))
    everywhere(lambda x: tuple(x.quantile(q, 0) for q in (0.25, 0.75)), (5, 3))


@on_both
def test_a_replica_counts_once_in_a_sum_over_ranks():
    """The gradient of what is replicated, read by shards and by replicas alike."""
    axes = torch.distributed.get_world_size() // 2

    def program(w, b, x):
        h = x @ w + b
        return (
            (h * h).mean()
            + w.sum()
            + (b * w[0]).sum()
            + (w * 0.5).pow(2).sum()
            + h.sum() * b.mean()
        )

    for x in ([S0] * axes, [R] * axes, [S1] * axes, [P] * axes):
        for w in ([R] * axes, [S0] * axes, [S1] * axes):
            check_program(
                program, [(randn(3, 4), w), (randn(4), [R] * axes)], randn(5, 3), layouts=[x]
            )


# The oracle itself --------------------------------------------------------------------------------


def _differs(on_dist, on_plain):
    """A function that is one thing for DistTensors and another for plain ones."""
    return lambda x: (on_dist if isinstance(x, dt.DistTensor) else on_plain)(x)


@on_ranks(2)
def test_the_oracle_notices():
    def double_gradient(x):
        return x * 2 - x.detach()

    def of_one_rank(x):
        return dt.from_local(
            x.full_tensor() + torch.distributed.get_rank() * 1e-12, x.process_mesh, [R]
        )

    for wrong, what in (
        (lambda x: x * 2, "result 0"), (double_gradient, "gradient of input 0"),
        (lambda x: x.float(), "f32"), (lambda x: x[None], "result 0"),
        (lambda x: x.detach(), "requires_grad"), (of_one_rank, "replicas differ"),
        (lambda x: [x], "structure"), (lambda x: x.full_tensor(), "result 0 is a Tensor"),
        (lambda x: x.full_tensor().tolist(), "structure|gave"),
    ):  # fmt: skip
        with pytest.raises(Problem, match=what):
            check_op(_differs(wrong, lambda x: x * 1), randn(5, 3), layouts=[[S0]])
    with pytest.raises(Problem, match="placements"):
        check_op(lambda x: x * 1, randn(5, 3), layouts=[[S0]], outputs=[[R]])
    with pytest.raises(Problem, match="communicated"):
        check_op(lambda x: x * x, randn(5, 3), layouts=[[P]], comms=[])
    check_op(lambda x: x * x, randn(5, 3), layouts=[[P]], comms=["all_reduce"])
    with pytest.raises(Problem, match="fell back"):
        check_op(torch.histc, randn(4), layouts=[[S0]])
