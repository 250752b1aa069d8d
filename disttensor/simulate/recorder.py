"""Records the computation, communication and memory of one rank, by a dispatch mode below the
engine."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from disttensor.errors import SimulationError, name_of, user_line
from disttensor.pytree import collect, substitute
from disttensor.simulate import shapes
from disttensor.simulate.events import Event, Op
from disttensor.simulate.fake_collectives import FakeCollectives
from disttensor.simulate.flop_formulas import flop_formula, is_cheap
from disttensor.simulate.kinds import DifferenceLog
from disttensor.simulate.layers import Layers
from disttensor.simulate.memory import Held, MemoryLog
from disttensor.simulate.rank_run import ActionRecorder, Entry
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import (
    DataDependentOutput,
    DynamicOutputShape,
    FakeTensor,
    TorchDispatchMode,
    current_backward,
    fakes,
    is_composite,
    no_dispatch,
)

Tensor = torch.Tensor
Values = float | Callable[[str], float]
_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READS = {_aten._local_scalar_dense.default, _aten.equal.default}
_PYTHON = {torch.bool: bool, torch.complex64: complex, torch.complex128: complex}


class _Facts(NamedTuple):
    """Facts of an operator: it consists of others; it writes to lists of tensors and has no result;
    see ``is_cheap``."""

    composite: bool
    writes_lists: bool
    cheap: bool


@cache
def _facts_of(func: Any) -> _Facts:
    schema = func._schema
    return _Facts(is_composite(func), schema.is_mutable and not schema.returns, is_cheap(func))


def _decomposes(func: Any) -> bool:
    """Returns True for an operator that consists of others, unless there is a formula for it."""
    return _facts_of(func).composite and flop_formula(func) is None


def _is_known(args: Any) -> bool:
    """Returns True if all tensors are single numbers with data."""
    return all(t.ndim == 0 and _data_of(t) is not None for t in collect(args, []))


def _data_of(t: Tensor) -> Tensor | None:
    return t.constant if isinstance(t, FakeTensor) else t


class StepRecorder(TorchDispatchMode):
    """Records this rank inside ``with recorder.running():``, from ``start()`` to ``stop()``. It
    works on tensors without data and with data.

    Args:
        values: the value that ``.item()``, ``bool()`` or ``.tolist()`` returns on a fake tensor: a
            number, or a function of the line that reads.
    """

    sees_engine = True  # see disttensor.fsdp.unseen

    def __init__(self, values: Values = 0.0) -> None:
        super().__init__()
        self.values = values
        self.mode = fakes()
        self.memory = MemoryLog()
        self.recording = self._collects = False
        self.actions = ActionRecorder(self.position, self._note)
        self._last = 0  # number of entries of the step
        self.comms = DifferenceLog(self._add)
        self.layers = Layers(self.position)
        self._optimizing = 0
        self._collectives = FakeCollectives(self._note, self.phase)
        self.updates: Counter[str] = Counter()  # of the step, by class of optimizer
        self.unknown: dict[str, str] = {}  # operators without a formula, and their first lines
        self.first: Any = None  # the first optimizer
        self.steps = 0  # updates of the first optimizer
        self.after_step: Callable[[], None] = lambda: None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: torch would add two calls to each ``__torch_dispatch__``."""
        return False

    # Begin and end --------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surrounds all of a rank's program, from before the model is made."""
        begin = register_optimizer_step_pre_hook(self._step_begins)
        end = register_optimizer_step_post_hook(self._step_ends)
        try:
            with (
                self.memory.resizing(), self.comms, self.actions, self.layers.following(),
                self,
            ):  # fmt: skip
                yield
        finally:
            self.stop()
            begin.remove()
            end.remove()

    def start(self) -> None:
        """Begins the recorded step. Python's garbage is collected now and not during the step,
        because the moment of an automatic collection, and so the memory, would be random."""
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        self.recording = True
        self.memory.begin_step()
        self.comms.unanswered = None
        self._collectives.count.clear()

    def stop(self) -> None:
        if self.recording:
            self._last, self.recording = len(self.log), False
            if self._collects:
                gc.enable()

    @property
    def log(self) -> list[Any]:
        """The entries of the step so far, see StepPart; changes of the memory without category."""
        return self.memory.log

    @property
    def events(self) -> list[Event]:
        return [e for e in self.log if isinstance(e, Event)]

    def position(self) -> int | None:
        """Returns the number of entries of the step, or None while nothing is recorded."""
        return len(self.log) if self.recording else None

    def has_forward(self) -> bool:
        return any(isinstance(e, Op) and e.phase == "forward" for e in self.log)

    def step(self) -> tuple[Held, list[Entry]]:
        """Returns the bytes by category when the step began, and its entries. Call it in the world
        of the rank."""
        for p in self.layers.parameters():
            self.memory.mark(_local(p), "parameters")
        return self.memory.step(self._last)

    def _note(self, event: Event) -> None:
        self.memory.clock += 1
        self._add(event)

    def _add(self, entry: Entry) -> None:
        if self.recording:
            self.log.append(entry)

    def phase(self) -> str:
        if self._optimizing:
            return "optimizer"
        backward = current_backward() != -1
        if backward != len(self.memory.backwards) % 2:
            self.memory.backwards.append(self.memory.clock)
        return "backward" if backward else "forward"

    # Optimizers -----------------------------------------------------------------------------------

    def _step_begins(self, *_: Any) -> None:
        self.phase()
        self._optimizing += 1

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        self._optimizing -= 1
        mark = self.memory.mark
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        self.comms.add_optimized(owned)
        for p in owned:
            for t, category in ((p, "parameters"), (p.grad, "gradients")):
                if t is not None:
                    mark(_local(t), category)
        for t in collect([list(state.values()) for state in optimizer.state.values()], []):
            mark(_local(t), "optimizer state")
        if self.recording:
            self.updates[type(optimizer).__name__] += 1
        self.first = self.first or optimizer
        if optimizer is self.first:
            self.steps += 1
            self.after_step()

    # Operators ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:  # the most frequent call
            return args[0].fake_device
        if fakes() is not self.mode or func.namespace == "prim":
            return func(*args, **kwargs)  # a call of the engine that only needs a shape
        if func.namespace == "c10d":  # no kernel
            data = self.mode is None
            return func(*args, **kwargs) if data else self._communicate(func, args, kwargs)
        if self.mode is not None and func in _READS:
            return self._read(func, args, kwargs)
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():  # such a view is no inference tensor
                return self.__torch_dispatch__(func, types, args, kwargs)
        if self.mode is not None and _facts_of(func).writes_lists and _is_known(args):
            with no_dispatch():  # the counters of steps, which the host keeps
                return func(*substitute(args, _data_of), **kwargs)
        if self.mode is not None and func.is_view and type(args[0]) is not FakeTensor:
            with no_dispatch():  # a view of a tensor with data has data, too
                return func(*args, **kwargs)
        if _decomposes(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        try:
            if self.mode is not None:
                out, cost = shapes.run(func, args, kwargs, self.mode)
            else:
                out = func(*args, **kwargs)
                cost = shapes.cost(func, args, kwargs, out)
        except (DynamicOutputShape, DataDependentOutput):
            raise SimulationError(
                f"the shape of the result of {name_of(func)} at {user_line()} depends on data, and "
                "a simulation has none. Use an operator with a known shape (a mask instead of "
                "masked_select, a capacity for each expert), or simulate without this part"
            ) from None
        self._record(func, cost, out)
        return out

    def _record(self, func: Any, cost: shapes.Cost, out: Any) -> None:
        phase = self.phase()
        if not cost.views:
            for t in [out] if isinstance(out, Tensor) else collect(out, []):
                self.memory.see(t, phase)
            if self.recording:
                name = func._overloadpacket.__name__
                layer, again = self.layers.layer_now() if cost.flops else ("", False)
                if not (cost.flops or flop_formula(func) or _facts_of(func).cheap):
                    self.unknown.setdefault(name, user_line())
                self._note(Op(
                    name, cost.flops, cost.nbytes, cost.dtype, phase, user_line(), layer,
                    cost.causal, again,
                ))  # fmt: skip
                return
        self.memory.clock += 1

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        new, self.comms.unanswered = self.comms.unanswered, None
        return self._collectives.answer(func, args, kwargs, new)

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        fake = [t for t in args if isinstance(t, FakeTensor)]
        if not fake:  # tensors with data
            with no_dispatch():
                return func(*args, **kwargs)
        if all(t.constant is not None for t in fake):
            return func(*args, **kwargs)
        value = self.values(user_line()) if callable(self.values) else self.values
        dtype = fake[0].dtype
        if func is _aten.equal.default:
            return bool(value)
        kind = _PYTHON.get(dtype, float if dtype.is_floating_point else int)
        return kind(value)


def _local(t: Tensor) -> Tensor:
    return t.local if isinstance(t, MeshTensor) else t
