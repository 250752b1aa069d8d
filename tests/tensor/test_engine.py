"""torch's engine as both ways of a backward call it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from disttensor import callbacks
from disttensor.tensor import backward


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the backward")


@pytest.mark.parametrize("run", [backward.run_backward, backward.run_given])
def test_who_follows_backwards_hears_of_those_that_fail(run):
    heard = mock.Mock()
    x = torch.ones(3, requires_grad=True)
    with mock.patch.object(callbacks, "after_backward_error", [heard, heard]):
        run([x * 3], [torch.ones(3)], False)
        assert x.grad.tolist() == [3.0] * 3 and not heard.called
        with pytest.raises(ArithmeticError, match="in the backward"):
            run([Fails.apply(x)], [torch.ones(3)], False)
    assert heard.call_count == 2
    y = x * 3
    run([y], [torch.ones(3)], True, inputs=[x])
    run([y], [torch.ones(3)], False)
    assert x.grad.tolist() == [9.0] * 3
