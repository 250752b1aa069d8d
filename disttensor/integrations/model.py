"""The model of another library under a Strategy: a proposed plan, batches that are split, and
the full values of its state."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from disttensor.api.shard import shard_tensor
from disttensor.callbacks import set_during
from disttensor.comm import compare_programs
from disttensor.comm.groups import world_group
from disttensor.comm.objects import run_on_all_ranks
from disttensor.comm.process_group import world
from disttensor.core.placement import Replicate, Shard
from disttensor.nn import tensor_parallel_plans
from disttensor.nn.parameters import slots
from disttensor.nn.shard_module import shard_module
from disttensor.parallel.degrees import STAGE_AXES
from disttensor.parallel.rebind_optimizer import check_no_steps, replace_parameters
from disttensor.parallel.strategy import Strategy
from disttensor.patches.state_dicts import wrap_state_dict_fn
from disttensor.pytree import find_tensors, replace_tensors, substitute
from disttensor.tensor.copies import PICKLES
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.values import broadcast_value, values_everywhere

Tensor = torch.Tensor
T = TypeVar("T")
PLACED = WeakTensorKeyDictionary()  # a parameter or buffer of a model -> the one in its place
# Styles of transformers' tensor-parallel plans -> the dims that they split. Other styles do not
# split a tensor, or belong to experts and fused matrices.
_BY_OUTPUT: dict[str, int | None] = {"weight": 0, "bias": 0}
_BY_INPUT: dict[str, int | None] = {"weight": 1, "bias": None}
STYLES = {
    "colwise": _BY_OUTPUT, "colwise_gather_output": _BY_OUTPUT, "embedding_rowwise": _BY_OUTPUT,
    "rowwise": _BY_INPUT, "rowwise_split_input": _BY_INPUT,
}  # fmt: skip


def is_first() -> bool:
    return world()[0] == 0


def on_first(who: str, write: Callable[[], Any]) -> None:
    """Calls ``write`` on the first rank while the others wait. Raises its error on all ranks."""
    run_on_all_ranks(who, world_group(), write if is_first() else lambda: None)


# Placing a model ----------------------------------------------------------------------------------


def place(
    model: nn.Module,
    strategy: Strategy,
    plan: Any = None,
    layers: Iterable[nn.Module | str] | None = None,
    init: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Applies ``strategy`` to a model and splits the batches that it is called with. A model
    with DistTensors keeps them: its other parameters are replicated. A parameter of a model that
    was placed before is the same one here."""
    stages, balance, before = strategy.stages(), None, slots(model)
    for slot in before:  # tied to a parameter of another model
        slot.table[slot.key] = PLACED.get(slot.value, slot.value)
    if any(isinstance(p, DistTensor) for p in model.parameters()):
        if not all(isinstance(p, DistTensor) for p in model.parameters()):  # adapters, added later
            shard_module(model, stages[-1], init=init)
    else:
        if plan is None and strategy.degrees().tp > 1:
            plan = propose(model, strategy)
        if layers is None and len(stages) > 1 and not isinstance(model, nn.Sequential):
            layers = layers_in_order(model)
            balance = "parameters" if layers else None
        strategy.apply(model, None, plan, layers=layers, balance=balance, init=init)
    for slot in before:
        if slot.table[slot.key] is not slot.value:
            PLACED[slot.value] = slot.table[slot.key]
    hooks = [hook for m in model.modules() for hook in m._forward_pre_hooks.values()]
    if not any(isinstance(hook, SplitBatch) for hook in hooks):
        model.register_forward_pre_hook(SplitBatch(strategy), with_kwargs=True)


def rebind(who: str, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer the parameters that its own have become when their models were placed."""

    def become(p: Tensor) -> Tensor:
        if not isinstance(p, DistTensor) and p not in PLACED:
            raise ValueError(
                f"{who}: a parameter of this {type(optimizer).__name__}, of shape "
                f"{list(p.shape)}, is in no model that this strategy has placed: it would never "
                "get the gradient of all ranks. Prepare its model before the optimizer, or with it"
            )
        return PLACED.get(p, p)

    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(become(p) is not p for p in params):
        check_no_steps(who, optimizer)
        replace_parameters(optimizer, become)


def _base(model: nn.Module) -> tuple[str, Any]:
    """Returns the model inside of PEFT's wrapper, with the prefix of its names."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    prefix = next(name for name, module in model.named_modules() if module is inner)
    return f"{prefix}." if prefix else "", inner


def propose(model: nn.Module, strategy: Strategy) -> dict[str, Any]:
    """Returns a tensor-parallel plan: the own plan of a transformers model, and for parameters that
    it does not name, ``dt.plans.megatron``. Heads that tp does not divide stay whole."""
    plan = tensor_parallel_plans.megatron(model, "tp", strategy.stages()[0])
    prefix, inner = _base(model)
    axis = STAGE_AXES.index("tp")
    named = [
        (re.compile(re.escape(prefix + key).replace(r"\*", r"\d+") + r"(\.base_layer)?"), style)
        for key, style in (getattr(inner, "_tp_plan", None) or {}).items()
        if style in STYLES
    ]
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        known = plan.why[name] and not plan.why[name].startswith("not recognized")
        if leaf not in STYLES["rowwise"] or (known and plan[name][axis] == Replicate()):
            continue
        for pattern, style in named:
            kind = nn.Embedding if style == "embedding_rowwise" else nn.Linear
            if pattern.fullmatch(owner) and isinstance(model.get_submodule(owner), kind):
                places: list[Any] = [Replicate()] * len(STAGE_AXES)
                if (dim := STYLES[style][leaf]) is not None:
                    places[axis] = Shard(dim)
                plan[name], plan.why[name] = places, "the plan of transformers"
    return plan


def layers_in_order(model: nn.Module) -> list[str] | None:
    """Returns the layers of a transformers model with a pipeline plan, in the order of its modules;
    None for another model."""
    prefix, inner = _base(model)
    named = {prefix + name for name in getattr(inner, "_pp_plan", None) or ()}
    return [
        f"{name}.*" if isinstance(module, nn.ModuleList) else name
        for name, module in model.named_modules()
        if name in named
    ] or None


@dataclass(frozen=True, eq=False)
class SplitBatch:
    """A forward pre-hook: regular tensors with the rows of a batch become DistTensors, split over
    the axes of the batch, and over ``cp`` along the sequence."""

    strategy: Strategy

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = find_tensors((args, kwargs))
        first = next((x for x in found if x.ndim), None)
        if first is None or first.shape[0] < 2:
            return None
        stages, cp = self.strategy.stages(), self.strategy.degrees().cp

        def part(x: Any, last: bool = False) -> Any:
            if isinstance(x, DistTensor) or not x.ndim or x.shape[0] != first.shape[0]:
                return x
            split = cp > 1 and x.ndim > 1 and x.shape[1:2] == first.shape[1:2]
            places = self.strategy.batch(1 if split else None)
            return shard_tensor(x, stages[-1 if last else 0], places)

        out = {
            key: replace_tensors(value, lambda x: part(x, "label" in key))
            for key, value in kwargs.items()
        }
        return replace_tensors(args, part), out


# State --------------------------------------------------------------------------------------------


def full_value(x: Any) -> Any:
    """Returns a copy of the full value on the first rank, in the memory of the CPU; None on the
    others."""
    value = broadcast_value(x)
    return value.to("cpu", copy=True) if is_first() else None


@contextmanager
def gathered_pickles() -> Iterator[None]:
    """A context in which all ranks make the same pickles. On the first rank they hold full values,
    as regular tensors, and on the others None. ``state_dict`` of an optimizer has the state of all
    pipeline stages on every rank."""
    kind = torch.optim.Optimizer
    before: Any = kind.state_dict

    @wraps(before)
    def state_dict(self: Any) -> dict[str, Any]:
        state: dict[str, Any] = before(self)
        done = _full_optimizer_state in self._optimizer_state_dict_post_hooks.values()
        return state if done else _of_all_stages(self, state)

    kind.state_dict = state_dict  # type: ignore[method-assign]
    try:
        with set_during(PICKLES, "gather"), values_everywhere():
            yield
    finally:
        kind.state_dict = before  # type: ignore[method-assign]


def _of_all_stages(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = wrap_state_dict_fn(lambda *_: lambda: dict(state_dict))(
        optimizer, "state_dict"
    )()
    return whole


def full_state(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict with full values on the first rank, and an empty dict on the others.
    All ranks make the call."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    known = _full_values(state)
    return {name: known.get(id(x), x) for name, x in state.items()} if is_first() else {}


def _full_values(state: dict[str, Any]) -> dict[int, Any]:
    """Returns id of a tensor -> its full value. A tied tensor has one value."""
    known: dict[int, Any] = {}
    for x in state.values():
        if isinstance(x, Tensor) and id(x) not in known:
            known[id(x)] = full_value(x)
    return known


def save_full(who: str, model: nn.Module, save: Callable[[dict[str, Any]], Any]) -> None:
    """Calls ``save(state dict)`` on the first rank, while ``model`` holds full values there. All
    ranks make the call. Of PEFT's models the tensors of all adapters are full, and given."""
    state = _state_to_save(model)
    known = _full_values(state)

    def write() -> None:
        held = [slot for slot in slots(model) if id(slot.value) in known]
        try:
            for slot in held:
                full, now = known[id(slot.value)], slot.value
                if isinstance(now, nn.Parameter):
                    full = nn.Parameter(full, requires_grad=now.requires_grad)
                slot.table[slot.key] = full
            save({name: known.get(id(x), x) for name, x in state.items()})
        finally:
            for slot in held:
                slot.table[slot.key] = slot.value

    on_first(who, write)


def _state_to_save(model: Any) -> dict[str, Any]:
    """Returns the state dict; of a PEFT model the tensors with the name of an adapter in their own,
    and those that PEFT writes."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return state
    select = import_module("peft").get_peft_model_state_dict
    adapters = {name for name, config in model.peft_config.items() if not config.is_prompt_learning}
    found = (select(model, state_dict=state, adapter_name=name) for name in adapters)
    written = {id(x) for values in found for x in values.values()}
    names = set(model.peft_config)
    return {name: x for name, x in state.items() if id(x) in written or names & {*name.split(".")}}


def save_full_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes ``optimizer.state_dict()`` return full values on the first rank, and copies of the
    pieces on the others; ``load_state_dict`` takes both, and full values on all ranks. All ranks
    make these calls."""

    def loaded(of: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in of.param_groups for p in group["params"]]
        state = {
            i: {key: _like(p, x) for key, x in state_dict["state"][i].items()}
            for i, p in zip(numbers, params, strict=False)
            if i in state_dict["state"] and getattr(p, "is_initialized", True)
        }
        return {**state_dict, "state": state}

    optimizer.register_state_dict_post_hook(_full_optimizer_state)
    optimizer.register_load_state_dict_pre_hook(loaded)


def _full_optimizer_state(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook of ``state_dict``: see ``save_full_state``."""

    def value(x: Any) -> Any:
        full = full_value(x)
        if is_first() or PICKLES.get() == "gather":
            return full
        return copy.deepcopy(x)  # which is no call of the program

    whole = _of_all_stages(optimizer, state_dict)
    return {**whole, "state": substitute(whole["state"], value)}


def _like(p: Any, x: Any) -> Any:
    """Returns ``x`` in the layout of the parameter ``p``, if it has its shape."""
    if not isinstance(p, DistTensor) or not isinstance(x, Tensor) or x.shape != p.shape:
        return x
    if isinstance(x, DistTensor):  # the first rank may hold the full value, and shard it
        compare_programs.record_entry("shard_tensor", x.spec, False)
        return x
    return shard_tensor(x, p.process_mesh, p.placements, check=False)
