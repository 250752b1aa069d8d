"""What a person does on one rank alone: acts that need no communication, each on one tensor.

An act may raise: its error is caught, as a person's script catches it. Acts that last (a profiler,
a mode, hooks) end with the ``ExitStack`` that they get.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import random
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import disttensor as dt
from disttensor import DistTensor, ProcessMesh
from disttensor.tensor.uses import derivation_of

Act = Callable[["Scene", Any], object]
ACTS: dict[str, Act] = {}
HOOKS = ("hook", "changed by no hook", "post hook", "removed hook", "multi hook", "retain_grad")


@dataclass
class Scene:
    """``own``: a tensor on a mesh of this rank alone; ``lasting``: ends what acts began; ``seen``
    keeps what a person keeps."""

    own: Any
    lasting: ExitStack = field(default_factory=ExitStack)
    seen: list[Any] = field(default_factory=list)

    def write(self, *values: Any) -> None:
        self.seen.append(" ".join(map(str, values)))

    def do(self, name: str, x: Any) -> None:
        """Runs an act on x; its output goes nowhere, its error is caught."""
        compared = isinstance(x, DistTensor) and (x.is_leaf or derivation_of(x) is not None)
        if compared and name in HOOKS:
            return  # a hook of one rank alone raises an error on all
        with redirect_stdout(io.StringIO()):
            try:
                ACTS[name](self, x)
            except Exception as error:
                self.seen.append(repr(error))


def own_tensor(rank: int, world: int) -> Any:
    """Returns a tensor on the mesh of this rank alone; collective."""
    meshes = [ProcessMesh([r], ("own",)) for r in range(world)]
    return [dt.ones(4, mesh=mesh, placements=[dt.Replicate()]) for mesh in meshes][rank]


def act(name: str) -> Callable[[Act], Act]:
    def register(f: Act) -> Act:
        ACTS[name] = f
        return f

    return register


def is_whole(x: Any) -> bool:
    """Returns True if reading the value of x needs no communication."""
    return not isinstance(x, DistTensor) or all(isinstance(p, dt.Replicate) for p in x.placements)


# Reading ------------------------------------------------------------------------------------------

act("print")(lambda scene, x: print(x, repr(x), str(x)))
act("log")(lambda scene, x: logging.getLogger("one_rank").critical("%s %r", x.shape, x) or None)
act("to_local")(lambda scene, x: scene.seen.append(x.to_local()))
act("local number")(lambda scene, x: x.to_local().detach().norm().item())
act("local array")(lambda scene, x: scene.seen.append(x.to_local().detach().numpy()))
act("data")(lambda scene, x: print(x.data))
act("data kept")(lambda scene, x: scene.seen.append(x.data))
act("detach")(lambda scene, x: scene.seen.append(x.detach()))
act("grad")(lambda scene, x: print(x.grad))
act("grad kept")(lambda scene, x: scene.seen.append(x.grad))
act("grad_fn")(lambda scene, x: print(x.grad_fn, x.grad_fn.next_functions, x.is_leaf))
act("copy")(lambda scene, x: scene.seen.append(copy.deepcopy(x.detach())))
act("shallow copy")(lambda scene, x: scene.seen.append(copy.copy(x)))
act("stride")(lambda scene, x: (x.stride(), x.is_contiguous(), x.storage_offset(), x.dim()))
act("memory")(lambda scene, x: (x.data_ptr(), x.untyped_storage(), x.nbytes, x._version))
act("hash")(lambda scene, x: {x: id(x), len(x): x.numel()})
act("weak")(lambda scene, x: scene.seen.append(weakref.ref(x)))
act("attribute")(lambda scene, x: setattr(x, "note", "seen"))
act("keep")(lambda scene, x: scene.seen.append(x))
act("drop")(lambda scene, x: scene.seen.clear())
act("info")(lambda scene, x: print(dt.debugging.info()))
act("explain")(lambda scene, x: print(dt.debugging.explain(torch.sum, x)))


@act("pickle")
def _(scene: Scene, x: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.PieceWarning)
        pickle.loads(pickle.dumps(x))
        torch.save(x.detach(), io.BytesIO())


@act("whole value")
def _(scene: Scene, x: Any) -> None:
    if is_whole(x):
        print(np.asarray(x.detach()), x.detach().tolist(), x.detach().abs().max().item())


@act("calls on a whole value")
def _(scene: Scene, x: Any) -> None:
    if is_whole(x):
        with torch.no_grad():
            scene.seen.append((x * 2).t().contiguous().sum(0))


@act("debugger")
def _(scene: Scene, x: Any) -> None:
    """Reads every attribute, as a debugger that shows a variable does."""
    for name in dir(x):
        try:
            getattr(x, name)
        except Exception as error:
            scene.seen.append(repr(error))


# Beside the program -------------------------------------------------------------------------------

act("collect")(lambda scene, x: gc.collect())
act("sleep")(lambda scene, x: time.sleep(0.002))
act("random")(
    lambda scene, x: (torch.rand(3), torch.randperm(4), random.random(), np.random.rand())
)
act("own")(lambda scene, x: scene.own.add_(1.0))
act("own data")(lambda scene, x: scene.own.data.mul_(0.5))
act("own inference")(lambda scene, x: torch.inference_mode()(lambda: (scene.own * 2).add_(1))())
act("regular tensors")(lambda scene, x: (torch.ones(3, requires_grad=True) * 2).sum().backward())


@act("own training")
def _(scene: Scene, x: Any) -> None:
    w = scene.own.clone().requires_grad_()
    for fused in (False, True):
        (w * 2).sum().backward()
        torch.optim.SGD([w], 0.1, fused=fused).step()


@act("exception")
def _(scene: Scene, x: Any) -> None:
    """Raises before anything is computed, with x in the traceback that is kept."""
    try:
        x.no_such_attribute  # noqa: B018
    except AttributeError as error:
        scene.seen.append(error)
    torch.matmul(x, torch.ones(17, 19))


@act("interrupted")
def _(scene: Scene, x: Any) -> None:
    with torch.no_grad():
        raise RuntimeError("a person's own error")


# Lasting ------------------------------------------------------------------------------------------


@act("profiler")
def _(scene: Scene, x: Any) -> None:
    scene.lasting.enter_context(torch.autograd.profiler.profile())


@act("records")
def _(scene: Scene, x: Any) -> None:
    scene.lasting.enter_context(dt.debugging.record_comms())


@act("anomaly")
def _(scene: Scene, x: Any) -> None:
    scene.lasting.enter_context(torch.autograd.detect_anomaly(check_nan=False))


@act("saved tensors")
def _(scene: Scene, x: Any) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks
    scene.lasting.enter_context(hooks(lambda t: (t.shape, t)[1], lambda t: t))


@act("function mode")
def _(scene: Scene, x: Any) -> None:
    class Watch(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            scene.seen.append(str(f))
            return f(*args, **(kwargs or {}))

    scene.lasting.enter_context(Watch())


@act("dispatch mode")
def _(scene: Scene, x: Any) -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            scene.seen.append(str(f))
            return f(*args, **(kwargs or {}))

    scene.lasting.enter_context(Watch())


# Hooks that change nothing ------------------------------------------------------------------------

act("hook")(lambda scene, x: x.register_hook(lambda g: scene.write(g)))
act("changed by no hook")(lambda scene, x: x.register_hook(lambda g: g))
act("post hook")(
    lambda scene, x: x.register_post_accumulate_grad_hook(lambda p: scene.write(p.grad))
)
act("retain_grad")(lambda scene, x: x.retain_grad() if x.requires_grad else None)
act("node hook")(lambda scene, x: x.grad_fn.register_hook(lambda *grads: scene.write(*grads)))
act("node prehook")(lambda scene, x: x.grad_fn.register_prehook(lambda grads: None))


@act("multi hook")
def _(scene: Scene, x: Any) -> None:
    if not x.is_leaf:  # torch refuses it in torch.autograd.grad
        torch.autograd.graph.register_multi_grad_hook([x], lambda grads: scene.write(grads))


@act("removed hook")
def _(scene: Scene, x: Any) -> None:
    x.register_hook(lambda g: None).remove()
