"""Checks that a step keeps the contract of a CUDA graph, on any device.

A captured step is a list of kernels, with the addresses and the constants of its capture. So a step
may read no value on the host and create no process group, and every call has to run the same
operators, with the same constants, on memory at the same addresses. A StepWatch sees the operators
of one call on regular tensors, forward and backward, and compares them with the call before.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from threading import get_ident
from typing import Any, NamedTuple

import torch

from disttensor.comm import blocked_wait
from disttensor.errors import CaptureError, show_place, user_line
from disttensor.pytree import collect
from disttensor.random import counter
from disttensor.torch_private import StorageWeakRef, TorchDispatchMode, alive, creates, storage_id

Tensor = torch.Tensor
SHOWN = 8  # violations in one error
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))
_READS = "reads a value on the host; return the tensor, and read it after the step"
_SIZED = "has a size that depends on data, which is read on the host; use torch.where"
_LIFTED = "makes a tensor of a value on the host; make it before the step"
_COPIES = "copies between host and device; do so before or after the step"
_DRAWS = "draws by a seed that the host counts; a captured step would repeat its numbers"
_CREATES = "is created; create process groups before the step"
_MUST_REPEAT = (
    "a captured step repeats its operators and constants; a number that changes, as a learning "
    "rate, has to be a tensor"
)
_GRAD = "call zero_grad inside of the step, or outside of it zero_grad(set_to_none=False)"
MOVED = (
    "reads a tensor that was replaced since the last call; write into its memory (copy_), give it "
    "to the step as an argument, or make it inside of the step"
)


class OperatorCall(NamedTuple):
    """An operator that ran: its name, shapes and constants; the user's line; and of the tensors
    that exist outside of the step, the addresses by position among the arguments."""

    text: str
    where: str
    addresses: dict[int, int]


class StepWatch(TorchDispatchMode):
    """Watches one call of a step. ``arguments``: locals that may lie anywhere, because a captured
    step copies them to fixed memory. ``earlier``: the watch of the call before."""

    sees_engine = True  # the gathers and reductions of sharded state

    def __init__(self, arguments: Iterable[Tensor], earlier: StepWatch | None) -> None:
        super().__init__()
        self.earlier, self.contexts = earlier, ExitStack()
        self.calls: list[OperatorCall] = []
        self.faults: dict[str, None] = {}
        self.on_cuda = False
        self.inside = {storage_id(x.untyped_storage()) for x in arguments}  # or made in the step
        self.made: list[StorageWeakRef] = []  # keeps these numbers of storages unique
        self.outside: dict[int, tuple[StorageWeakRef, OperatorCall]] = {}
        self.refilled: set[int] = set()  # storages outside to which the step gives new memory
        self.leaves: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.grads: dict[int, int] = {}
        before = earlier.outside if earlier is not None else {}
        live = {key: alive(ref) for key, (ref, _) in before.items()}
        self.start = {key: x.data_ptr() for key, x in live.items() if x is not None}

    def __enter__(self) -> Any:
        for name in ("tolist", "numpy", "cpu"):
            self.contexts.enter_context(_seen(Tensor, name, f"Tensor.{name} {_READS}", self.fault))
        self.contexts.enter_context(_seen(*creates, f"a process group {_CREATES}", self.fault))
        # Compiled functions run uncompiled: Dynamo refuses modes.
        self.contexts.enter_context(torch.compiler.set_stance("force_eager"))
        if self.earlier is not None:
            self.earlier.compare_grads(self.fault)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.contexts.close()
        self.grads = self.addresses_of_grads()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, name = _dense((args, kwargs)), str(func._overloadpacket)
        text = f"{name}({', '.join(map(_described, (*args, *kwargs.values())))})"
        if name == "aten.lift_fresh":  # its argument was made by Python
            given = []
            if args[0].is_cpu and not args[0].ndim:
                text = f"{name}({args[0].item()})"  # a constant, as in ``x[0] = 2.0``
        call = OperatorCall(text.replace("_local_scalar_dense", "item"), user_line(), {})
        caller = _caller()
        if caller and caller.f_code is blocked_wait.wait.__code__:  # of gloo's reduce-scatter
            return func(*args, **kwargs)
        for i, x in enumerate(given):
            self.see_input(i, x, call)
        out = func(*args, **kwargs)
        results = _dense(out)
        for x in results:
            key = storage_id(x.untyped_storage())
            if key not in self.outside and key not in self.inside:
                self.inside.add(key)
                self.made.append(StorageWeakRef(x.untyped_storage()))
        why = _violation(func, name, args, {x.device.type for x in (*given, *results)})
        if why:
            self.fault(f"{_short(call.text)} {why}")
        self.calls.append(call)
        return out

    def see_input(self, i: int, x: Tensor, call: OperatorCall) -> None:
        storage = x.untyped_storage()
        key, place = storage_id(storage), storage.data_ptr()
        self.on_cuda = self.on_cuda or x.is_cuda
        if x.requires_grad and x.is_leaf:
            self.leaves.setdefault(id(x), (weakref.ref(x), call.where))
        if key in self.inside:
            return
        self.outside.setdefault(key, (StorageWeakRef(storage), call))
        if self.start.get(key, place) == place:
            call.addresses[i] = x.data_ptr()
        else:
            self.refilled.add(key)

    def fault(self, text: str, where: str = "") -> None:
        if not where:
            where, frame = user_line(), _caller()
            inner = show_place(frame and (frame.f_code.co_filename, frame.f_lineno))
            short = "/".join(inner.split("/")[-3:])
            text += f" (it runs in {short})" * (inner != where)
        self.faults[f"{where}: {text}"] = None

    def addresses_of_grads(self) -> dict[int, int]:
        """Returns the address of the gradient of each leaf; 0 if it has none."""
        grads = {key: getattr(ref(), "grad", None) for key, (ref, _) in self.leaves.items()}
        return {key: sum(x.data_ptr() for x in _dense([grad])) for key, grad in grads.items()}

    def compare_grads(self, fault: Callable[[str, str], None]) -> None:
        """Reports a leaf whose gradient was replaced since this call."""
        now = self.addresses_of_grads()
        for key, (ref, where) in self.leaves.items():
            if (leaf := ref()) is not None and now[key] != self.grads[key]:
                what = f"the gradient of the leaf {_described(leaf)}"
                fault(f"{what} was replaced since the last call; {_GRAD}", where)
                break

    def check(self, who: str) -> None:
        """Raises CaptureError if the call violated the contract, or differs from the earlier."""
        earlier, self.earlier = self.earlier, None
        pairs = zip_longest(earlier.calls, self.calls) if earlier is not None else ()
        for pair in pairs:
            before, now = (call or OperatorCall("no operator", "", {}) for call in pair)
            where = now.where or before.where
            if before.text != now.text:
                both = zip(before.text, now.text, strict=False)
                at = next((i for i, (a, b) in enumerate(both) if a != b), 0)
                a, b = _short(before.text, at), _short(now.text, at)
                self.fault(f"{b} ran where the call before ran {a}; {_MUST_REPEAT}", where)
                break
            held = before.addresses.keys() & now.addresses.keys()
            if any(before.addresses[i] != now.addresses[i] for i in held):
                self.fault(f"{_short(now.text)} {MOVED}", where)
                break
        raise_faults(who, self.faults)


def raise_faults(who: str, faults: Iterable[str]) -> None:
    """Raises CaptureError if there are any."""
    shown = list(faults)
    if shown:
        shown[SHOWN:] = [f"and {len(shown) - SHOWN} more"] if len(shown) > SHOWN else []
        lines = "\n  ".join(shown)
        raise CaptureError(f"{who}: a CUDA graph cannot repeat this call.\n  {lines}")


def _violation(func: Any, name: str, args: Any, devices: set[str]) -> str:
    """Returns why a CUDA graph cannot contain this call of an operator; "" if it can."""
    if name.startswith(("aten.index", "aten._index_put", "aten._unsafe_index")):  # by a mask
        if any(x.dtype in (torch.bool, torch.uint8) for x in collect(args[1:2], [])):
            return _SIZED
    elif torch.Tag.dynamic_output_shape in func.tags:
        return _SIZED
    if torch.Tag.data_dependent_output in func.tags:
        return _READS
    if name == "aten.lift_fresh" and args[0].ndim:
        return _LIFTED
    if name in ("aten._to_copy", "aten.copy_") and {"cpu", "cuda"} <= devices:
        return _COPIES
    is_seeded = torch.Tag.nondeterministic_seeded in func.tags and counter._State.inside
    return _DRAWS if is_seeded else ""


def _dense(value: Any) -> list[Tensor]:
    return [x for x in collect(value, []) if x.layout is torch.strided]


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_described, x))}]"
    return repr(x) if isinstance(x, _CONSTANTS) else type(x).__name__


def _short(text: str, at: int = 0) -> str:
    """Returns the name of an operator, and its arguments around the position ``at``."""
    name, _, given = text.partition("(")
    at = max(0, at - len(name) - 40)
    return text if len(text) < 120 else f"{name}({'... ' * (at > 0)}{given[at : at + 80]} ...)"


def _caller() -> Any:
    """Returns the frame of the innermost Python function that called the operator; None in a
    thread of autograd."""
    frame: Any = sys._getframe(1)
    hidden = (__file__, "_python_dispatch.py", "eval_frame.py", "_compile.py", "_ops.py")
    while frame and frame.f_code.co_filename.endswith(hidden):
        frame = frame.f_back
    return frame


@contextmanager
def _seen(owner: Any, name: str, text: str, see: Callable[[str], None]) -> Iterator[None]:
    """Calls ``see(text)`` before each call of the function ``owner.name`` on this thread."""
    held, usual, me = owner.__dict__.get(name), getattr(owner, name), get_ident()

    def put(function: Any) -> None:
        setattr(owner, name, function) if function is not None else delattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != me:
            return usual(*args, **kwargs)
        see(text)
        put(held)  # a method of Tensor passes the attribute to ``__torch_function__``
        try:
            return usual(*args, **kwargs)
        finally:
            put(call)

    put(call)
    try:
        yield
    finally:
        put(held)
