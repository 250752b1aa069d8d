"""Warns once about weights whose gradients a schedule could not defer, with the reasons."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from disttensor.autograd.split_backward import UnsplitWeights
from disttensor.errors import warn_once
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.uses import leaves_of

MODELS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were split over stages
_SHOWN = 4  # weights of one reason that the warning names


def warn_unsplit(found: Iterable[UnsplitWeights], stage: int) -> None:
    """Warns that these gradients were computed in I, unless this warning was issued before."""
    by_reason: dict[str, list[torch.Tensor]] = {}
    for weights, why in found:
        by_reason.setdefault(why, []).extend(weights)

    def text() -> str:
        return (
            f"pipeline.run: stage {stage} could not defer the gradients of these weights, and "
            "computed them with the gradients of its inputs. The result is right, but the schedule "
            "has more idle time:\n"
            + "".join(f"  {_list(weights)}: {why}\n" for why, weights in by_reason.items())
            + 'The schedule "1f1b" loses nothing by this. This warning is given once'
        )

    warn_once((stage, *((why, *(w.shape for w in ws)) for why, ws in by_reason.items())), text)


def _list(weights: list[torch.Tensor]) -> str:
    names = sorted({_name_of(w) for w in weights})
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _name_of(leaf: torch.Tensor) -> str:
    """Returns the name of a leaf in the model that was split, else its shape."""
    for model in MODELS:
        for name, p in model.named_parameters():
            if isinstance(p, MeshTensor) and any(leaf is own for _, own in leaves_of(p)):
                return name
    return f"a weight of local shape {list(leaf.shape)}"
