"""``replay``: records the local program of a module or a function once for each kind of call.

The key of a call contains everything that the program may depend on: specs, ``requires_grad`` and
identity of tensors, constants among the arguments, training flags, the modes of torch, the policies
of this package. These are the same on all ranks, so all ranks decide alike. A replay sends the same
messages as the recorded run, in the same order, so a different decision would do no harm, either.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from disttensor.cache import Cache
from disttensor.checks import check_callable
from disttensor.comm import desync
from disttensor.comm.program import NOTED
from disttensor.dispatch import strict
from disttensor.meta.instance_forward import InstanceForward
from disttensor.meta.trace import ASSIGNS
from disttensor.observe import here, observers
from disttensor.pytree import Uncacheable, key_of_contents
from disttensor.replay import check
from disttensor.replay.record import Program, record
from disttensor.replay.surroundings import Surroundings
from disttensor.settings import snapshot
from disttensor.tensor.base import is_free_leaf
from disttensor.tensor.dist_tensor import TRACERS, DistTensor
from disttensor.torch_private import count_function_modes, current_backward

Tensor = torch.Tensor
Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

_MOST = 64  # most kinds of calls that are kept
_TRIALS = 16  # recordings allowed in addition to one for each replay
_logger = logging.getLogger("disttensor.replay")


def replay(target: F) -> F:
    """Returns ``target``, a module or a function of DistTensors, that runs its local program as
    straight-line code from the second call of a kind on.

    A module is returned itself, with its own ``forward``. Results, gradients, random numbers and
    communication are the same as in eager calls. A call that cannot be recorded runs eagerly;
    ``why()`` of the forward, or of the function, returns the reasons. All ranks must call
    ``replay`` alike.

    >>> model = dt.shard_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), mesh)
    >>> model = dt.replay(model)
    >>> for _ in range(3):
    ...     loss = model(dt.ones(2, 4, mesh=mesh)).sum()
    >>> model.forward.replays, model.forward.why()
    (2, [])
    """
    if isinstance(target, nn.Module):
        held = target.__dict__.get("forward")
        if held is None:
            Replay(target).put()
        elif not isinstance(held, InstanceForward):  # a Skip stays: it computes nothing
            raise ValueError(
                f"replay: the forward of this {type(target).__name__} was put on the instance; "
                "give a function that calls it: replay(lambda *args: module(*args))"
            )
        return target
    check_callable("replay: target", target, "a module, or a function of DistTensors")
    return target if isinstance(target, Replay) else Replay(target)  # type: ignore[return-value]


class Replay(InstanceForward):
    """The forward of a module, or a function, and its recorded programs. Copies and pickles of the
    module contain it without the programs.

    ``replays``: the number of calls that were replays. ``programs``: their texts.
    """

    def __init__(self, target: Any) -> None:
        self.__setstate__({"module": target})

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module: Any = state["module"]
        self.eager = self.class_forward if isinstance(self.module, nn.Module) else self.module
        self._cases: Cache[Any, Any] = Cache(_MOST)  # key -> Program, or the reason for having none
        self._compared: set[Any] = set()
        self._around: Surroundings | None = None
        self._assigned = self._trials = self.replays = 0
        self._why: dict[str, None] = {}
        self._never = ""

    @property
    def __signature__(self) -> inspect.Signature:
        whole = isinstance(self.module, nn.Module)
        return super().__signature__ if whole else inspect.signature(self.module)

    def why(self) -> list[str]:
        """Returns the reasons why calls were not recorded, as text."""
        return list(self._why)

    @property
    def programs(self) -> list[str]:
        return [case.text for case in self._cases.values() if type(case) is not str]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._never or count_function_modes() or strict.strict.current() or TRACERS.names:
            return self.eager(*args, **kwargs)
        if observers and any(o.sees_modules for o in here()):
            return self.eager(*args, **kwargs)
        around = self._around
        if around is None or not around.unchanged():
            around = self._look()
        if around is None or around.why:
            return self.eager(*args, **kwargs)
        try:
            key, inputs = self._key(around, args, kwargs)
        except Uncacheable as why:
            self._tell(str(why))
            return self.eager(*args, **kwargs)
        case = self._cases.get(key)
        if case is None:
            return self._record(around, key, inputs, args, kwargs)
        if type(case) is str:
            return self.eager(*args, **kwargs)
        run, _, calls, cut, _ = case
        if cut and any(is_free_leaf(x) is not free for x, free in cut):
            return self._record(around, key, inputs, args, kwargs)
        self.replays += 1
        if desync.enabled and key not in self._compared:
            self._compared.add(key)
            return self._check(around, case, inputs, args, kwargs)
        if calls:
            NOTED.extend(calls)
        return run(*inputs)

    def _tell(self, why: str) -> None:
        if why and why not in self._why:
            self._why[why] = None
            _logger.warning("replay of %s: calls run one by one: %s", self._name(), why)

    def _name(self) -> str:
        found = type(self.module) if isinstance(self.module, nn.Module) else self.module
        return getattr(found, "__qualname__", repr(found))

    def _look(self) -> Surroundings | None:
        """Finds the values that the forward reads again, or returns None to stop recording."""
        if not self._may_try():
            return None
        self._cases.clear()
        self._around = around = Surroundings(self.module)
        self._tell(around.why)
        return around

    def _may_try(self) -> bool:
        self._trials += 1
        if self._trials > _TRIALS + self.replays:
            self._never = "it changes too often"
            self._tell(self._never)
        return not self._never

    def _record(
        self, around: Surroundings, key: Any, inputs: Sequence[Any], args: Any, kwargs: Any
    ) -> Any:
        if current_backward() != -1:  # a recomputed region
            return self.eager(*args, **kwargs)
        why = _unfit((*inputs, *around.tensors))
        if why or not self._may_try():
            self._cases[key] = why
            self._tell(why)
            return self.eager(*args, **kwargs)
        marks, given = around.marks(), _contents((args, kwargs))
        result, case = self._run_and_record(around, inputs, args, kwargs)
        if around.marks() != marks:
            case = ASSIGNS
            self._assigned += 1
            if self._assigned > 2:  # the first call may fill caches of later ones
                self._never = ASSIGNS
        elif not around.unchanged():
            case = "it changes what it reads"
        elif _contents((args, kwargs)) != given:
            case = "it changes lists or dicts among its arguments"
        if type(case) is str:
            self._tell(case)
            if not case or (case == ASSIGNS and not self._never):
                return result
        self._cases[key] = case
        return result

    def _run_and_record(
        self, around: Surroundings, inputs: Sequence[Any], args: Any, kwargs: Any
    ) -> tuple[Any, Program | str]:
        parameters = [f"x{i}" for i in range(len(inputs))]
        sources = dict(zip(parameters, inputs, strict=True))
        sources |= {f"p{i}": t for i, t in enumerate(around.tensors)}
        return record(lambda: self.eager(*args, **kwargs), sources, parameters, _device(inputs))

    def _check(
        self, around: Surroundings, case: Program, inputs: Sequence[Any], args: Any, kwargs: Any
    ) -> Any:
        """Compares the first replay under ``dt.debug`` with eager calls."""
        sources = {f"x{i}": x for i, x in enumerate(inputs)}
        sources |= {f"p{i}": t for i, t in enumerate(around.tensors)}
        return check.beside_eager(
            self._name(), case, inputs, [sources[name] for name in case.written],
            lambda: self._run_and_record(around, inputs, args, kwargs),
        )  # fmt: skip

    def _key(self, around: Surroundings, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """Returns the key of a call, and the tensors among the arguments, each once."""
        inputs: list[Any] = []
        parts: list[Any] = [len(args)]
        for x in args:
            if type(x) is DistTensor and x._view_state is None:  # mostly
                inputs.append(x)
                parts += (x.spec, *_flags(x))
            else:
                parts.append(_part(x, inputs))
        if kwargs:
            parts.append(_part(kwargs, inputs))
        if len(inputs) > 1:
            ids = [id(x) for x in inputs]
            if len(set(ids)) < len(ids):
                parts.append(tuple([ids.index(i) for i in ids]))
                inputs = [x for i, x in enumerate(inputs) if ids.index(id(x)) == i]
        for x in inputs:
            if id(x) in around.ids:
                raise Uncacheable("an argument is one of its own tensors")
        parts += (around.state(), around.flags(), snapshot(_device(inputs)))
        return tuple(parts), inputs


def _device(inputs: Sequence[Any]) -> str:
    return str(inputs[0].device.type) if inputs else "cpu"


def _flags(x: DistTensor) -> tuple[Any, ...]:
    """Returns properties of an argument, other than its spec, that a program may depend on."""
    local = x.local
    if local.requires_grad:
        return (True, is_free_leaf(x), local.stride()) if local.is_leaf else (True, local.stride())
    return False, local.is_inference(), local.stride(), None


def _part(value: Any, inputs: list[Any]) -> Any:
    def key(x: Any) -> Any:
        kind, is_ours = type(x), isinstance(x, DistTensor)
        if is_ours and x._view_state is not None:
            raise Uncacheable("an argument shares memory in a way that is looked at in each call")
        if not is_ours and kind not in (Tensor, nn.Parameter):
            raise Uncacheable(f"an argument is a {kind.__name__}")
        inputs.append(x)
        if is_ours:
            return x.spec, *_flags(x)
        return kind, x.shape, x.dtype, x.device, x.requires_grad, x.is_leaf, x.stride()

    return key_of_contents(value, key)


def _contents(value: Any) -> Any:
    """Returns the contents of lists, tuples and dicts, by identity."""
    if type(value) is list or type(value) is tuple:
        return [_contents(v) for v in value]
    if type(value) is dict:
        return [*value, *map(_contents, value.values())]
    return id(value)


def _unfit(tensors: Sequence[Any]) -> str:
    """Returns the reason why calls of these tensors are not recorded, or ""."""
    dist = [t for t in tensors if type(t) is DistTensor]
    if not all(t.is_initialized for t in dist):
        return "this rank is outside the mesh, where nothing is computed"
    if any(t.spec.layout.partial for t in dist):
        return "it reads a pending sum from outside, which may have been reduced before"
    if any(t.spec.layout.own for t in dist):
        return "a placement of a type of the user's"
    if len({id(getattr(t, "local", t)) for t in tensors}) < len(tensors):
        return "two of its tensors are one local"
    if any(type(t) not in (DistTensor, Tensor, nn.Parameter) for t in tensors):
        return "it reads a tensor of another class"
    return ""
