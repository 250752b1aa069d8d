"""shard_module: parameters and buffers of an ordinary module become DistTensors, by a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from disttensor.api.shard import shard_tensor
from disttensor.checks import check_callable, check_type, has_own_operators
from disttensor.comm import collectives
from disttensor.core.layout import layout_of
from disttensor.core.mesh import ProcessMesh, as_mesh
from disttensor.core.placement import Placement, Replicate
from disttensor.core.spec import DistSpec
from disttensor.experts import expert_modules
from disttensor.nn.names import covers, list_names
from disttensor.nn.parameters import Slot, slots
from disttensor.nn.shared_memory import check_memory, replace_held
from disttensor.nn.torch_styles import is_style, placements_of, splits
from disttensor.off_mesh import execute
from disttensor.progress import bar
from disttensor.tensor.base import as_parameter
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.user_facts import carry_over, compare_placed

Plan = Mapping[Any, Sequence[Placement]] | Callable[[str, nn.Module, ProcessMesh], None] | None


def shard_module(
    module: nn.Module,
    mesh: ProcessMesh,
    plan: Plan = None,
    *,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Converts all parameters and buffers of ``module`` to DistTensors on ``mesh``. Returns it.

    ``plan`` maps names of parameters or modules to placements. A name is exact, a glob as
    ``"*.attn.[qkv].weight"``, or a compiled regex. A name of a module may also have a style of
    torch's ``parallelize_module`` (``ColwiseParallel()``), which splits over the axis ``"tp"`` or
    the only axis. The first matching entry is used, exact names before patterns. Or ``plan`` is a
    function (name, module, mesh) that is called for each submodule and shards its tensors with
    ``shard_tensor``. Where ranks have other values (of another seed), the first rank of the mesh
    sends its own. Tensors that no entry names are replicated, and so is a 0-d tensor
    (``num_batches_tracked``) if its entry matches other tensors too. Tied parameters stay tied. On
    a rank off the mesh, parameters and buffers are metadata only. Tensors on the meta device are
    materialized shard by shard, inner modules first, and have the same bits as in one process.
    ``init(submodule)`` initializes them, or without ``init`` the ``reset_parameters`` of the
    submodule. A frozen tensor of a subclass that implements operators (a quantized weight of
    torchao) stays unchanged and counts as replicated. Raises ValueError before anything is changed:
    for such a tensor that requires grad, for a plan that does not fit, and for meta tensors without
    initialization.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> column, row = [dt.Replicate(), dt.Shard(0)], [dt.Replicate(), dt.Shard(1)]
    >>> model = dt.shard_module(model, mesh, {"0.*": column, "2.weight": row})
    >>> model[0].weight.dims_mapping, model[2].weight.dims_mapping
    ([1, -1], [-1, 1])
    """
    check_module("shard_module: module", module)
    mesh = as_mesh("shard_module: mesh", mesh)
    check_plan("shard_module", plan, init)
    before = slots(module)
    if callable(plan):
        for name, child in module.named_modules():
            plan(name, child, mesh)
        plan = None
    place(module, before, lambda value: mesh, plan, init)
    return module


def check_module(who: str, value: object) -> None:
    check_type(who, value, nn.Module, "a module")


def check_plan(who: str, plan: object, init: object) -> None:
    """Raises TypeError if ``plan`` is not a plan, or ``init`` is not a function."""
    if plan is not None and not callable(plan):
        expected = "a dict {name: placements}, or a function (name, module, mesh),"
        check_type(f"{who}: plan", plan, Mapping, expected)
    if init is not None:
        check_callable(f"{who}: init", init, "a function of a module")


def place(
    module: nn.Module,
    before: list[Slot],
    mesh_of: Callable[[torch.Tensor], ProcessMesh | None],
    plan: Mapping[Any, Sequence[Placement]] | None,
    init: Callable[[nn.Module], Any] | None,
    one_value: bool = True,
) -> None:
    """Shards a module in which each tensor has its own mesh; tensors with None are left unchanged.

    ``before``: the slots before the call. A tensor that was replaced in one slot since then is
    replaced in all its other slots too. ``one_value``: where ranks have other values, as of another
    seed, the first rank of the mesh sends its own.
    """
    chosen = _choose(module, mesh_of, plan)
    check_subclasses("shard_module", module, chosen, lambda value: mesh_of(value) is None)
    check_memory("shard_module", module, lambda value: mesh_of(value) is None)
    if init is None:
        _check_meta(module, mesh_of)
    made: dict[int, Any] = {}
    for slot in before:
        now = slot.table.get(slot.key)
        if now is not slot.value and isinstance(now, DistTensor):
            made[id(slot.value)] = now
    fresh: set[nn.Module] = set()
    placed = [(s.name, s.value, _new_mesh(s, mesh_of)) for s in before]
    differing = compare_placed("shard_module", placed, values=one_value)
    places = slots(module)
    with bar("placing", len(places), "tensors") as advance:
        for slot in places:
            name, owner, table, key, value = slot
            mesh = _new_mesh(slot, mesh_of)
            if id(value) not in made and mesh is not None:
                made[id(value)] = _place(value, mesh, chosen.get(name), mesh in differing)
                if value.is_meta:
                    fresh.add(owner)
            table[key] = made.get(id(value), value)
            advance()
    carried: set[int] = set()
    for slot in before:  # step_hooks.check_fresh detects an optimizer that has the old tensor
        now = slot.table.get(slot.key)
        if now is not slot.value and isinstance(now, DistTensor) and id(now) not in carried:
            carried.add(id(now))
            carry_over(slot.value, now, f"{slot.name!r} became {now.spec!r}")
    replace_held(module, made)
    with bar("initializing", len(fresh), "modules") as advance:
        for child in children_first(module):
            if child in fresh:
                init(child) if init else _initializer(child)()
                advance()
    expert_modules.attach(module)


def _new_mesh(
    slot: Slot, mesh_of: Callable[[torch.Tensor], ProcessMesh | None]
) -> ProcessMesh | None:
    """Returns the mesh for the tensor of a slot; None if the tensor stays where it is."""
    now = slot.table.get(slot.key)
    if now is not slot.value and isinstance(now, DistTensor):  # a plan has placed it
        return now.spec.mesh
    stays = isinstance(slot.value, DistTensor) or has_own_operators(slot.value)
    return None if stays else mesh_of(slot.value)


def _initializer(module: nn.Module) -> Any:
    """Returns the function that initializes the parameters of this module itself, or None."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def check_subclasses(
    who: str, module: nn.Module, chosen: Mapping[str, Sequence[Placement]],
    stays: Callable[[torch.Tensor], bool],
) -> None:  # fmt: skip
    """Raises ValueError for a tensor of a subclass with operators that cannot stay replicated:
    it requires grad, or ``chosen`` splits it; and for a tensor of another class of the user, unless
    it ``stays``."""
    for name, _, _, _, value in slots(module):
        if not has_own_operators(value):
            kind = type(value)
            known = kind.__module__.split(".")[0] in ("torch", "disttensor")
            if not known and not stays(value):
                raise ValueError(
                    f"{who}: {name!r} is a {kind.__name__}, a class of yours, and a DistTensor "
                    "would take its place. Make it an nn.Parameter or a regular tensor, with what "
                    "the class adds as attributes (p.name = value), which are kept"
                )
            continue
        split = any(type(p) is not Replicate for p in chosen.get(name, ()))
        if split or value.requires_grad:
            what = f"{who}: {name!r} is a {type(value).__name__}, a tensor subclass with operators "
            raise ValueError(
                what + "of its own. It stays whole on each rank, and the plan splits it: take it "
                "out of the plan"
                if split
                else what + "of its own, and requires grad: its gradient would not be reduced. "
                "Freeze it (requires_grad_(False)) and train others beside it, as LoRA does, or "
                "train a regular tensor"
            )


def _check_meta(module: nn.Module, mesh_of: Callable[[torch.Tensor], Any]) -> None:
    """Raises ValueError for a meta tensor in a module that cannot initialize it."""
    for name, owner, _, _, value in slots(module):
        stays = isinstance(value, DistTensor) or has_own_operators(value)
        if stays or not value.is_meta or mesh_of(value) is None:
            continue
        if not callable(_initializer(owner)):
            raise ValueError(
                f"shard_module: {name} is on the meta device, and its module "
                f"{type(owner).__name__} has no reset_parameters, so nothing would give it "
                "values. Pass init=function(module) to dt.shard_module, give the module a "
                "reset_parameters, make this tensor on a real device, or distribute it as it is: "
                "dt.shard_tensor(x, mesh, placements) stays on the meta device"
            )


def children_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yields submodules before their parents: the order in which constructors initialize."""
    seen = set() if seen is None else seen
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from children_first(child, seen)
    yield module


def _place(
    value: torch.Tensor, mesh: ProcessMesh, placements: Sequence[Placement] | None,
    broadcast: bool,
) -> Any:  # fmt: skip
    layout = layout_of(placements or [Replicate()] * mesh.ndim, value.ndim, mesh.ndim)
    spec = DistSpec(mesh, layout, value.shape, value.dtype)
    if mesh.coordinate is None:
        out: Any = execute.off_mesh_leaf(spec, value.requires_grad)
    elif value.is_meta:
        local = torch.empty(spec.local_shape, dtype=value.dtype, device=mesh.device)
        out = wrap(local.requires_grad_(value.requires_grad), spec)
    else:
        data, grad = value.detach(), value.requires_grad
        if broadcast:
            data = collectives.broadcast(data.to(mesh.device), 0, mesh.group((*range(mesh.ndim),)))
        out = shard_tensor(data, mesh, spec.placements, requires_grad=grad, check=False)
    return as_parameter(out) if isinstance(value, nn.Parameter) else out


def _choose(
    module: nn.Module,
    mesh_of: Callable[[torch.Tensor], ProcessMesh | None],
    plan: Mapping[Any, Sequence[Placement]] | None,
) -> dict[str, Sequence[Placement]]:
    """Returns name of each tensor -> placements. Checks the whole plan."""
    everything = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    tensors = {name: value for name, value in everything if mesh_of(value) is not None}
    check_sizes("shard_module", tensors)
    chosen: dict[str, Sequence[Placement]] = {}
    for pattern, given, names in _entries(plan or {}, module, tensors):
        several = any(tensors[name].ndim for name in names)
        for name in names:
            mesh, ndim = mesh_of(tensors[name]), tensors[name].ndim
            if several and not ndim:
                continue  # a 0-d tensor of an entry for several tensors, as num_batches_tracked
            if name not in chosen and mesh is not None:
                try:
                    chosen[name] = _placements(given, module, name, ndim, mesh)
                except (ValueError, TypeError) as error:
                    text = f"shard_module: plan entry {pattern!r} for {name!r}: {error}"
                    raise type(error)(text) from None
    by_tensor: dict[int, str] = {}
    for name, value in tensors.items():  # a tied parameter has one layout under all its names
        first = by_tensor.setdefault(id(value), name)
        if first != name:
            one, other = chosen.get(first), chosen.get(name)
            if one is not None and other is not None and tuple(one) != tuple(other):
                raise ValueError(
                    f"shard_module: {first!r} and {name!r} are one tied tensor, but the plan "
                    "places them differently"
                )
            if one is None and other is not None:
                chosen[first] = other
    return chosen


def check_sizes(who: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a tensor of a lazy module."""
    for name, value in tensors.items():
        if nn.parameter.is_lazy(value):
            raise ValueError(
                f"{who}: {name!r} is lazy, it has no sizes before the first call (nn.LazyLinear "
                "and its like): call the module once on a regular tensor, then shard it"
            )


def _entries(
    plan: Mapping[Any, Any], module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Any, Any, list[str]]]:
    """Yields (name or pattern, placements or style, names of its tensors), exact names first.
    Styles that split nothing are left out."""
    modules = {name for name, _ in module.named_modules()}
    for exact in (True, False):
        for pattern, given in plan.items():
            if not isinstance(pattern, (str, re.Pattern)):
                raise TypeError(
                    f"shard_module: plan entry {pattern!r}: a name is a string (exact or a glob) "
                    "or a compiled regex"
                )
            literal = isinstance(pattern, str) and (pattern in tensors or pattern in modules)
            if literal is not exact or (is_style(given) and not splits(given)):
                continue
            names = [name for name in tensors if covers(pattern, name, modules)]
            if not names:
                raise ValueError(
                    f"shard_module: {pattern!r} matches no parameter, buffer or module; there are "
                    f"{list_names(str(pattern), tensors)}"
                )
            yield pattern, given, names


def _placements(
    given: Any, module: nn.Module, name: str, ndim: int, mesh: ProcessMesh
) -> Sequence[Placement]:
    """Returns the placements of the tensor ``name``, and checks that they fit it."""
    placements: Sequence[Placement] = given
    if is_style(given):
        placements = placements_of(given, module, name, mesh)
    if layout_of(placements, ndim, mesh.ndim).partial:
        raise ValueError(
            "Partial is for values that are still to be reduced; parameters and buffers are split "
            "or replicated"
        )
    return placements
