"""Rules of functions on lists, of fused optimizers and of the gradient scaler; every optimizer's
functions have one."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import disttensor as dt
import ops
from disttensor.core.layout import box_at
from disttensor.core.placement import Partial, Placement, Replicate, Shard
from ops import Arg
from ops.local import LocalCall, LocalPiece
from ops.registry import RULES
from tests.support.oracle import line
from tests.support.pool import on_ranks
from tests.support.simulate import (
    SimulatedCollectives,
    World,
    assemble,
    check_rule,
    cut,
    plan,
    replace_tensors,
)

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial("sum")
SHAPES = [(5, 6), (3,), (5, 6), (), (1, 4), (0, 3)]


def tensors(
    seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: Any = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(s, dtype=dtype, generator=generator) * 0.8 + 0.1 for s in shapes]


def placed(*placements: Any, shape: tuple[int, ...] = (5, 6)) -> Arg:
    return Arg(shape, placements)


def written(
    func: Any,
    *args: Any,
    layouts: Sequence[Sequence[Placement]],
    mesh_shape: tuple[int, ...] = (2, 2),
    **kwargs: Any,
) -> Any:
    """Run a function that gives nothing and writes its arguments, plain and in pieces: all targets
    must be equal, in the layouts they came in. None if the rule gives no decision."""
    found, factors, decision, inplace = plan(func, args, kwargs, layouts, mesh_shape)
    assert inplace
    if decision is None:
        return None
    assert len(decision.output_layouts) == len(factors.output_shapes())
    whole: list[Tensor] = []
    given = [t.clone() for t in found]
    numbers = iter(given)
    plain_args = replace_tensors(args, lambda _: next(numbers))
    func(*plain_args, **replace_tensors(kwargs, lambda _: next(numbers)))
    whole = given
    world = World(mesh_shape)
    pieces = [
        cut(t, w, mesh_shape, seed=i)
        for i, (t, w) in enumerate(zip(found, decision.input_layouts, strict=True))
    ]

    def rank(c: Any) -> None:
        inputs = [
            LocalPiece(tuple(t.shape), box_at(t.shape, w.dims, mesh_shape, c), w, t.dtype)
            for t, w in zip(found, decision.input_layouts, strict=True)
        ]
        collectives = SimulatedCollectives(world, c)
        call = LocalCall(func, inputs, (), decision.split, mesh_shape, c, collectives)
        local = factors.local(call) if factors.local is not None else func
        mine = iter([p[c] for p in pieces])
        local(
            *replace_tensors(args, lambda _: next(mine)),
            **replace_tensors(kwargs, lambda _: next(mine)),
        )

    world.run(rank)
    for t in factors.targets:
        want = decision.input_layouts[t]
        got = assemble(pieces[t], whole[t].shape, want, mesh_shape, f"argument {t}")
        torch.testing.assert_close(got, whole[t], rtol=1e-9, atol=1e-10)
        assert list(want.placements(len(mesh_shape))) == list(layouts[t])
    return decision


# Functions on lists -------------------------------------------------------------------------------

WITH_MORE: dict[str, list[tuple[Any, ...]]] = {
    "add": [(tensors(1),), (2.0,), ([2.0] * 6,), (torch.tensor(2.0, dtype=torch.float64),)],
    "sub": [(tensors(1),), (2.0,), ([2.0] * 6,)],
    "mul": [(tensors(1),), (2.0,), ([2.0] * 6,), (torch.tensor(2.0, dtype=torch.float64),)],
    "div": [(tensors(1),), (2.0,), ([2.0] * 6,), (torch.tensor(2.0, dtype=torch.float64),)],
    "pow": [(tensors(1),), (2.0,), ([2.0] * 6,)],
    "lerp": [(tensors(1), tensors(2)), (tensors(1), 0.3), (tensors(1), [0.3] * 6)],
    "addcmul": [
        (tensors(1), tensors(2)),
        (tensors(1), tensors(2), 0.5),
        (tensors(1), tensors(2), [0.5] * 6),
    ],
    "addcdiv": [
        (tensors(1), tensors(2)),
        (tensors(1), tensors(2), 0.5),
        (tensors(1), tensors(2), [0.5] * 6),
    ],
    "clamp_max": [(tensors(1),), (0.5,)],
    "clamp_min": [(tensors(1),), (0.5,)],
    "maximum": [(tensors(1),), (0.5,)],
    "minimum": [(tensors(1),), (0.5,)],
    "copy": [(tensors(1),), (tensors(1, dtype=torch.float32),)],
}
ON_LISTS = sorted(n for n in dir(torch) if n.startswith("_foreach_") and getattr(torch, n) in RULES)
REDUCING = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def test_every_function_on_lists_has_a_rule() -> None:
    assert {n for n in dir(torch) if n.startswith("_foreach_")} - set(ON_LISTS) <= {"_foreach_mm"}


@pytest.mark.parametrize("name", [n for n in ON_LISTS if n not in REDUCING])
def test_functions_on_lists(name: str) -> None:
    func = getattr(torch, name)
    for more in WITH_MORE.get(name.removeprefix("_foreach_").rstrip("_"), [()]):
        # (torch's own backward fails for a tensor beside the lists, and for addcdiv of 0-d tensors)
        strange = name == "_foreach_addcdiv" or any(isinstance(m, Tensor) for m in more)
        grad = not name.endswith("_") and not strange
        check_rule(
            func, tensors(), *more, tries=8, grad=grad, atol=1e-6 if "copy" in name else 1e-10
        )


def test_a_number_to_the_power_of_a_list() -> None:
    check_rule(torch._foreach_pow, 2.0, tensors(), tries=8)


@pytest.mark.parametrize("partial", [("avg",), ("max",), ("sum", "avg")], ids=str)
def test_other_pending_reductions_on_lists(partial: tuple[str, ...]) -> None:
    for name in (
        "add",
        "mul",
        "lerp",
        "addcmul",
        "copy_",
        "zero_",
        "clone",
        "neg",
        "sqrt",
        "add_",
        "mul_",
        "div_",
    ):
        more = WITH_MORE.get(name.rstrip("_"), [()])[0]
        check_rule(
            getattr(torch, "_foreach_" + name),
            tensors(),
            *more,
            tries=6,
            grad=False,
            partial=partial,
        )


@pytest.mark.parametrize("order", [2, 2.0, 1, 0, 3, 0.5, float("inf")])
def test_norms_of_lists(order: Any) -> None:
    shapes = [s for s in SHAPES if 0 not in s] if order == float("inf") else SHAPES
    check_rule(torch._foreach_norm, tensors(shapes=shapes), order, grad=order != 0)
    check_rule(
        torch._foreach_norm,
        [t.float() for t in tensors(shapes=shapes)],
        order,
        dtype=torch.float64,
        grad=False,
    )
    check_rule(
        torch._foreach_norm, [torch.zeros(4, dtype=torch.float64)], order, grad=order in (1, 2, 3)
    )


@on_ranks(2)
def test_norms_of_lists_of_complex_tensors() -> None:
    values = [torch.complex(x, x.flip(0)) for x in tensors(shapes=[(5, 3), (1, 4)])]
    for order, needs_grad in itertools.product((1, 2, 3.5, float("inf")), (True, False)):
        plain = [v.clone().requires_grad_(needs_grad) for v in values]
        split = [dt.shard_tensor(v, line(), [S0]).requires_grad_(needs_grad) for v in values]
        want, got = torch._foreach_norm(plain, order), torch._foreach_norm(split, order)
        torch.testing.assert_close([x.full_tensor() for x in got], list(want))
        if needs_grad:
            sum(want).backward()
            sum(got).backward()
            torch.testing.assert_close(
                [x.grad.full_tensor() for x in split], [x.grad for x in plain]
            )


@pytest.mark.filterwarnings("ignore:.*no sharding rule")
@on_ranks(2)
def test_norms_of_integers_are_refused_as_torch_refuses_them() -> None:
    x = dt.shard_tensor(torch.arange(5), line(), [S0])
    for order in (2, float("inf")):
        with pytest.raises(RuntimeError, match="Expected a floating point or complex tensor"):
            torch._foreach_norm([x], order)


def test_a_norm_of_small_floats_is_not_taken_in_them() -> None:
    big = [
        torch.full((64,), 200.0, dtype=torch.float16),
        torch.full((64,), 3.0, dtype=torch.bfloat16),
    ]
    check_rule(torch._foreach_norm, big, layouts=[[S0, R], [S0, S0]], rtol=1e-2, grad=False)


def test_maxima_of_lists_share_the_gradient_of_ties() -> None:
    x = [
        torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0], dtype=torch.float64),
        *tensors(shapes=[(5, 6), (1, 4)]),
    ]
    check_rule(torch._foreach_max, x)
    check_rule(torch._foreach_max, [torch.arange(6)], grad=False)
    check_rule(torch._foreach_max, [torch.tensor([1.0, float("nan"), 2.0])], grad=False)


def test_norms_of_all_tensors_take_one_all_reduce_for_each_set_of_axes() -> None:
    layouts: Any = [[S0, R], [S0, R], [S1, R], [R, R]]
    (got,) = check_rule(
        torch._foreach_norm, tensors(shapes=[(5, 6)] * 4), layouts=layouts, grad=False
    )
    assert got.log == [("all_reduce sum", (0,), 3)]


def test_each_element_has_a_layout_of_its_own() -> None:
    got = ops.infer(
        torch._foreach_add,
        [placed(S0, R), placed(P, R), placed(R, R)],
        [placed(R, R), placed(P, S1), placed(P, R)],
    )
    assert got.outputs == ((S0, R), (P, S1), (R, R))


def test_all_targets_keep_their_placements() -> None:
    target, other = (
        [placed(S0, R), placed(R, S1), placed(P, R)],
        [placed(S1, R), placed(R, R), placed(S0, R)],
    )
    for func in (torch._foreach_add_, torch._foreach_sub_, torch._foreach_copy_):
        assert ops.infer(func, target, other).inputs[:3] == ((S0, R), (R, S1), (P, R))


def test_the_work_for_a_plan_grows_with_the_number_of_parameters_and_no_faster() -> None:
    def calls(number: int) -> int:
        """How many functions are called to infer a step for so many parameters."""
        lists = [[placed(S0, R, shape=(8, 8)) for _ in range(number)] for _ in range(4)]
        steps = [Arg((), (R, R)) for _ in range(number)]
        count = [0]

        def note(frame: Any, event: str, what: Any) -> None:
            count[0] += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            ops.infer(torch._fused_adamw_, *lists, [], steps, lr=0.1)
        finally:
            sys.setprofile(None)
        return count[0]

    calls(2)  # what is made once
    assert calls(200) < 2.2 * calls(100)


# Fused optimizers ---------------------------------------------------------------------------------

ADAM = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
SGD = {
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": True,
    "maximize": False,
    "is_first_step": False,
}
ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
FUSED_SHAPES = [(5, 6), (3,), (5, 6), (1, 4)]
LAYOUTS: Any = [[S0, S1], [S0, R], [R, R], [S1, S1]]


def fused_case(name: str) -> tuple[Any, list[Any], dict[str, Any], list[Any]]:
    """(function, lists, options, layouts of the lists' tensors)"""
    lists = [tensors(i, FUSED_SHAPES) for i in range(5)]
    steps = [torch.tensor(3.0) for _ in FUSED_SHAPES]
    whole = [[R, R]] * len(steps)
    if "adam" in name:
        amsgrad = name.endswith("amsgrad")
        func = torch._fused_adamw_ if name.startswith("adamw") else torch._fused_adam_
        args = [*lists[: 5 if amsgrad else 4], *([] if amsgrad else [[]]), steps]
        return func, args, {**ADAM, "amsgrad": amsgrad}, LAYOUTS * (5 if amsgrad else 4) + whole
    if name == "sgd":
        return torch._fused_sgd_, lists[:3], SGD, LAYOUTS * 3
    return torch._fused_adagrad_, [*lists[:3], steps], ADAGRAD, LAYOUTS * 3 + whole


CASES = ("adam", "adamw", "adamw amsgrad", "sgd", "adagrad")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_fused_optimizers(name: str, lr: Any) -> None:
    func, args, options, layouts = fused_case(name)
    more = [[R, R]] if isinstance(lr, Tensor) else []
    assert written(func, *args, lr=lr, layouts=[*layouts, *more], **options) is not None


@pytest.mark.parametrize("name", CASES)
def test_fused_optimizers_with_a_gradient_scale(name: str) -> None:
    if name == "adagrad":
        pytest.skip("torch's fused adagrad on CPU takes no scale")
    func, args, options, layouts = fused_case(name)
    scale, found = torch.tensor(4.0), torch.tensor(0.0)
    more: Any = {"grad_scale": scale, "found_inf": found}
    assert (
        written(func, *args, lr=0.1, layouts=[*layouts, [R, R], [R, R]], **options, **more)
        is not None
    )


NAMES = {
    "adam": "grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps",
    "sgd": "grads momentum_buffer_list",
    "adagrad": "grads state_sums state_steps",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by_position", [0, 1, 2])
def test_a_fused_optimizer_takes_lists_by_name(name: str, by_position: int) -> None:
    func, args, options, layouts = fused_case(name)
    names = ["self", *NAMES[name].split()]
    named = dict(zip(names[by_position:], args[by_position:], strict=True))
    rest = {**options, "lr": 0.1}
    _, want, *_ = plan(func, args, rest, layouts, (2, 2))
    _, got, *_ = plan(func, args[:by_position], {**named, **rest}, layouts, (2, 2))
    assert (got.targets, got.inputs) == (want.targets, want.inputs)


def test_gradients_follow_the_parameters() -> None:
    lists = [[placed(S0, R)], [placed(P, R)], [placed(S0, R)]]
    got = ops.infer(torch._fused_sgd_, *lists, lr=0.1, **SGD)
    assert got.inputs == ((S0, R), (S0, R), (S0, R))


def test_state_that_lies_otherwise_than_its_parameter_is_left_to_a_copy() -> None:
    func, args, options, layouts = fused_case("sgd")
    other = [*layouts[:8], [S1, R], *layouts[9:]]
    assert written(func, *args, lr=0.1, layouts=other, **options) is None


# Gradient scaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 0, 1, 3])
def test_what_one_piece_finds_all_ranks_know(bad: int | None) -> None:
    grads = tensors(shapes=FUSED_SHAPES)
    if bad is not None:
        grads[bad].view(-1)[-1] = float("inf")
    layouts = [*LAYOUTS, [R, R], [R, R]]
    args = (grads, torch.tensor(0.0), torch.tensor(0.5))
    assert (
        written(torch._amp_foreach_non_finite_check_and_unscale_, *args, layouts=layouts)
        is not None
    )


def test_unscaling_a_pending_sum_is_left_to_a_copy() -> None:
    args = ([torch.ones(4)], torch.tensor(0.0), torch.tensor(0.5))
    assert (
        written(
            torch._amp_foreach_non_finite_check_and_unscale_,
            *args,
            layouts=[[P, R], [R, R], [R, R]],
        )
        is None
    )


def test_the_scale_is_updated_alike_on_every_rank() -> None:
    args = (
        torch.tensor(8.0),
        torch.tensor(1, dtype=torch.int32),
        torch.tensor(1.0),
        2.0,
        0.5,
        2000,
    )
    assert written(torch._amp_update_scale_, *args, layouts=[[R, R]] * 3) is not None


# Torch.optim --------------------------------------------------------------------------------------

NO_COMPUTATION = {
    "__get__", "__set__", "requires_grad_", "is_complex", "is_floating_point", "dim", "size",
    "numel", "item", "__float__",
    "__bool__", "backward",
}  # fmt: skip
OPTIMIZERS = [
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")
]
OPTIONS: list[dict[str, Any]] = [
    {}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True},
    {"centered": True, "momentum": 0.9},
    {"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(0.01)},
    {"line_search_fn": "strong_wolfe"},
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["for-loop", "foreach", "fused"])
def test_what_optimizers_call_has_a_rule(name: str, how: str) -> None:
    cls = getattr(torch.optim, name)
    known = inspect.signature(cls).parameters
    if how != "for-loop" and how not in known:
        pytest.skip(f"{name} has no {how} implementation")
    modes: dict[str, Any] = (
        {how: True} if how != "for-loop" else {"foreach": False} if "foreach" in known else {}
    )
    seen: set[Any] = set()

    class Logged(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.add(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    for options in OPTIONS:
        if (how == "foreach" and isinstance(options.get("lr"), Tensor)) or not set(options) <= set(
            known
        ):
            continue  # (torch: a tensor lr with foreach needs capturable=True)
        params = [torch.nn.Parameter(torch.randn(4, 3).as_subclass(Logged)) for _ in range(2)]
        optimizer = cls(params, **modes, **options)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(((p * p).sum() for p in params), torch.zeros(()))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        optimizer.zero_grad(set_to_none=False)
    assert [f for f in seen if f not in RULES and f.__name__ not in NO_COMPUTATION] == []
