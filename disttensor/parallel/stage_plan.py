"""A plan whose placements are dicts by axis, as {"tp": Shard(0)}, on the mesh of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from disttensor.core.placement import Replicate
from disttensor.experts.expert_plan import expert_tensors
from disttensor.nn.names import close_to, covers
from disttensor.parallel.degrees import STAGE_AXES


def stage_plan(plan: Any, model: nn.Module) -> Any:
    """Returns the plan with placements by axis converted to lists."""
    if not isinstance(plan, Mapping):
        return plan
    modules = {name for name, _ in model.named_modules()}
    dense = {name for name, _ in model.named_parameters()} - expert_tensors(model).keys()
    out = {}
    for pattern, places in plan.items():
        if isinstance(places, Mapping):
            for axis in places:
                if axis not in STAGE_AXES:
                    close = close_to(axis, STAGE_AXES)
                    why = f" (did you mean {close[0]!r}?)" if close else ""
                    if axis == "pp":
                        why = " (stages are made of whole layers)"
                    raise ValueError(
                        f"Strategy.apply: plan entry {pattern!r}: a stage has no axis {axis!r}; "
                        f"its axes are {', '.join(STAGE_AXES)}{why}"
                    )
            places = [places.get(axis, Replicate()) for axis in STAGE_AXES]
        if isinstance(places, Sequence) and len(places) == len(STAGE_AXES):
            over = places[STAGE_AXES.index("sharding")]
            if not isinstance(over, Replicate) and any(covers(pattern, x, modules) for x in dense):
                raise ValueError(
                    f"Strategy.apply: plan entry {pattern!r}: {over} over 'sharding': the strategy "
                    "itself splits parameters over that axis, all but experts. Name the other axes "
                    "only"
                )
        out[pattern] = places
    return out
