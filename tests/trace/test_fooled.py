"""What may change between two calls without a call that says so: the replay after it gives what
the calls one by one give, or there is none."""

from __future__ import annotations

import functools
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from tests.support.pool import on_ranks
from tests.trace.test_replay import fed, mesh_of
from tests.trace.twins import bits

SCALE = 2.0
SCALES = {"by": 2.0}
SETTINGS = types.ModuleType("settings")
SETTINGS.scale = 2.0


class Config:
    scale = 2.0

    def __init__(self):
        self.by = 2.0


CONFIG = Config()


def by_global(x):
    return x * SCALE


@functools.lru_cache(maxsize=1)
def _name():
    return SETTINGS


def _noting(method):
    @functools.wraps(method)
    def noted(*args):
        return method(*args)

    return noted


class Net(nn.Module):
    """Reads ``way`` of its scale."""

    by = only_there = 2.0

    def __init__(self, way=""):
        super().__init__()
        self.way, self.linear, self.config = way, nn.Linear(6, 6), Config()
        self.array, self.act = np.full(3, 2.0), lambda x: x * SCALE
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.named = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.ReLU()})
        self.register_buffer("mask", torch.ones(6))
        self.mask.by = 2.0

    def scaled(self, x):
        return x * 2.0

    @_noting
    def decorated(self, x):
        return x * self.only_there

    def forward(self, x):
        way = self.way
        if way == "array":
            return x * float(self.array[0])
        if way == "attribute":
            return x * self.mask.by
        if way == "config":
            return x * self.config.by
        if way == "class":
            return x * self.by
        if way == "act":
            return self.act(x)
        if way == "helper":
            return by_global(x)
        if way == "dict":
            return x * SCALES["by"]
        if way == "settings":
            return x * SETTINGS.scale
        if way == "method":
            return self.scaled(x)
        if way == "decorated":
            return self.decorated(x)
        if way == "mask":
            return x * self.mask.sum().to(torch.float32) + (self.mask.dtype == torch.float64)
        for layer in [*self.layers, *self.named.values()]:
            x = layer(x)
        return self.linear(x)


class Below(Net):
    pass


def _set(owner, name, value):
    return lambda: setattr(owner, name, value)


def of_module(way, change, kind=Net):
    def make():
        net = dt.shard_module(kind(way), mesh_of(1), {})
        return net, lambda: change(net)

    return make


def _other(m):
    m.scaled = lambda x: x * 3.0


def _code(new):
    def change():
        target = Net.scaled
        target.__code__ = new.__code__

    return change


def function(make):
    return make


def _local(change, f):
    return lambda: (f, change)


def closure_array():
    a = np.full(3, 2.0)
    return (lambda x: x * float(a[0])), lambda: a.fill(3.0)


def closure_config():
    return (lambda x: x * CONFIG.scale), _set(Config, "scale", 3.0)


def class_global():
    return (lambda x: x * Config.scale), _set(Config, "scale", 3.0)


def module_global():
    return (lambda x: x * SETTINGS.scale), _set(SETTINGS, "scale", 3.0)


def module_closure():
    held = SETTINGS
    return (lambda x: x * held.scale), _set(SETTINGS, "scale", 3.0)


def default():
    def f(x, by=2.0):
        return x * by

    def change():
        f.__defaults__ = (3.0,)

    return f, change


def code():
    def f(x):
        return x * 2.0

    def g(x):
        return x * 3.0

    def change():
        f.__code__ = g.__code__

    return f, change


def negative_zero():
    by = 0.0

    def change():
        nonlocal by
        by = -0.0

    return (lambda x: x * by), change


def nested_list():
    held = [[1.0], {"a": (2.0, [3.0])}]
    return (lambda x: x * held[1]["a"][1][0]), lambda: held[1]["a"][1].__setitem__(0, 4.0)


def object_list():
    held = Config()
    held.scales = [2.0]
    return (lambda x: x * held.scales[0]), lambda: held.scales.__setitem__(0, 3.0)


def ordered():
    from collections import OrderedDict

    held = OrderedDict(a=2.0, b=3.0)
    return (lambda x: x * next(iter(held.values()))), lambda: held.move_to_end("a")


def numpy_number():
    by = np.float64(2.0)

    def change():
        nonlocal by
        by = np.float64(3.0)

    return (lambda x: x * float(by)), change


def wrapped():
    @functools.wraps(by_global)
    def f(x):
        return by_global(x)

    return f, _set(sys.modules[__name__], "SCALE", 3.0)


def partial():
    listed = [2.0]
    return functools.partial(lambda by, x: x * by[0], listed), lambda: listed.__setitem__(0, 3.0)


def determinism():
    return (
        lambda x: x * (3.0 if torch.are_deterministic_algorithms_enabled() else 2.0),
        lambda: torch.use_deterministic_algorithms(True),
    )


def default_dtype():
    return (lambda x: x + torch.ones(6)), lambda: torch.set_default_dtype(torch.float64)


CASES = {
    "an array in a closure": closure_array, "an attribute of a global": closure_config,
    "of a class": class_global, "of a module that is a global": module_global,
    "of a module in a closure": module_closure, "a default": default, "code": code,
    "0.0 is not -0.0": negative_zero, "deep in a list": nested_list,
    "a list in an object": object_list, "order of a dict": ordered,
    "a number of numpy": numpy_number,
    "under wraps": wrapped, "partial": partial, "determinism": determinism,
    "default dtype": default_dtype,
    "module: array": of_module("array", lambda m: m.array.fill(3.0)),
    "module: attribute of a buffer": of_module("attribute", lambda m: setattr(m.mask, "by", 3.0)),
    "module: config": of_module("config", lambda m: setattr(m.config, "by", 3.0)),
    "module: class": of_module("class", lambda m: setattr(Net, "by", 3.0)),
    "module: class below": of_module("class", lambda m: setattr(Net, "by", 3.0), Below),
    "module: act": of_module("act", lambda m: setattr(sys.modules[__name__], "SCALE", 3.0)),
    "module: helper": of_module("helper", lambda m: setattr(sys.modules[__name__], "SCALE", 3.0)),
    "module: helper below": of_module(
        "helper", lambda m: setattr(sys.modules[__name__], "SCALE", 3.0), Below),
    "module: dict": of_module("dict", lambda m: SCALES.update(by=3.0)),
    "module: settings": of_module("settings", lambda m: setattr(SETTINGS, "scale", 3.0)),
    "module: method": of_module("method", _other),
    "module: method of class": of_module(
        "method", lambda m: setattr(Net, "scaled", lambda self, x: x * 3.0)),
    "module: decorated": of_module("decorated", lambda m: setattr(Net, "only_there", 3.0)),
    "module: code": of_module("method", lambda m: _code(lambda self, x: x * 3.0)()),
    "module: buffer by data": of_module(
        "mask", lambda m: setattr(m.mask, "data", m.mask.data.double())),
    "module: insert": of_module("", lambda m: m.layers.insert(0, nn.ReLU())),
    "module: pop": of_module("", lambda m: m.named.pop("b")),
    "module: clear": of_module("", lambda m: m.named.clear()),
    "module: _modules": of_module("", lambda m: m.named._modules.update(b=nn.Sigmoid())),
}  # fmt: skip


def restored():
    """What the cases change is as it was."""
    here = sys.modules[__name__]
    kept = Net.scaled, Net.scaled.__code__

    def restore():
        here.SCALE, Net.scaled = 2.0, kept[0]
        kept[0].__code__ = kept[1]
        Net.by = Net.only_there = Config.scale = SETTINGS.scale = SCALES["by"] = 2.0
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)

    return restore


@on_ranks(1)
@pytest.mark.parametrize("name", CASES)
def test_a_change_that_nobody_tells(name):
    f, change = CASES[name]()
    (x,) = fed(mesh_of(1), 5, 6)()
    fast = dt.replay(f)
    forward = fast.forward if isinstance(f, nn.Module) else fast
    before = [bits(fast(x)) for _ in range(3)]
    assert before[0] == before[2] and forward.replays == 2, forward.why()
    restore = restored()
    try:
        change()
        wanted = bits(forward.eager(x))
        assert wanted != before[0]
        assert bits(fast(x)) == wanted, forward.programs
    finally:
        restore()


# An argument is made in another way -> what is asked of it.
WAYS = {
    "base": lambda x: x.detach(),
    "transposed": lambda x: x.detach().t().contiguous().t(),
    "part": lambda x: torch.cat([x, x], 1).detach()[:, 6:],
    "leaf": lambda x: x.detach().requires_grad_(),
    "product": lambda x: x.detach().requires_grad_() * 1,
    "hooked": lambda x: _hooked(x.detach().requires_grad_()),
    "inference": lambda x: _inferred(x),
    "parameter": lambda x: nn.Parameter(x.detach()),
    "noted": lambda x: _noted(x.detach()),
}
ASKED = {
    "view": lambda x: x.view(-1).relu(),
    "contiguous": lambda x: x.contiguous(),
    "is_contiguous": lambda x: x * (2 if x.is_contiguous() else 3),
    "stride": lambda x: x * x.stride(0),
    "is_leaf": lambda x: x * (2 if x.is_leaf else 3),
    "grad_fn": lambda x: x * (2 if x.grad_fn is None else 3),
    "is_inference": lambda x: x * (2 if x.is_inference() else 3),
    "parameter": lambda x: x * (2 if isinstance(x, nn.Parameter) else 3),
    "attribute": lambda x: x * getattr(x, "by", 3),
}


def _hooked(x):
    x.register_hook(lambda g: g * 3)
    return x


def _noted(x):
    x.by = 2
    return x


def _inferred(x):
    with torch.inference_mode():
        return x * 1


@on_ranks(1)
@pytest.mark.parametrize("asked", ASKED)
def test_arguments_of_one_spec_made_in_different_ways(asked):
    f = ASKED[asked]
    (data,) = fed(mesh_of(1), 6, 6)()

    def step(run, way):
        x = WAYS[way](data)
        try:
            y = run(x)
        except RuntimeError as error:  # a view of what cannot be viewed
            return str(error)
        if y.requires_grad:
            (y * y).sum().backward()
        grad = bits(x.grad) if x.is_leaf else None
        return bits(y), y.stride(), y is x, grad

    for first in WAYS:
        for second in WAYS:
            fast = dt.replay(lambda x: f(x))
            for way in (first, first, second):
                assert step(fast, way) == step(f, way), (first, second, fast.programs)


@on_ranks(1)
def test_constants_that_are_equal_are_told_apart():
    (x,) = fed(mesh_of(1), 5, 6)()
    f = dt.replay(lambda x, by: x * by)
    for by in (0.0, 0.0, -0.0, 0, False, 0j, -0.0):
        assert bits(f(x, by)) == bits(x * by)
    assert f.replays == 2
    listed = dt.replay(lambda xs, by: xs[0] * by)
    for _ in range(3):
        assert bits(listed([x], by=2)) == bits(x * 2)
    assert listed.replays == 2


def _numbers(*values):
    return torch.tensor(values)


FLAGS = _numbers(1, 0, 1, 0), _numbers(1, 1, 1, 0)
COUNTS = torch.tensor(2), torch.tensor(3)
# The shape of a regular tensor depends on data: what is computed, and two arguments.
SHAPES = {
    "nonzero": (lambda x, t: x / len(t.nonzero()[:, 0]), *FLAGS),
    "a mask": (lambda x, t: x / t[t > 0].numel(), *FLAGS),
    "where": (lambda x, t: x / torch.where(t > 0)[0].numel(), *FLAGS),
    "rows": (lambda x, t: x[:, t.nonzero()[:, 0]], *FLAGS),
    "unique": (lambda x, t: x / len(t.unique()), *FLAGS[:1], _numbers(1, 2, 3, 4)),
    "bincount": (lambda x, t: x / torch.bincount(t).shape[0], *FLAGS[:1], _numbers(1, 2, 3, 4)),
    "one_hot": (lambda x, t: x / F.one_hot(t).numel(), *FLAGS[:1], _numbers(1, 2, 3, 4)),
    "repeat_interleave": (lambda x, t: x / torch.repeat_interleave(t).numel(), *FLAGS),
    "tensor_split": (lambda x, t: x / len(torch.ones(6).tensor_split(t)[0]), *FLAGS),
    "arange": (lambda x, t: x[:, torch.arange(t)], *COUNTS),
    "arange of floats": (lambda x, t: x / len(torch.arange(0, t)), *(t + 0.5 for t in COUNTS)),
    "ones": (lambda x, t: x / torch.ones(t).numel(), *COUNTS),
    "a tuple of sizes": (lambda x, t: x / torch.zeros((1, t)).numel(), *COUNTS),
    "expand": (lambda x, t: x / torch.ones(1).expand(t).numel(), *COUNTS),
}  # fmt: skip
SAME_SHAPES = {
    "a number": lambda x, t: x * (t.sum() + torch.exp(t[0].float())),
    "an index": lambda x, t: x[:, t.sum()] * torch.arange(6)[t[0]],
    "where of three": lambda x, t: x * torch.where(t > 0, t, 2).sum(),
    "classes": lambda x, t: x * F.one_hot(t, 5).sum(),
    "repeated": lambda x, t: x * t.repeat_interleave(2).cos().sum(),
}


@on_ranks(1)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_regular_tensors_that_depend_on_data_are_not_recorded(name):
    f, first, second = SHAPES[name]
    (x,) = fed(mesh_of(1), 5, 6)()
    fast = dt.replay(f)
    for t in (first, first, second):
        assert bits(fast(x, t)) == bits(f(x, t))
    assert fast.replays == 0 and "depend on data" in fast.why()[0]


@on_ranks(1)
@pytest.mark.parametrize("name", SAME_SHAPES)
def test_data_of_regular_tensors_that_decide_on_no_shape_are_recorded(name):
    (x,) = fed(mesh_of(1), 5, 6)()
    fast = dt.replay(SAME_SHAPES[name])
    for t in (FLAGS[0], FLAGS[0], FLAGS[1]):
        assert bits(fast(x, t)) == bits(SAME_SHAPES[name](x, t))
    assert fast.replays == 2
