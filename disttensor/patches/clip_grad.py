"""torch.nn.utils' clipping where DistTensors are among the parameters."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from disttensor.comm.process_group import world
from disttensor.optim import clip_grad
from disttensor.optim.step_hooks import check_fresh
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.tensor.reshard import resharded

Tensor = torch.Tensor
Function = Callable[..., Any]


def wrap_clip_grad_norm(original: Function) -> Function:
    """Wraps ``clip_grad_norm_``: parameters on other ranks have no gradient on this rank, and torch
    would compute the norm of this rank's gradients only."""

    @wraps(original)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            params = [parameters]
        elif isinstance(parameters, types.GeneratorType):
            params = list(parameters)
            parameters = params or (p for p in params)  # torch warns of a generator of nothing
        else:
            params = parameters = list(parameters)
        for p in params:
            if isinstance(p, DistTensor):
                return clip_grad.clip_grad_norm_(params, *args, **kwargs)
        check_fresh(params, "clip_grad_norm_")
        return original(parameters, *args, **kwargs)

    return clip_grad_norm_


def wrap_get_total_norm(original: Function) -> Function:
    """Wraps ``get_total_norm``: all ranks need the norm, also ranks outside the tensors' mesh."""

    @wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for t in tensors:
            if isinstance(t, DistTensor) and not clip_grad.all_ranks_in([t.spec.mesh]):
                raise RuntimeError(
                    f"get_total_norm: a tensor on {t.spec.mesh!r}, which is not the whole world of "
                    f"{world()[1]} ranks: the norm would be that of one mesh, and "
                    "unknown elsewhere. Give the parameters to dt.clip_grad_norm_(params, "
                    "max_norm) or torch.nn.utils.clip_grad_norm_ (looked up after disttensor was "
                    "imported), which put all meshes together"
                )
        return original([_on_root(t) for t in tensors], *args, **kwargs)

    return get_total_norm


def _on_root(t: Any) -> Any:
    """Reshards tensors of sub-meshes to the root mesh, without communication."""
    if not isinstance(t, DistTensor) or t.spec.on_root() is t.spec:
        return t
    return resharded(t.detach(), t.spec.on_root())


def wrap_clip_grad_value(original: Function) -> Function:
    """Wraps ``clip_grad_value_``: torch raises an error if no parameter has a gradient, as on a
    rank whose parameters all lie on other ranks."""

    @wraps(original)
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        elsewhere = False
        for p in params:
            if p.grad is not None:
                return original(params, *args, **kwargs)
            elsewhere = elsewhere or isinstance(p, DistTensor)
        return None if elsewhere else original(params, *args, **kwargs)

    return clip_grad_value_
