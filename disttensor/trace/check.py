"""Compares a replay with eager calls: the same bits, the same program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from disttensor.errors import name_of, show_place
from disttensor.pytree import CONSTANTS, collect
from disttensor.random import counter
from disttensor.tensor.dist_tensor import DistTensor
from disttensor.trace.record import Program

Tensor = torch.Tensor


def compare_with_eager(
    name: str, program: Program, inputs: Sequence[Any], written: Sequence[Any],
    eager: Callable[[], tuple[Any, Program | str]],
) -> Any:  # fmt: skip
    """Returns the result of ``eager()``. Raises RuntimeError if the program returns or writes (to
    ``written``) other bits or specs, or if a new recording gives another program."""
    before = counter.get_state(), torch.get_rng_state(), _copies(written)
    mine = _described(program.run(*inputs), written)
    torch.set_rng_state(before[1])
    counter.set_state(*before[0])
    with torch.no_grad():
        for x, was in zip(written, before[2], strict=True):
            _local(x).detach().copy_(was)
    result, again = eager()
    theirs = _described(result, written)
    if len(mine) != len(theirs):
        raise RuntimeError(f"replay of {name}: {len(mine)} tensors in place of {len(theirs)}")
    for i, ((spec, grad, bits), (spec_eager, grad_eager, bits_eager)) in enumerate(
        zip(mine, theirs, strict=True)
    ):
        if spec != spec_eager or grad is not grad_eager:
            raise RuntimeError(
                f"replay of {name}: result {i} is {spec}, requires_grad={grad}; the calls one by "
                f"one give {spec_eager}, requires_grad={grad_eager}"
            )
        if not torch.equal(bits, bits_eager):
            raise RuntimeError(
                f"replay of {name}: result {i}, {spec}, differs from that of the calls one by one. "
                "Does it depend on something that changes and is no argument, attribute or "
                f"closure? What was recorded:\n{program.text}"
            )
    if isinstance(again, Program) and (change := difference(program, again)):
        raise RuntimeError(
            f"replay of {name}: recorded once more it is another program: {change}. Does it depend "
            f"on something that changes and is no argument, attribute or closure? Then:\n"
            f"{program.text}\nnow:\n{again.text}"
        )
    return result


def difference(program: Program, again: Program | str) -> str:
    """Returns the first line in which a new recording differs from a program, or ""."""
    if isinstance(again, str):
        return again
    for line, new in zip_longest(program.lines, again.lines):
        then = "" if line is None else _with_constants(line.text, program)
        now = "" if new is None else _with_constants(new.text, again)
        if then != now:
            place = "" if new is None or new.place is None else f" at {show_place(new.place)}"
            return f"{now or 'nothing'}{place} in place of {then or 'nothing'}"
    results = [_with_constants(p.result, p) for p in (program, again)]
    return "" if results[0] == results[1] else f"it returns {results[1]} in place of {results[0]}"


def _with_constants(text: str, program: Program) -> str:
    """Returns the text of a line with the values of its constants."""

    def show(found: re.Match[str]) -> str:
        value = program.scope[found[0]]
        if type(value) in CONSTANTS:
            return f"{value!r}"
        name = name_of(value) if callable(value) else ""
        return name or type(value).__qualname__

    return re.sub(r"\bc\d+\b", show, text)


def _local(x: Any) -> Tensor:
    local: Tensor = x.local if isinstance(x, DistTensor) else x
    return local


def _copies(tensors: Sequence[Any]) -> list[Tensor]:
    return [_local(x).detach().clone() for x in tensors]


def _described(result: Any, written: Sequence[Any]) -> list[tuple[str, bool, Tensor]]:
    """Returns spec, requires_grad and bits of each tensor."""
    return [
        (
            repr(x.spec) if isinstance(x, DistTensor) else f"{x.dtype}{list(x.shape)}",
            _local(x).requires_grad,
            _local(x).detach().contiguous().view(-1).clone().view(torch.uint8),
        )
        for x in (*collect(result, []), *written)
    ]
