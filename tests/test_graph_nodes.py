"""Walking autograd's graph makes no node of it."""

from __future__ import annotations

import torch

from disttensor.graph_nodes import node_of, nodes_of
from disttensor.torch_private import next_node


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_the_nodes_of_a_result_and_of_its_leaf():
    x = torch.ones(3, requires_grad=True)
    y = Twice.apply(x).sum()
    (leaf,) = [node for node in nodes_of([y, torch.ones(3)]) if hasattr(node, "variable")]
    assert leaf.variable is x and leaf == node_of(x)
    assert nodes_of([y]) == {y.grad_fn, y.grad_fn.next_functions[0][0], leaf}
    assert nodes_of([y], {y.grad_fn}) == {y.grad_fn}


def test_a_node_of_python_is_followed_without_a_view_of_its_result():
    y = Twice.apply(torch.ones(3, requires_grad=True))
    before = next_node()
    assert node_of(y) is y.grad_fn and len(nodes_of([y])) == 2
    assert next_node() == before + 1  # of counting itself
