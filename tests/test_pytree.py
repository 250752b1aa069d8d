"""Tensors in what modules are given, and give."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from disttensor.fsdp.mixed_precision import _CastInputs
from disttensor.pytree import find_tensors, replace_tensors

A, B = torch.ones(1), torch.zeros(2)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Fields:
    first: Any
    second: Any = 3
    made: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    first: Any
    second: Any


class Keys(OrderedDict):
    pass


class Thing:
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second, self.me = first, second, self


FOUND = {
    "tensor": A,
    "list": [3, A],
    "pair": Pair("x", A),
    "dict of dicts": {"x": {"y": [A]}},
    "keys": Keys(x=A),
    "dataclass": Fields(A),
    "frozen in a dataclass": Fields(Frozen([A], None)),
    "dataclass in a list": ([Fields((A, 1))],),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_structure_is_rebuilt_with_other_tensors(kind: str) -> None:
    value = FOUND[kind]
    assert [id(t) for t in find_tensors(value)] == [id(A)]
    other = replace_tensors(value, lambda t: B)
    assert [id(t) for t in find_tensors(other)] == [id(B)] and type(other) is type(value)
    assert [id(t) for t in find_tensors(value)] == [id(A)], "it is a copy"


def test_the_order_is_that_of_appearance() -> None:
    assert [t.numel() for t in find_tensors([A, Fields(B, {"x": A}), Pair(B, A)])] == [
        1,
        2,
        1,
        2,
        1,
    ]


@pytest.mark.parametrize("value", [Fields(A), Frozen([A, {"x": (3, A)}], 2)], ids=["one", "nested"])
def test_a_dataclass_whose_tensors_stay_is_itself(value: Any) -> None:
    assert replace_tensors(value, lambda t: t) is value


def test_a_dataclass_that_leads_to_itself() -> None:
    value = Fields(A)
    value.second = [value]
    assert [id(t) for t in find_tensors(value)] == [id(A)]


def test_attributes_of_objects_are_looked_at_where_they_are_asked_for() -> None:
    value = {"x": Thing(A, [Thing(B, None)])}
    assert find_tensors(value) == [] and replace_tensors(value, lambda t: None)["x"].first is A
    assert [t.numel() for t in find_tensors(value, attributes=True)] == [1, 2]
    again = replace_tensors(value, lambda t: t + 1, attributes=True)
    assert again["x"] is value["x"], "others may hold it, too"
    assert [t.tolist() for t in find_tensors(again, attributes=True)] == [[2.0], [1.0, 1.0]]


@pytest.mark.parametrize("value", [nn.Linear(1, 1), Thing, torch, A.size(), len, "A"], ids=str)
def test_what_is_no_structure(value: Any) -> None:
    assert find_tensors([value], attributes=True) == []
    assert replace_tensors([value], lambda t: None, attributes=True)[0] == value


def test_arguments_in_a_dataclass_are_cast() -> None:
    numbers = torch.arange(2)
    cast = _CastInputs(torch.bfloat16)(nn.Module(), (Fields(A, numbers),), {"more": Frozen(B, "x")})
    assert cast is not None
    (given,), named = cast
    assert given.first.dtype is named["more"].first.dtype is torch.bfloat16
    assert given.second is numbers and A.dtype is torch.float32
