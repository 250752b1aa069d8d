"""Proposes plans for shard_module from the structure of an existing model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from disttensor.checks import check_type
from disttensor.core.mesh import ProcessMesh
from disttensor.core.placement import Replicate, Shard
from disttensor.experts.expert_plan import Proposal as Proposal
from disttensor.experts.expert_plan import axes_of, expert_tensors
from disttensor.experts.expert_plan import experts as experts

# Usual names of the layers of a transformer. A name counts only if the shapes fit too.
QKV = re.compile(
    r"[qkv]|w[qkv]|query|key|value|[qkv]_proj|[qkv]_lin|to_[qkv]|(query|key|value)_proj"
)
FUSED = re.compile(r"c_attn|qkv|qkv_proj|query_key_value|in_proj|Wqkv|to_qkv")
OUT = re.compile(r"o|wo|out|proj|dense|c_proj|(o|out)_(proj|lin)|to_out(\.0)?|output\.dense")
UP = re.compile(
    r"up|gate|w1|w3|wi|wi_[01]|fc1|fc_in|c_fc|lin1|linear1|(up|gate)_proj|dense_h_to_4h|"
    r"intermediate\.dense"
)
DOWN = re.compile(
    r"down|w2|wo|fc2|fc_out|c_proj|lin2|linear2|down_proj|dense_4h_to_h|output\.dense"
)
NOT_TOKENS = re.compile(r"pos|type|segment|relative|wpe", re.IGNORECASE)
HEAD = re.compile(r"lm_head|head|output|decoder|embed_out|unembed")


class Linear(NamedTuple):
    """A layer that multiplies by a matrix. ``out``, ``into``: the dims of its weight."""

    name: str
    module: Any
    out: int
    into: int

    @property
    def given(self) -> int:
        return int(self.module.weight.shape[self.out])

    @property
    def taken(self) -> int:
        return int(self.module.weight.shape[self.into])


def megatron(
    model: nn.Module, mesh_axis: int | str = 1, mesh: ProcessMesh | None = None
) -> Proposal:
    """Proposes a tensor-parallel plan in Megatron's layout: attention by heads, the first matrices
    of an MLP by their outputs and the last by its inputs, experts by their number, token embedding
    and output head by the vocabulary; the rest replicated.

    ``mesh_axis``: the axis that splits, its number or (with ``mesh``) its name. Without ``mesh`` it
    is assumed to be the last axis. With ``mesh``, attention whose heads the axis does not divide is
    replicated. Parameters that are not recognized by names and shapes are replicated, and
    ``plan.why`` has the reason. All plans give correct results; they differ in communication.
    Raises ValueError for a name without a mesh.

    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)})
    >>> plan = dt.plans.megatron(model)
    >>> print(plan)
    up.weight    [R, S(0)]  mlp, first: its output is split
    up.bias      [R, S(0)]  mlp, first: its output is split
    down.weight  [R, S(1)]  mlp, last: its input is split
    down.bias    [R, R]     added once, to the whole sum
    >>> model = dt.shard_module(model, mesh, plan)
    """
    (axis,), shape = axes_of("plans.megatron", [mesh_axis], mesh)
    check_type("plans.megatron: model", model, nn.Module, "a module")
    return _Proposer(model, axis, len(shape), shape[axis]).proposal()


class _Proposer:
    """``dims``: name of a parameter -> (the dim that is split, or None; why)."""

    def __init__(self, model: nn.Module, axis: int, ndim: int, parts: int) -> None:
        self.model, self.axis, self.ndim, self.parts = model, axis, ndim, parts
        self.dims: dict[str, tuple[int | None, str]] = {}
        self.linears = [
            layer for layer in map(_linear, *zip(*model.named_modules(), strict=True)) if layer
        ]
        # module -> (name relative to it, layer) of the layers one or two levels below it
        self.below: dict[str, list[tuple[str, Linear]]] = {}
        for layer in self.linears:
            names = layer.name.split(".")
            for up in range(1, min(2, len(names)) + 1):
                around, rest = ".".join(names[:-up]), ".".join(names[-up:])
                self.below.setdefault(around, []).append((rest, layer))

    def proposal(self) -> Proposal:
        for name, module in self.model.named_modules():
            self._attention(name, module)
        for name, module in reversed(list(self.model.named_modules())):  # inner ones first
            self._mlp(name, module)
        for name, count in expert_tensors(self.model).items():
            few = f"experts: {count}, which are fewer than {self.parts} ranks"
            self.dims[name] = (None, few) if count < self.parts else (0, "experts: by number")
        self._vocabulary()
        plan, tied = Proposal(), dict[int, tuple[int | None, str]]()
        named = list(self.model.named_parameters(remove_duplicate=False))
        for name, value in named:  # a tied parameter has one layout under all its names
            if name in self.dims:
                tied.setdefault(id(value), self.dims[name])
        for name, value in named:
            dim, why = tied.get(id(value)) or (None, self._unknown(name, value.ndim))
            plan[name] = [
                Shard(dim) if a == self.axis and dim is not None else Replicate()
                for a in range(self.ndim)
            ]
            plan.why[name] = why
        return plan

    def _unknown(self, name: str, ndim: int) -> str:
        if ndim < 2:
            return ""
        return "not recognized as a part of attention, MLP or vocabulary"

    def _set(self, layer: Linear, split: str, why: str) -> None:
        """Sets the placements of a layer. ``split``: "out", "into" or "" (whole)."""
        dim = {"out": layer.out, "into": layer.into, "": None}[split]
        self.dims[f"{layer.name}.weight"] = dim, why
        if getattr(layer.module, "bias", None) is not None:
            self.dims[f"{layer.name}.bias"] = (
                (0, why)
                if split == "out"
                else (None, "added once, to the whole sum" if split else why)
            )

    def _layers_below(self, name: str, depth: int) -> Iterator[tuple[str, Linear]]:
        """Returns (name relative to the module, layer) of the layers without a role, at most
        ``depth`` levels below it."""
        for rest, layer in self.below.get(name, ()):
            if f"{layer.name}.weight" not in self.dims and rest.count(".") < depth:
                yield rest, layer

    def _attention(self, name: str, module: nn.Module) -> None:
        children = list(self._layers_below(name, 1))
        fused = [layer for rest, layer in children if FUSED.fullmatch(rest)]
        if fused or isinstance(getattr(module, "in_proj_weight", None), nn.Parameter):
            why = "q, k and v are one matrix, of which a piece is no piece of each"
            for layer in fused:
                self._set(layer, "", why)
            for key in ("in_proj_weight", "in_proj_bias"):
                if getattr(module, key, None) is not None:
                    self.dims[f"{name}.{key}" if name else key] = None, why
            for layer in self._outputs(name, None):
                self._set(layer, "", "follows an attention that is whole")
            return
        qkv = [layer for rest, layer in children if QKV.fullmatch(rest)]
        if len(qkv) < 3:
            return
        outputs = self._outputs(name, max(layer.given for layer in qkv))
        odd = _why_undivided(module, qkv, self.parts)
        for layer in qkv:
            self._set(layer, "" if odd else "out", odd or "attention: by heads")
        for layer in outputs:
            self._set(layer, "" if odd else "into", odd or "attention: takes what the heads give")
        bias = getattr(module, "relative_attention_bias", None)
        if isinstance(bias, nn.Embedding) and not odd:
            self.dims[f"{name}.relative_attention_bias.weight"] = 1, "attention: by heads"

    def _outputs(self, name: str, taken: int | None) -> list[Linear]:
        """Returns the layers after the attention ``name``: inside it, or in its parent module."""
        around = name.rpartition(".")[0]
        for place, depth in ((name, 2), (around, 2)):
            found = [
                layer
                for rest, layer in self._layers_below(place, depth)
                if OUT.fullmatch(rest) and taken in (None, layer.taken)
            ]
            if found:
                return found[:1]
        return []

    def _mlp(self, name: str, module: nn.Module) -> None:
        inside = list(self._layers_below(name, 2))
        for rest, down in inside:
            if not DOWN.fullmatch(rest):
                continue
            ups = [
                layer
                for other, layer in inside
                if UP.fullmatch(other) and layer.given == down.taken and layer.taken == down.given
            ]
            for layer in ups:
                self._set(layer, "out", "mlp, first: its output is split")
            if ups:
                self._set(down, "into", "mlp, last: its input is split")
                return

    def _vocabulary(self) -> None:
        sizes = set()
        for name, module in self.model.named_modules():
            weight = f"{name}.weight" if name else "weight"
            if isinstance(module, nn.Embedding) and weight not in self.dims:
                if NOT_TOKENS.search(name.rpartition(".")[2]):
                    self.dims[weight] = None, "small"
                else:
                    sizes.add(module.num_embeddings)
                    self.dims[weight] = 0, "by the vocabulary"
        for layer in self.linears:
            weight, last = f"{layer.name}.weight", layer.name.rpartition(".")[2]
            if weight not in self.dims and layer.given in sizes and HEAD.fullmatch(last):
                self._set(layer, "out", "by the vocabulary")


def _linear(name: str, module: nn.Module) -> Linear | None:
    """Returns the layer of a Linear, or of the Conv1D of GPT-2, a Linear with transposed weight."""
    if isinstance(module, nn.Linear):
        return Linear(name, module, 0, 1)
    if type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int):
        return Linear(name, module, 1, 0)
    return None


def _number(module: nn.Module, *names: str) -> int | None:
    """Returns the first of these attributes that is a whole number."""
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _why_undivided(module: nn.Module, qkv: list[Linear], parts: int) -> str:
    """Returns why the ranks cannot split the heads; "" if they can, or if heads are unknown."""
    size = _number(
        module, "head_dim", "attention_head_size", "key_value_proj_dim", "d_kv", "dim_head"
    )
    if size is None:
        heads = _number(module, "num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
        if heads is None:
            return ""
        size = qkv[0].given // heads
    for layer in qkv:
        heads = layer.given // size
        if heads % parts:
            last = layer.name.rpartition(".")[2]
            return f"{last} has {heads} heads, which {parts} ranks do not divide"
    return ""
