"""Mixed precision by module: dtypes of parameters, of sums between ranks, of arguments and of
results.

A policy is any object with the attributes of ``torch.distributed.fsdp.MixedPrecisionPolicy``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from disttensor.checks import argument_error, check_bool, check_type
from disttensor.fsdp.unseen import outside_user_modes
from disttensor.nn.names import list_names, match_names
from disttensor.pytree import replace_tensors

_WHO = "shard_data_parallel: mp_policy"
_EXPECTED = "a MixedPrecisionPolicy of torch.distributed.fsdp, or a dict {name of a module: policy}"


class Policy(NamedTuple):
    """param_dtype          of unsharded parameters; None: their own dtype.
    reduce_dtype         of sums between ranks; None: the dtype of the unsharded parameters.
    output_dtype         of floating results of the named modules; None: no cast.
    cast_forward_inputs  True if floating arguments are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


class Policies:
    """``named``: the modules with their own policy. ``of``: the policy of each module, taken from
    the nearest named module around it."""

    def __init__(self, root: nn.Module, given: Any, default: Policy) -> None:
        self.named = _named(root, given)
        if root in self.named and default != Policy():
            raise ValueError(
                f"{_WHO}: it names the whole module, and so do param_dtype and reduce_dtype: give "
                "the dtypes in the policy"
            )
        self.of: dict[nn.Module, Policy] = {}
        self._spread(root, "", default)
        dtypes: dict[Any, Any] = {}
        for name, module in root.named_modules():
            for key, p in module._parameters.items():
                have = self.of[module][:2]
                if p is not None and dtypes.setdefault(p, have) != have:
                    raise ValueError(
                        f"{_WHO}: {name}.{key} is tied, and its modules have two policies: give "
                        "them one"
                    )

    def _spread(self, module: nn.Module, name: str, around: Policy) -> None:
        policy = self.named.get(module, around)
        if self.of.setdefault(module, policy) != policy:
            raise ValueError(
                f"{_WHO}: the module {name!r} has several places, and two policies: name it itself"
            )
        for key, child in module.named_children():
            self._spread(child, f"{name}.{key}" if name else key, policy)

    def add_hooks(self, modules: Iterable[nn.Module]) -> None:
        """Casts arguments of these and of the named modules, and results of the named modules."""
        for module in dict.fromkeys([*modules, *self.named]):
            policy = self.of[module]
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                hook = _CastInputs(policy.param_dtype)
                module.register_forward_pre_hook(hook, with_kwargs=True)
            if module in self.named and policy.output_dtype is not None:
                module.register_forward_hook(_CastOutput(policy.output_dtype))


def _named(root: nn.Module, given: Any) -> dict[nn.Module, Policy]:
    """Maps modules to policies. Exact names go before patterns; then the first entry counts."""
    if given is None:
        return {}
    entries = dict(given) if isinstance(given, Mapping) else {"": given}
    modules = dict(root.named_modules(remove_duplicate=False))
    named: dict[nn.Module, Policy] = {}
    for pattern in sorted(entries, key=lambda name: name not in modules):
        check_type(f"{_WHO}: a name", pattern, str, "a name of a module, or a glob,")
        policy = _checked(entries[pattern], pattern)
        found = match_names(pattern, modules)
        if not found:
            raise ValueError(
                f"{_WHO}: {pattern!r} matches no module of {type(root).__name__}; there are "
                f"{list_names(pattern, [name for name in modules if name])}"
            )
        for name in found:
            named.setdefault(modules[name], policy)
    return named


def _checked(given: Any, pattern: str) -> Policy:
    who = f"{_WHO}[{pattern!r}]" if pattern else _WHO
    if not all(hasattr(given, field) for field in Policy._fields):
        raise argument_error(who, given, _EXPECTED)
    policy = Policy(*(getattr(given, field) for field in Policy._fields))
    check_dtypes(who, **dict(zip(Policy._fields[:3], policy[:3], strict=True)))
    check_bool(f"{who}: cast_forward_inputs", policy.cast_forward_inputs)
    for name in getattr(given, "__dataclass_fields__", ()):
        if name not in Policy._fields and getattr(given, name) is not None:
            raise ValueError(
                f"{who}: {name} is not supported: give the modules of such parameters a policy of "
                "their own by name"
            )
    return policy


def check_dtypes(who: str, **dtypes: Any) -> None:
    """Raises TypeError or ValueError unless each value is None or a floating dtype."""
    for name, dtype in dtypes.items():
        known = isinstance(dtype, torch.dtype)
        if dtype is not None and not (known and dtype.is_floating_point):
            kind = ValueError if known else TypeError
            raise argument_error(f"{who}: {name}", dtype, "a floating dtype of torch", kind)


class _Cast:
    harmless = True  # a module with this hook can be skipped: its results do not depend on the call

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @outside_user_modes
    def cast(self, value: Any) -> Any:
        return replace_tensors(value, lambda x: x.to(self.dtype) if x.is_floating_point() else x)


class _CastInputs(_Cast):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.cast((args, kwargs))


class _CastOutput(_Cast):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.cast(output)
