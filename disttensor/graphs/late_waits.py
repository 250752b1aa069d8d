"""Overlaps reshards with computation in graphs of inductor: a reshard starts as soon as its local
is computed, and is waited for before the first call that reads its result.

The operators keep their order among each other, so all ranks send the same messages in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from disttensor.torch_private import inductor_pass, options_of_mode


def with_late_waits(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options of ``torch.compile`` by which inductor calls ``wait_late``, and keeps the
    order of calls that it gives them."""
    ours = inductor_pass(wait_late, __file__) | {"reorder_for_peak_memory": False}
    given = options_of_mode(options.get("mode")) | options.get("options", {})
    return {**options, "mode": None, "options": ours | given}


def wait_late(graph: Graph) -> None:
    """Moves each ``start_reshard`` up to its last input, but not above a write or the operator with
    effects before it, and each ``wait_reshard`` down to the first call that reads its result."""
    ops = torch.ops.disttensor
    waits = [_unordered(n) for n in graph.nodes if ops.wait_reshard.default in n.args]
    for node in [n for n in graph.nodes if ops.start_reshard.default in n.args]:
        _move_up(node)
    for node in reversed(waits):
        _move_down(graph, node)


def _unordered(wait: Node) -> Node:
    """Replaces an operator with effects by its call, which has no place in their order. Up to this
    pass the effects keep the partitioner from running the wait again in the backward, where its
    memory may have been reused."""
    token, operator, *given = wait.args
    call = wait.graph.create_node("call_function", operator, tuple(given))  # type: ignore[arg-type]
    wait.append(call)
    for item in list(wait.users):
        is_result = item.args[1] == 1
        call.meta.update(item.meta if is_result else {})
        item.replace_all_uses_with(call if is_result else token)  # type: ignore[arg-type]
        wait.graph.erase_node(item)
    wait.graph.erase_node(wait)
    return call


def _move_up(start: Node) -> None:
    """Moves what ``start`` does not need behind it, back to the operator before it."""
    needed, queue = {start}, [start]
    while queue:
        new = set(queue.pop().all_input_nodes) - needed
        needed |= new
        queue += new
    node = start.prev
    while node.op == "call_function" and not _writes(node) and node.target is not start.target:
        before = node.prev
        if node not in needed:
            start.append(node)
        node = before


def _move_down(graph: Graph, wait: Node) -> None:
    places = {node: i for i, node in enumerate(graph.nodes)}
    chain = [wait, *_views(wait)]
    if chain[-1].users:
        first = min(chain[-1].users, key=places.__getitem__)
        for node in chain:
            first.prepend(node)


def _writes(node: Node) -> bool:
    """Returns True for a call that writes to an argument, as at the end of a graph."""
    return getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _views(node: Node) -> Iterator[Node]:
    """Yields the calls after ``node`` that only make a view, as long as each has one reader."""
    while len(node.users) == 1:
        (node,) = node.users
        if not getattr(node.target, "is_view", False):
            return
        yield node
