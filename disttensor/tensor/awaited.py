"""The result of a reshard whose collective still runs: the first read waits for it.

``dt.reshard`` within a mesh starts its collective and returns an ``Awaited``: a DistTensor whose
slot ``local`` is empty. Metadata is available, autograd's graph is built around the memory that the
collective fills, and the program continues. Reading ``local`` calls ``__getattr__``, which waits
and turns the object into a DistTensor. Other DistTensors pay nothing for this.

The specs decide whether a reshard runs in the background, so all ranks start the same collectives
in program order. Ranks may wait at different places. The collective sends a copy, or memory that
nothing else refers to, so the source may be written to at once.

This is a separate class because a ``__getattr__`` on DistTensor would slow down every attribute
access in Python 3.11.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Self

import torch

from disttensor import observe
from disttensor.autograd.grad_types import GradType, reshard_local
from disttensor.comm.work import Work
from disttensor.core.spec import DistSpec
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.in_place import InPlace
from disttensor.tensor.reshard import resharded
from disttensor.tensor.uses import set_derivation, varying_axes
from disttensor.torch_private import make_subclass
from reshard import planner

Tensor = torch.Tensor


class PendingLocal:
    """The local that ``work`` fills. Its destructor waits, too, so that memory that a collective
    still writes to is not reused."""

    __slots__ = ("inference", "local", "lock", "work")

    def __init__(self, work: Work[Tensor], local: Tensor) -> None:
        self.work: Work[Tensor] | None = work
        self.local = local
        self.inference = torch.is_inference_mode_enabled()
        self.lock = threading.RLock()

    def wait(self) -> Tensor:
        """Waits and returns the local. The work ends in the inference mode of its start."""
        if self.work is not None:
            with torch.inference_mode(self.inference), torch.no_grad():
                self.work.wait()
            self.work = None
        return self.local

    def __del__(self) -> None:
        if self.work is not None:
            with contextlib.suppress(Exception):  # the result is not used
                self.wait()


def _known(name: str) -> Any:
    """Returns a property getter for an attribute of the local that needs no value."""

    def get(x: Any) -> Any:
        arrival = x.__dict__.get("_arrival")
        return getattr(x.local if arrival is None else arrival.local, name)

    return get


class Awaited(DistTensor):
    """A DistTensor that has not been read yet. The first read turns it into a DistTensor."""

    __slots__ = ()

    device = property(_known("device"))
    grad_fn = property(_known("grad_fn"))
    is_leaf = property(_known("is_leaf"))
    requires_grad = property(_known("requires_grad"), InPlace.requires_grad.fset)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name != "local":
            if name == "mesh":  # the error of a DistTensor
                _ = self.local
                return getattr(self, name)
            raise AttributeError(f"'DistTensor' object has no attribute {name!r}")
        arrival = self.__dict__.get("_arrival")
        if arrival is not None:
            with arrival.lock:
                if "_arrival" in self.__dict__:
                    self.local = arrival.wait()
                    self.__class__ = DistTensor  # type: ignore[assignment]
                    del self.__dict__["_arrival"]
        return MeshTensor.__getattribute__(self, "local")

    def like(self, local: Tensor, spec: DistSpec) -> Self:
        return wrap(local, spec)  # type: ignore[return-value]


def start_reshard(x: DistTensor, dst: DistSpec) -> DistTensor:
    """Returns ``x`` in the layout ``dst``, in memory of its own. A reshard that is one collective,
    and large enough, starts here; the first read of the result waits for it."""
    src = x.spec
    same = src is not dst and src.mesh is dst.mesh and x.is_initialized
    may_start = same and not observe.seeing_calls()
    begin = planner.background(src, dst, copies=True) if may_start else None
    if begin is None:
        return resharded(x, dst, fresh=True)
    local = x.local
    in_graph = local.requires_grad and torch.is_grad_enabled()
    read = varying_axes(x, dst, ()) if in_graph else ()
    source = x.local_for(read) if in_graph else local
    with torch.no_grad():
        work = begin(source.detach() if in_graph else source)
    into = work.wait() if work.into is None else work.into
    moved = into
    if in_graph:
        moved = reshard_local(source, GradType(src, read), GradType(dst), [into], own=True)
    if work.into is None:
        out = wrap(moved, dst)
    else:
        out = make_subclass(Awaited, dst.meta_tensor)
        out._arrival = PendingLocal(work, moved)
        out.spec = dst
    if in_graph:
        set_derivation(out, moved, x)
    return out
