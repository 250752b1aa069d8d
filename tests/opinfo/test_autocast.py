"""A part of PyTorch's own samples, cut over four ranks, under autocast."""

from __future__ import annotations

import pytest
import torch

from ops.registry import RULES, Rule, replace_rule
from tests.opinfo import autocast
from tests.opinfo.opinfo_call import OPS
from tests.support.part import part


@pytest.mark.limit(300)
def test_pieces_have_the_dtype_of_the_whole() -> None:
    names = sorted(autocast.rules_of(list(OPS)))
    names = part(names, len(names) // 24)
    wrong = autocast.sweep(names, most=3)
    assert not wrong, "\n".join(f"{name}: {found[0]}" for name, found in wrong.items())


def test_another_dtype_of_an_empty_piece_is_found() -> None:
    rule = RULES[torch.nn.functional.conv1d]

    def factors(*args, **kwargs):
        return rule.factors(*args, **kwargs).replace(local=lambda call: without_autocast(call))

    def without_autocast(call):
        def run(input, *rest, **words):
            if 0 in call.outputs[0].local_shape:
                return input.new_zeros(call.outputs[0].local_shape)
            return call.func(input, *rest, **words)

        return run

    replace_rule(torch.nn.functional.conv1d, Rule("conv1d", factors))
    try:
        assert "the ranks' dtypes differ" in autocast.problems("nn.functional.conv1d", 2)[0]
    finally:
        replace_rule(torch.nn.functional.conv1d, rule)
