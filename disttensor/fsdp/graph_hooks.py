"""The nodes of autograd's graph that a forward of a segment made, and when a backward runs them.

Autograd numbers nodes as they are made, and runs the nodes of a graph from the highest number down.
So the nodes of a forward have the numbers between its begin and its end, even if its results are
kept in attributes, closures or globals. When a call of autograd starts, its graph is walked once.
Each forward that has nodes in it is entered before the first of them and left after the last. Hooks
run before nodes, so nothing is added to the graph.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from disttensor.autograd.joined_backward import run_after_failure
from disttensor.autograd.starts import graph_count, node_count
from disttensor.fsdp.states import ForwardState
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.torch_private import (
    after_backward,
    current_backward,
    current_node,
    is_in_backward,
    module_call,
    next_number,
    node_number,
)

Tensor = torch.Tensor
_KEPT = 64  # forwards of a segment, in one thread, whose nodes are kept separately
_THREADS = 4096  # each micro-batch of a pipeline has a thread, as long as its forward is paused
_COUNT = "disttensor.count"  # on the node of a result of a forward: the count of its thread


class SegmentForward:
    """The forwards of one segment: those that run now, and the nodes that each made.

    running  modules whose forwards are on the stack.
    ran      modules whose forwards have ended since the last ``close``.
    numbers  (its first number, the number after its last) of each forward, by ``node_count``. Old
             entries are merged: a backward through such a graph may enter the segment needlessly.
    plan     called for each forward that a backward will enter, then ``enter`` and ``leave``.
    """

    def __init__(
        self, plan: Callable[[], None], enter: Callable[[], None], leave: Callable[[], None]
    ) -> None:
        self.plan, self.enter, self.leave = plan, enter, leave
        self.running: list[nn.Module] = []
        self.ran: set[nn.Module] = set()
        self.numbers: dict[int, list[tuple[int, int]]] = {}
        self._begun: dict[int, list[int]] = {}
        self._made_nodes = False

    @property
    def state(self) -> ForwardState:
        if self.running:
            return ForwardState.RUNNING
        return ForwardState.BETWEEN if self.ran else ForwardState.IDLE

    @property
    def runs_here(self) -> bool:
        """True if a forward of this thread is on the stack."""
        return node_count() in self._begun

    def begin(self, module: nn.Module) -> None:
        self.running.append(module)
        self._begun.setdefault(node_count(), []).append(next_number())

    def end(self, module: nn.Module) -> bool:
        """Ends a forward. Returns False if it had not begun: a hook before it raised an error."""
        if module not in self.running:
            return False
        self.running.remove(module)
        count = node_count()
        first, last = self._begun[count].pop(), next_number()
        if not self._begun[count]:  # the outermost
            del self._begun[count]
            numbers = self.numbers[count] = self.numbers.pop(count, [])  # the last one
            if last > first:
                numbers.append((first, last))
            if len(numbers) > _KEPT:
                numbers[:2] = [(numbers[0][0], numbers[1][1])]
            if len(self.numbers) > _THREADS:  # the thread that has made nodes least recently
                del self.numbers[next(iter(self.numbers))]
        self._made_nodes |= last > first
        return True

    def is_over(self, modules: Sequence[nn.Module], in_root: bool) -> bool:
        """Returns True if no other forward of these modules will follow. Without a forward of the
        root, only the module that has ended is certain to run."""
        return not self.running and (not in_root or len(self.ran) == len(modules))

    def close(self) -> bool:
        """Ends the forwards between two uses; returns True if they made nodes."""
        made, self._made_nodes = self._made_nodes, False
        self.ran.clear()
        return made

    def drop(self) -> None:
        """Drops the forwards that ended with an error."""
        self.running.clear()
        self._begun.clear()
        self.close()


def mark_results(results: Iterable[Tensor]) -> None:
    """Marks the results of a forward with the count of its thread: another one may differentiate
    them."""
    for node in filter(None, map(_node_of, results)):
        node.metadata[_COUNT] = node_count()


def calls_on_stack(module: nn.Module | None) -> int:
    """Returns the number of running calls of ``module``, in all threads. Hooks after a forward are
    not called if a KeyboardInterrupt ends it, or if its micro-batch is abandoned."""
    count = 0
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is module_call.__code__:
                count += frame.f_locals["self"] is module
            frame = frame.f_back
    return count


_Pass = tuple[int, SegmentForward]  # the number of a call of autograd, and a forward in its graph


class _Walk:
    """One call of autograd: its nodes seen so far, and the hooks on them."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()
        self.handles: list[Any] = []


_WALKS: dict[int, _Walk] = {}  # by the number of the call


def _end(task: int) -> None:
    """Drops the state of a call that has ended. Other threads may be in calls of their own."""
    for handle in _WALKS.pop(task, _Walk()).handles:
        handle.remove()


def follow(start: Any, of_segments: Sequence[SegmentForward]) -> None:
    """Registers hooks that enter and leave segments in the part of the graph that begins with
    ``start``, the node that is about to run."""
    task = current_backward()
    walk = _WALKS.get(task)
    if walk is None:
        walk = _WALKS[task] = _Walk()
        after_backward(partial(_end, task))
        run_after_failure(partial(_end, task))
    if start in walk.seen:
        return
    found: list[tuple[int, Any, Any, SegmentForward]] = []
    for count, made in _by_count(start, _new_nodes(start, walk.seen), of_segments).items():
        nodes = sorted(made, key=node_number)
        numbers = [node_number(node) for node in nodes]
        for forward in of_segments:
            for begin, end in reversed(forward.numbers.get(count, ())):
                if end <= numbers[0]:
                    break
                at = bisect_left(numbers, begin)
                first = _last_that_runs(nodes, bisect_left(numbers, end), at)
                if first is not None:
                    found.append((begin, first, _last_that_runs(nodes, at, 0), forward))
    found.sort(key=lambda one: one[0])  # a forward around others is entered before them
    before: dict[Any, tuple[list[_Pass], list[_Pass]]] = {}
    for _, first, after, forward in found:
        forward.plan()
        one = task, forward
        before.setdefault(first, ([], []))[1].append(one)
        if after is not None:
            before.setdefault(after, ([], []))[0].insert(0, one)
    for node, (left, entered) in before.items():
        if node is start:
            _run(left, entered)
        else:
            walk.handles.append(node.register_prehook(lambda _, ends=(left, entered): _run(*ends)))


def _by_count(
    start: Any, nodes: Iterable[Any], of_segments: Iterable[SegmentForward]
) -> dict[int, Iterable[Any]]:
    """Returns the nodes by the count that numbers them. Each thread that calls autograd at a node
    ``start`` has its own graph, so a thread of one rank alone gathers nothing, but for the nodes
    from which another thread's forward made its results.

    Raises RuntimeError, as on all ranks, if several threads ran the forwards: autograd would run
    their nodes in another order on each rank."""
    own, is_whole = graph_count(start)
    # a copy of the counts: other threads may add theirs meanwhile
    if is_whole or all({own}.issuperset([*forward.numbers]) for forward in of_segments):
        return {own: nodes}
    results = [node for node in nodes if _COUNT in node.metadata]
    counts = {node.metadata[_COUNT] for node in results}
    if counts <= {own}:
        return {own: nodes}
    if len(counts) > 1:
        raise RuntimeError(
            "a backward goes through modules of shard_data_parallel whose forwards ran in several "
            "threads, so each rank would gather them in another order. Run these forwards in one "
            "thread"
        )
    below: set[Any] = set()
    for node in results:
        if node not in below:
            _new_nodes(node, below)
    above = [node for node in nodes if node not in below]
    return {**({own: above} if above else {}), counts.pop(): below}


def before_node(x: Tensor, run: Callable[[], None]) -> None:
    """Calls ``run`` before each run of the node that made x, if this rank has that node."""
    node = _node_of(x)
    if node is not None:
        node.register_prehook(lambda _: run())


def _node_of(x: Tensor) -> Any:
    if isinstance(x, DistTensor):
        if not x.is_initialized:  # its node belongs to other tensors, too
            return None
        x = x.local
    return x.grad_fn


def _run(left: list[_Pass], entered: list[_Pass]) -> None:
    """Leaves segments, then enters others, so that fewer are gathered at once."""
    task = current_backward()
    for number, forward in left:
        if number == task:
            forward.leave()
    for number, forward in entered:
        if number == task:
            forward.enter()


def _new_nodes(start: Any, seen: set[Any]) -> list[Any]:
    out, queue = [], [start]
    seen.add(start)
    while queue:
        node = queue.pop()
        out.append(node)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                queue.append(other)
    return out


def _last_that_runs(nodes: list[Any], end: int, begin: int) -> Any:
    """Returns the last of ``nodes[begin:end]`` that the present call of autograd runs, or None."""
    for i in range(end - 1, begin - 1, -1):
        if nodes[i] is current_node() or is_in_backward(nodes[i]):
            return nodes[i]
    return None
