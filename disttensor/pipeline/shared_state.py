"""The state of the process that the micro-batches of a run share, where they pause inside the step.

While one micro-batch is paused, another one runs. A step that changes torch's settings, or the
training flags, parameters or buffers of a model that was split, would change them for both. So at
each transfer of the program, and at its end, this state must be as it was before the run. A layer
may assign its own buffers: each visit reads and assigns them at once. All ranks run the same steps
and compare at the same places, so they raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn

from disttensor.errors import user_line
from disttensor.pipeline.unsplit import MODELS
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import FLAGS, FLAGS_OF_CUDA, order_of_sdp

_SETTINGS = {
    **FLAGS, **FLAGS_OF_CUDA, "sdp_priority_order": order_of_sdp,
    "default_dtype": torch.get_default_dtype,
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
}  # fmt: skip


class SharedState:
    """The state at creation. ``check(layers)`` raises RuntimeError if it differs, except for
    buffers of ``layers``, which have run since the last check."""

    def __init__(self) -> None:
        self._modules = list({id(m): m for model in MODELS for m in model.modules()}.values())
        self._settings = [get() for get in _SETTINGS.values()]
        self._training = [m.training for m in self._modules]
        self._before = [[dict(table) for table in _tables(m)] for m in self._modules]
        self._tensors = self._now()

    def _now(self) -> list[Any]:
        return [x for m in self._modules for table in _tables(m) for x in table.values()]

    def _is_unchanged(self, now: list[Any]) -> bool:
        return len(now) == len(self._tensors) and all(map(is_, now, self._tensors))

    def begin(self) -> None:
        """Takes the present buffers as unchanged: hooks of a backward may have assigned some."""
        if not self._is_unchanged(now := self._now()):
            self._changed_tensors(set(map(id, self._modules)))
            self._tensors = now

    def check(self, layers: Iterable[nn.Module], where: str = "") -> None:
        settings = zip(_SETTINGS.items(), self._settings, strict=True)
        changed = [
            f"torch's setting {name} to {now!r}"
            for (name, get), before in settings
            if (now := get()) != before
        ]
        if [m.training for m in self._modules] != self._training:
            changed += [
                f"`training` of {_name(m)} to {m.training}"
                for m, before in zip(self._modules, self._training, strict=True)
                if m.training is not before
            ]
        if not self._is_unchanged(now := self._now()):
            changed += self._changed_tensors({id(m) for layer in layers for m in layer.modules()})
            self._tensors = now
        if changed:
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise RuntimeError(
                f"pipeline.run: at {where or user_line()} the step has changed {changed[0]}{more}. "
                "In this schedule a micro-batch pauses inside the step, and other micro-batches, "
                "which run meanwhile, would use the changed value. Change it before pipeline.run, "
                'or use "1f1b" or "gpipe", which run the step of a micro-batch without pauses'
            )

    def _changed_tensors(self, own: set[int]) -> list[str]:
        """Returns changed parameters and buffers, and takes the present buffers of the modules
        ``own`` as unchanged."""
        changed: list[str] = []
        for m, tables in zip(self._modules, self._before, strict=True):
            if id(m) in own:
                tables[1].clear()
                tables[1].update(m._buffers)
            kinds = ("parameter", "buffer")
            for kind, before, now in zip(kinds, tables, _tables(m), strict=True):
                changed += [
                    f"the {kind} {key!r} of {_name(m)} to another tensor"
                    for key in {**before, **now}
                    if not _is_same(before.get(key), now.get(key))
                ]
        return changed

    def restore(self) -> None:
        """Restores training flags, parameters and buffers after an error."""
        for m, training, tables in zip(self._modules, self._training, self._before, strict=True):
            if m.training is not training:
                m.training = training
            for before, now in zip(tables, _tables(m), strict=True):
                for key in [key for key in now if key not in before]:
                    del now[key]
                for key, x in before.items():
                    if not _is_same(x, now.get(key)):
                        now[key] = x


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _is_same(before: Any, now: Any) -> bool:
    """Returns True if ``now`` is ``before``, or both are states of one sharded parameter."""
    if now is before:
        return True
    if not (isinstance(before, MeshTensor) and isinstance(now, MeshTensor)):
        return False
    slots = before._grad_slot, now._grad_slot
    return before._is_param and now._is_param and any(s and s.fixed_by for s in slots)


def _name(module: nn.Module) -> str:
    for model in MODELS:
        for name, m in model.named_modules():
            if m is module:
                return repr(name) if name else f"the {type(m).__name__} that was split"
    return type(module).__name__
