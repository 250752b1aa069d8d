"""``capture``: a training step as a CUDA graph; on the CPU, a check that it can become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import update_wrapper
from typing import Any, TypeVar

import torch

from disttensor import pytree
from disttensor.checks import check_bool, check_callable, check_int
from disttensor.comm.buffers import is_free
from disttensor.errors import CaptureError
from disttensor.graphs.capture_check import MOVED, StepWatch, raise_faults
from disttensor.tensor.base import MeshTensor
from disttensor.tensor.versions import count_storages
from disttensor.torch_private import alive

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])


def capture(step: F, *, warmup: int = 4, check: bool = False) -> F:
    """Returns a function that captures ``step``, one step of training, as a CUDA graph and launches
    the graph. On the CPU it runs ``step`` and checks that it could be captured.

    The first ``warmup`` calls run eagerly, on a side stream, and the last of them is checked. The
    next call captures the step. This and all later calls copy their arguments to the memory of the
    capture, launch the graph, and return the tensors of the capture, which the next call
    overwrites. On the CPU every call runs eagerly, and is checked from the last warm-up call on.

    The step must not read a value on the host, create a process group, or draw random numbers of
    DistTensors. Each call runs the same operators, with the same constants, on memory at the same
    addresses; memory that the step itself allocates may move. All ranks must make the same calls of
    ``capture`` and of the step.

    Args:
        step: a function of tensors and constants; its results are returned without their graph.
            ``torch.optim.AdamW`` needs ``fused=True, capturable=True``.
        warmup: number of eager calls, at least 3. A module under ``dt.compile`` needs 4.
        check: on CUDA, too, run eagerly and check each call.

    Returns:
        A function with the arguments of ``step``.

    Raises:
        CaptureError: if a call violates the contract, with each operator and its line; the step
            has run then. Also if the arguments have other shapes, placements or constants than
            before; then the step has not run.
        TypeError: for an argument that is no tensor, constant, list, tuple or dict.

    >>> w = dt.ones(3, mesh=mesh, requires_grad=True)
    >>> optimizer = torch.optim.SGD([w], lr=0.5)
    >>> def step(x):
    ...     optimizer.zero_grad()
    ...     loss = (w * x).sum()
    ...     loss.backward()
    ...     optimizer.step()
    ...     return loss
    >>> step = dt.capture(step, warmup=3)
    >>> [step(dt.ones(3, mesh=mesh)).item() for _ in range(4)]
    [3.0, 1.5, 0.0, -1.5]
    """
    check_callable("capture: step", step)
    check_int("capture: warmup", warmup, 3)
    check_bool("capture: check", check)
    return CapturedStep(step, warmup, check)  # type: ignore[return-value]


class CapturedStep:
    """A step that runs eagerly at first, and is checked or captured then."""

    def __init__(self, step: Callable[..., Any], warmup: int, check: bool) -> None:
        self.step, self.warmup, self.check = step, warmup, check
        self.name = f"capture of {getattr(step, '__qualname__', type(step).__name__)}"
        self.calls = 0
        self.is_checked = False  # True: the last call kept the contract
        self.key: Any = None
        self.stream: Any = None
        self.watch: StepWatch | None = None
        self.graph: StepGraph | None = None
        update_wrapper(self, step, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check_arguments(args, kwargs)
        self.calls += 1
        given, watch = pytree.collect((args, kwargs), []), self.watch
        if self.is_checked and watch is not None and watch.on_cuda and not self.check:
            self.is_checked = False  # stays so if the capture fails
            self.graph = StepGraph(self.name, self.step, args, kwargs, self.stream, watch)
        if self.graph is not None:
            return self.graph.replay(given)
        if self.stream is None and torch.cuda.is_initialized():
            self.stream = torch.cuda.Stream()
        if self.calls >= self.warmup - 1:
            self.watch, self.is_checked = StepWatch(map(_local, given), watch), False
        try:
            with _on_stream(self.stream), self.watch or nullcontext():
                result = _detached(self.step(*args, **kwargs))
        except BaseException:
            self.watch = None  # it has not seen the whole step
            raise
        if self.watch is not None and self.calls >= self.warmup:
            self.watch.check(f"{self.name}, call {self.calls}")
            self.is_checked = True
        return result

    def check_arguments(self, args: Any, kwargs: Any) -> None:
        """Raises an error if a captured step cannot take the arguments of this call."""
        on = map(torch.is_autocast_enabled, ("cpu", "cuda"))
        if torch.is_autocast_cache_enabled() and any(on):
            raise CaptureError(
                f"{self.name}: it is called under autocast, whose cached casts a CUDA graph would "
                "read. Enter autocast inside of the step, or give it cache_enabled=False"
            )
        try:
            key = pytree.key_of_contents((args, kwargs), _kind)
        except pytree.Uncacheable as error:
            raise TypeError(
                f"{self.name}: {error}; tensors that require no grad, constants, lists, tuples and "
                "dicts are expected"
            ) from None
        self.key = key if self.key is None else self.key
        if key != self.key:
            raise CaptureError(
                f"{self.name}: call {self.calls + 1} has the arguments {key}, and the first call "
                f"had {self.key}. A CUDA graph has fixed shapes, placements and constants: use one "
                "dt.capture for each kind of call"
            )


class StepGraph:
    """A captured step: its graph, its results, and the memory that it reads and writes."""

    def __init__(
        self, name: str, step: Any, args: Any, kwargs: Any, stream: Any, watch: StepWatch
    ) -> None:
        self.name, self.watch = name, watch
        args, kwargs = pytree.substitute((args, kwargs), lambda x: x.detach().clone())
        self.inputs = pytree.collect((args, kwargs), [])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.result = _detached(step(*args, **kwargs))
        watch.grads = watch.addresses_of_grads()
        fixed = [some for key, some in watch.outside.items() if key not in watch.refilled]
        held = [(storage, call) for ref, call in fixed if (storage := alive(ref)) is not None]
        # Memory from outside, and the first operator that reads it.
        self.storages, self.readers = [x for x, _ in held], [call for _, call in held]
        leaves = [ref() for ref, _ in watch.leaves.values()]
        grads = [x.grad for x in leaves if x is not None and x.grad is not None]
        results = map(_local, pytree.find_tensors(self.result))
        self.made = [x.untyped_storage() for x in (*grads, *results)]

    def replay(self, given: list[Any]) -> Any:
        faults: dict[str, None] = {}
        self.watch.compare_grads(lambda text, where: faults.setdefault(f"{where}: {text}"))
        for i, call in enumerate(self.readers):
            if is_free(self.storages, i):  # the program holds another tensor now
                faults[f"{call.where}: {call.text} {MOVED}"] = None
        raise_faults(self.name, faults)
        with torch.no_grad():
            for mine, x in zip(self.inputs, given, strict=True):
                mine.copy_(x)
        self.graph.replay()
        count_storages([*self.storages, *self.made])  # values that eager code keeps are invalid
        return _detached(self.result)


def _kind(x: Any) -> Any:
    """Returns the facts about an argument on which a captured step depends."""
    if x.requires_grad:
        raise pytree.Uncacheable("an argument requires grad")
    local = _local(x)
    spec = x.spec if isinstance(x, MeshTensor) else str(x.device)
    return spec, tuple(local.shape), local.stride(), local.dtype


def _local(x: Any) -> Tensor:
    local: Tensor = x.local if isinstance(x, MeshTensor) else x
    return local


def _detached(result: Any) -> Any:
    return pytree.replace_tensors(result, lambda x: x.detach())


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """Runs the block on a stream of CUDA, between the work before and after it, if there is one."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
