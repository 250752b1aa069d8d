"""CallPlan: the steps of one kind of call on this rank, as data; no code runs here.

``plan_call`` makes a plan for the first call of a key, and ``run`` (or ``native.c``, which reads
the same fields by name) runs this call and all later ones. Tensor arguments are counted in order of
appearance in the one form, through lists and keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from disttensor.comm.compare_programs import CallSignature
from disttensor.core.layout import Axes
from disttensor.core.mesh import ProcessMesh
from disttensor.core.spec import DistSpec

Function = Callable[..., Any]


class ReadKind(IntEnum):
    CONSTANT = 0  # passed unchanged
    TENSOR = 1
    LIST = 2  # a container of tensors, whose locals are passed if no graph is built
    TREE = 3  # a container; some of its tensors are resharded


class Read(NamedTuple):
    """How the local function receives one argument.

    spec      reshard to this first; None: no reshard.
    varying   axes over which this use varies: they define the meaning of its gradient.
    regular   the spec that stands for a regular tensor, which becomes a DistTensor first.
    elements  of a container: a Read for each tensor in it; () if all locals are passed unchanged.
    """

    kind: ReadKind
    spec: DistSpec | None = None
    varying: Axes = ()
    regular: DistSpec | None = None
    elements: tuple[Read, ...] = ()


CONSTANT = Read(ReadKind.CONSTANT)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CallPlan:
    """The plan of all calls of one key, in the one form of a call (``ops/signatures.py``).

    order             how the caller's arguments are brought into this form (``Form``); or None.
    func              the function that the user called: for errors, and to dispatch again.
    local             runs on locals; None: this rank is off the mesh, and no kernel runs.
    specs             of the tensor arguments (a regular tensor counts as replicated).
    input_specs       for each the spec to which it is resharded, or None; () if none is.
    reads             of the positional arguments, then of those named in ``keywords``.
    results           specs of the results in order. Their dtypes hold if ``is_checked``.
    template          off the mesh: the return value, with a ``TensorResult`` for each tensor.
    is_view           some results are views.
    views             for each result the number of the tensor that it is a view of, and whether it
                      is a copy, as data was moved (see tensor/views.py); or None.
    derives           number of the tensor from which varying uses make the result again, or None.
    writes            numbers of the tensors that are written; None: no in-place call.
    side_writes       numbers of the tensors that are written in addition to the results.
    untracked_writes  autograd does not count these writes: fused kernels, custom operators.
    may_reuse         for each tensor: True if pending, so that an earlier reduction may be read.
    reduce_first      for each tensor the spec to reduce it to before the call is dispatched again.
    draws             off the mesh: True if the call draws random numbers; or a function of the
                      arguments that returns True if the call draws none.
    broadcasts_shape  shapes depend on data: a rank of the mesh sends them to ranks off the mesh.
    is_simple         no tensor is resharded, written or viewed, and there is one result.
    native            the C code may run this call.
    variants          off the mesh: the plans of the same calls by the settings of torch and the
                      strides of the tensors, on which an answer of torch depends too.
    call              the description that ranks compare.
    """

    func: Function
    mesh: ProcessMesh
    local: Function | None
    specs: tuple[DistSpec, ...]
    reads: tuple[Read, ...]
    keywords: tuple[str, ...]
    results: tuple[DistSpec, ...]
    input_specs: tuple[DistSpec | None, ...] = ()
    template: Any = None
    is_view: bool = False
    views: tuple[tuple[int, bool] | None, ...] = ()
    derives: int | None = None
    writes: tuple[int, ...] | None = None
    side_writes: tuple[int, ...] = ()
    untracked_writes: bool = False
    order: tuple[int, ...] | None = None
    may_reuse: tuple[bool, ...] = ()
    reduce_first: tuple[DistSpec | None, ...] = ()
    draws: bool | Callable[..., bool] = False
    broadcasts_shape: bool = False
    is_simple: bool = False
    native: bool = False
    is_checked: bool = True
    variants: dict[Any, CallPlan] = field(default_factory=dict, compare=False)
    call: CallSignature | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call that the key determines, such as ``x.is_complex()``."""

    value: Any
    call: CallSignature | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call that a Python function runs: ``run(planned, args, kwargs)``.

    func         the function that the user called.
    run          a named function of this package; the other fields are its parameters.
    why          the reason why there is no plan: for the warning and the error of a gather.
    is_expected  a gather that gives no warning.
    setting      of a call that is planned by value: the setting that its rule depends on, or None.
    """

    func: Function
    run: Callable[[PythonCall, Sequence[Any], dict[str, Any]], Any]
    why: str = ""
    is_expected: bool = False
    setting: Callable[[], Any] | None = None
    call: CallSignature | None = field(default=None, compare=False)


Planned = CallPlan | Answer | PythonCall
