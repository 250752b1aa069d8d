"""The errors and warnings that users meet, and the user's line and function names in them."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import resolve_name

__all__ = [
    "CaptureError", "CommError", "CustomFunctionError", "DistTensorError", "FallbackWarning",
    "MismatchError", "PieceWarning", "RankError", "SimulationError", "StrictError", "VerifyError",
]  # fmt: skip

_ROOT = Path(__file__).parents[1]
_OURS = tuple(str(_ROOT / name) + "/" for name in ("disttensor", "ops", "reshard"))
_TORCH = str(Path(torch.__file__).parent) + "/"


@cache
def _is_users(file: str) -> bool:
    return not file.startswith((*_OURS, _TORCH, "<"))


def is_users(frame: Any) -> bool:
    """Returns True for code that is neither ours nor torch's."""
    return _is_users(frame.f_code.co_filename)


def user_line(frame: Any = None) -> str:
    """Returns ``file.py:12`` of the innermost frame that is neither ours nor torch's, in the stack
    of the caller, or the stack that ends with ``frame``."""
    return show_place(user_place(frame or sys._getframe(1)))


Place = tuple[str, int] | None


def user_place(frame: Any) -> Place:
    """Returns file and line of ``user_line`` separately; None if there is no such frame."""
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_users(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def show_place(place: Place) -> str:
    return "(autograd thread)" if place is None else f"{place[0]}:{place[1]}"


class DistTensorError(RuntimeError):
    """The base class of the errors below, which only this project raises.

    >>> issubclass(dt.errors.MismatchError, dt.errors.DistTensorError)
    True
    """


class StrictError(DistTensorError):
    """Raised inside strict() for a call that would communicate implicitly, or that has no rule.

    >>> try:
    ...     with dt.debugging.strict():
    ...         y = dt.ones(4, 4, mesh=mesh).relu()
    ... except dt.errors.StrictError as error:
    ...     print("would communicate:", error)
    """


class CaptureError(DistTensorError):
    """Raised for a step of ``dt.capture`` that a CUDA graph cannot repeat. The message names each
    call and its line. The step has run, as without ``dt.capture``.

    >>> w = dt.ones(3, mesh=mesh)
    >>> step = dt.capture(lambda: w.sum().item())
    >>> try:
    ...     [step() for _ in range(4)]
    ... except dt.errors.CaptureError as error:
    ...     print("what is read, and where:", error)
    what is read, and where: ...
    """


class FallbackWarning(UserWarning):
    """Warns that a correct result was slow: a function without a rule ran on gathered tensors, or a
    schedule could not defer the gradients of weights.

    >>> import warnings
    >>> warnings.simplefilter("ignore", dt.errors.FallbackWarning)
    """


class PieceWarning(UserWarning):
    """Warns that a pickle, as ``torch.save`` writes it, holds only this rank's piece of a tensor.

    >>> import warnings
    >>> warnings.simplefilter("ignore", dt.errors.PieceWarning)
    """


warned: set[Hashable] = set()  # keys of ``warn_once``


def warn_once(
    key: Hashable, text: Callable[[], str], category: type[Warning] = FallbackWarning
) -> None:
    """Issues a warning with this text at the user's line, once for each ``key``."""
    if key not in warned:
        warned.add(key)
        place = user_place(sys._getframe(1)) or ("unknown", 0)
        warnings.warn_explicit(text(), category, *place)


def headline(error: BaseException) -> str:
    """Returns the type of an error and the first line of its text."""
    name = type(error).__name__
    try:
        return ": ".join([name, *str(error).splitlines()[:1]])
    except Exception:  # its text cannot be made
        return name


def name_of(func: Any) -> str:
    """Returns the public name of a function: ``torch.add``, ``torch.Tensor.add_``."""
    name = resolve_name(func) or getattr(
        func, "__qualname__", getattr(func, "__name__", repr(func))
    )
    return name.removesuffix(".__get__").replace("_VariableFunctionsClass", "torch")


def name_parameter(x: Any, local: Any = None) -> str:
    """Returns the longest name of a parameter in the modules that variables of the user's calling
    functions hold, or "". ``local``: of the parameter, in place of itself."""
    names, frame = [""], sys._getframe(1)
    while frame is not None:
        held = (*frame.f_locals.values(), *frame.f_globals.values()) if is_users(frame) else ()
        names += [
            name
            for module in held
            if isinstance(module, torch.nn.Module)
            for name, p in module.named_parameters()
            if p is x or (local is not None and getattr(p, "local", None) is local)
        ]
        frame = frame.f_back  # type: ignore[assignment]
    return max(names, key=len)


def refuse_collectives(func: Any) -> None:
    """Raises RuntimeError if ``func`` is a collective or a message of torch.distributed, called
    with a DistTensor."""
    own = getattr(func, "__module__", None) or ""
    if own.startswith("torch.distributed.nn") or re.match(r"_?c10d", str(func)):
        raise RuntimeError(
            f"{name_of(func)} at {user_line()}: a DistTensor is given to a collective of "
            "torch.distributed. A DistTensor is one tensor, the same on all ranks, so nothing has "
            "to be collected from other ranks: use x itself, as on one process (code that checks "
            "torch.distributed.is_initialized() must take the branch of one process). To change "
            "the piece of a rank, call reshard(x, mesh, placements); to communicate by hand, run "
            "that code on the locals: local_map(fn, in_placements=..., out_placements=...)"
        )


class MismatchError(DistTensorError):
    """Ranks do not run the same program: they disagree about a collective or a message, or made
    different calls since an optimizer step.

    >>> try:
    ...     with dt.debugging.compare_ranks():
    ...         total = dt.ones(4, mesh=mesh).sum().item()
    ... except dt.errors.MismatchError as error:
    ...     print("which rank does what:", error)
    """


class CommError(DistTensorError):
    """A collective failed or could not start; the message names the group and its ranks.

    >>> issubclass(dt.errors.CommError, RuntimeError)
    True
    """


class RankError(DistTensorError):
    """The first error of a process that ``dt.launch`` or ``dt.local_ranks`` has started, with the
    traceback of that process. ``rank``: its rank.

    >>> error = dt.errors.RankError("launch: rank 1 of 2: ValueError: ...", 1)
    >>> error.rank
    1
    """

    def __init__(self, text: str, rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank


class VerifyError(DistTensorError):
    """Raised by ``dt.verify`` for a program that computes something else on several ranks than in
    one process. The message names the first tensor that differs.

    >>> issubclass(dt.errors.VerifyError, dt.errors.DistTensorError)
    True
    """


class CustomFunctionError(DistTensorError):
    """Raised for reentrant checkpointing of a DistTensor, and for a custom autograd.Function that
    would cut its graph.

    >>> from torch.utils.checkpoint import checkpoint
    >>> x = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> try:
    ...     y = checkpoint(torch.relu, x, use_reentrant=True)
    ... except dt.errors.CustomFunctionError:
    ...     y = checkpoint(torch.relu, x, use_reentrant=False)
    >>> y.tolist()
    [1.0, 1.0, 1.0]
    """


class SimulationError(DistTensorError):
    """Raised for a program that cannot be simulated. The message names the line.

    >>> def build():
    ...     x = dt.ones(4, mesh=dt.init_mesh((2,), ("dp",)))
    ...     return lambda: torch.nonzero(x)
    >>> try:
    ...     dt.simulate.simulate(build, world=2)
    ... except dt.errors.SimulationError as error:
    ...     print(error)
    the shape of the result of aten.nonzero.default at ... depends on data, ...
    """
