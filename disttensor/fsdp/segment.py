"""A segment: parameters that are gathered together, in one collective, before they are used, and
freed after.

    sharded --start--> arriving --gather--> whole --free--> sharded

While a segment is *shown*, the modules hold the twins; else the shards. The memory of the twins
keeps its address between two gathers, as far as autograd is concerned: what a forward saved is
valid again in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from disttensor.comm import collectives
from disttensor.fsdp.bucket import Rows
from disttensor.fsdp.param import Twin
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import set_versions, storage_id
from disttensor.tree import flat

Tensor = torch.Tensor


class Buffer:
    """The twins of one dtype (and one group of ranks) in one memory."""

    def __init__(
        self, twins: Sequence[Twin], dtype: torch.dtype, group: collectives.Group | None
    ) -> None:
        self.twins, self.group = twins, group
        self.rows = Rows([t.spec.local_shape for t in twins], group.size if group else 1)
        device = twins[0].spec.mesh.device
        self.memory = torch.empty(self.rows.n * self.rows.total, dtype=dtype, device=device)
        self.blocks = self.rows.blocks(self.memory)
        for twin, whole in zip(twins, self.rows.wholes(self.memory), strict=True):
            twin.be(whole)
        self.nbytes = self.memory.untyped_storage().nbytes()
        self.whole = False
        self._arriving: tuple[collectives.Pending, Tensor, Any] | None = None
        self._of: Any = None  # what the memory held last
        self._version = 1  # of the memory while it is whole
        self.free()

    def fresh(self) -> bool:
        """Is what the memory holds (or held last) the present value of the parameters?"""
        return self._of == self._now()

    def _now(self) -> list[Any]:
        # Every in-place function counts up the version, on a rank with an empty piece too: all
        # ranks agree.
        return [v for t in self.twins for v in (t.held.local._version, *t.writes())]

    def start(self) -> None:
        """Begin to gather."""
        if self._arriving is None and not self.whole:
            row = self.rows.joined([t.held.local.detach() for t in self.twins], self.memory.dtype)
            if self.group is None:
                self._arriving = collectives.OVER, row, self._now()
            else:
                out = row.new_empty(self.rows.n * self.rows.total)
                self._arriving = (
                    collectives.start_all_gather(row, out, self.group),
                    out,
                    self._now(),
                )

    def finish(self) -> None:
        if self.whole:
            return
        self.start()
        out, of = self._arrived()
        if of != self._now():  # begun before an optimizer's step: what came is history
            self.start()
            out, of = self._arrived()
        same = self.fresh()
        self.memory.untyped_storage().resize_(self.nbytes)
        with torch.no_grad():
            self.rows.unpack(out.view(self.rows.n, -1), self.blocks)
        # Refilled with the same values, it is what autograd saved; else autograd shall see that it
        # was written to.
        self._version += not same
        self._be_version(self._version)
        self.whole, self._of = True, of

    def _arrived(self) -> tuple[Tensor, Any]:
        assert self._arriving is not None
        (pending, out, of), self._arriving = self._arriving, None
        pending.wait()
        return out, of

    def free(self) -> None:
        if self._arriving is not None:
            self._arrived()
        self.memory.untyped_storage().resize_(0)
        self._be_version(0)  # a node that would read it now raises: there is nothing to read
        self.whole = False

    def written(self) -> bool:
        """Did somebody write to the twins?"""
        return self.whole and self.memory._version != self._version

    def _be_version(self, version: int) -> None:
        set_versions((self.memory,), (version,))


class Segment:
    """The parameters of some modules.

    modules   those whose forward uses them; persist: the twins stay until the parameters change (stages 1 and 2)
    """

    def __init__(
        self, name: str, modules: Sequence[nn.Module], twins: Sequence[Twin], *, persist: bool,
        free_after_forward: bool,
    ) -> None:  # fmt: skip
        self.name, self.modules, self.twins = name, tuple(modules), tuple(twins)
        self.persist, self.free_after_forward = persist, free_after_forward
        self.apart = [t for t in twins if t.spec is not t.held.spec]
        self.buffers: list[Buffer] = []
        self.shown = False
        kinds: dict[Any, list[Twin]] = {}
        for twin in self.apart:
            kinds.setdefault((twin.spec.dtype, twin.axis), []).append(twin)
        for (dtype, axis), members in kinds.items():
            mesh = members[0].spec.mesh
            group = None if axis is None else mesh.group((axis,), "gather")
            self.buffers.append(Buffer(members, dtype, group))
        self.tables: dict[
            nn.Module, list[dict[str, Any]]
        ] = {}  # for each module, its attributes and those of modules inside
        self.position = 0  # in the order in which forwards begin
        self.epoch = -1  # the forward of the root in which it has its position
        self.running = 0  # forwards of its modules that are on the stack
        self.ran: set[nn.Module] = set()
        self.passing: Any = None  # the pass that is being made: see graph_hooks.py
        self.made: list[Any] = []  # passes of this epoch
        self.leaves: list[str] = []  # of the twins' leaves, the parameter
        self.expected: frozenset[int] = frozenset()  # leaves that the last backward reached,
        self.ever: set[int] = set()  # and those that any has

    @property
    def whole(self) -> bool:
        return all(b.whole for b in self.buffers)

    @property
    def comes_and_goes(self) -> bool:
        """Are the twins freed between uses?"""
        return bool(self.buffers) and not self.persist

    @property
    def busy(self) -> bool:
        """Is a forward of it on the stack, or between two of its modules?"""
        return bool(self.running) or self.passing is not None

    def start(self) -> None:
        """Begin to gather, where that is needed."""
        self._outdate()
        for buffer in self.buffers:
            buffer.start()

    def gather(self) -> None:
        """The twins have their values when this returns."""
        self._outdate()
        for buffer in self.buffers:
            buffer.start()
        for buffer in self.buffers:
            buffer.finish()

    def _outdate(self) -> None:
        """What is kept for long may have been written to since."""
        for buffer in self.buffers:
            if buffer.whole and not self.shown and not buffer.fresh():
                buffer.whole = False

    def kept(self, module: nn.Module) -> list[Tensor]:
        """What one of its modules keeps as attributes: a second loss, for example."""
        found: list[Tensor] = []
        for table in self.tables.get(module, ()):
            for value in table.values():
                kind = type(value)
                if kind is DistTensor:
                    found.append(value)
                elif (kind is list or kind is tuple) and value and type(value[-1]) is DistTensor:
                    flat(value, found)
        return found

    def lends(self, x: Tensor) -> bool:
        """Is x a twin, or a view of one? Its memory is about to be freed."""
        if self.persist or type(x) is not DistTensor:
            return False
        at = storage_id(x.local.untyped_storage())
        return any(storage_id(b.memory.untyped_storage()) == at for b in self.buffers)

    def show(self) -> None:
        """The modules hold the twins."""
        if not self.shown:
            self.shown = True
            for twin in self.apart:
                twin.follow()
                twin.swap(twin.held, twin.whole)

    def hide(self) -> None:
        """The modules hold the shards."""
        if self.shown:
            self.shown = False
            for twin in self.apart:
                twin.swap(twin.whole, twin.held)

    def free(self) -> None:
        """The shards are what is left; of a persistent segment, everything."""
        self.hide()
        if not self.persist:
            for buffer in self.buffers:
                buffer.free()
