"""The result of a reshard that is under way: it is waited for where it is first read.

``dt.reshard`` within a mesh begins its collective, and gives an ``Awaited``: a DistTensor whose
slot ``local`` is empty. Metadata is there, autograd's graph is made around the memory that the
collective fills, and the program goes on. Whoever reads the local comes to ``__getattr__``, which
waits, and makes a DistTensor of it for good: on all others nothing is looked up but what is there.

Whether a reshard begins or is waited for at once follows from the specs, so all ranks begin the
same collectives in the order of the program; where each of them waits makes no difference to the
others. What is sent is a copy, or memory that nobody else has: the source may be written to at
once.

A class of its own and no ``__getattr__`` of DistTensor: with one, Python 3.11 looks up each
attribute of each DistTensor the long way.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any, Self

import torch

from disttensor.autograd.grad_types import Typed, move
from disttensor.comm.work import Work
from disttensor.core.spec import DistSpec
from disttensor.tensor.base import MeshTensor, through
from disttensor.tensor.dist_tensor import DistTensor, wrap
from disttensor.tensor.in_place import InPlace
from disttensor.tensor.reshard import resharded, set_result_of
from disttensor.torch_private import make_subclass
from reshard import planner

Tensor = torch.Tensor


class Arrival:
    """The local that ``work`` fills. What is dropped unread is waited for, too: memory that is
    written to must not be given to somebody else."""

    __slots__ = ("inference", "local", "lock", "work")

    def __init__(self, work: Work[Tensor], local: Tensor) -> None:
        self.work: Work[Tensor] | None = work
        self.local = local
        self.inference = torch.is_inference_mode_enabled()
        self.lock = threading.RLock()

    def wait(self) -> Tensor:
        """What ends the work runs as if it ran where it began."""
        if self.work is not None:
            with torch.inference_mode(self.inference), torch.no_grad():
                self.work.wait()
            self.work = None
        return self.local

    def __del__(self) -> None:
        if self.work is not None:
            with contextlib.suppress(Exception):  # nobody asks for the result
                self.wait()


def _known(name: str) -> Any:
    """An attribute of the local that needs no value."""

    def get(x: Any) -> Any:
        arrival = x.__dict__.get("_arrival")
        return getattr(x.local if arrival is None else arrival.local, name)

    return get


class Awaited(DistTensor):
    """A DistTensor that has not been read yet. To read it, by any way, makes it one."""

    __slots__ = ()

    device = property(_known("device"))
    grad_fn = property(_known("grad_fn"))
    is_leaf = property(_known("is_leaf"))
    requires_grad = property(_known("requires_grad"), InPlace.requires_grad.fset)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name != "local":
            if name in ("mesh", "device_mesh"):  # the error of a DistTensor
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


# What begins a reshard in the background; None: it is waited for at once. A name to be tapped.
beginning = partial(planner.background, apart=True)


def started(x: DistTensor, dst: DistSpec) -> DistTensor:
    """``x`` in the layout ``dst``, in memory of its own; where that is one collective of its mesh,
    and worth it, it begins here, and is waited for where the result is read."""
    src = x.spec
    same = src is not dst and src.mesh is dst.mesh and x.is_initialized
    begin = beginning(src, dst) if same else None
    if begin is None:
        return resharded(x, dst, fresh=True)
    local = x.local
    in_graph = local.requires_grad and torch.is_grad_enabled()
    read = through(x, dst, ()) if in_graph else ()
    source = x.local_for(read) if in_graph else local
    with torch.no_grad():
        work = begin(source.detach() if in_graph else source)
    into = work.wait() if work.into is None else work.into
    moved = move(source, Typed(src, read), Typed(dst), [into], own=True) if in_graph else into
    if work.into is None:
        out = wrap(moved, dst)
    else:
        out = make_subclass(Awaited, dst.meta_tensor)
        out._arrival = Arrival(work, moved)
        out.spec = dst
    if in_graph:
        set_result_of(out, x, moved)
    return out
