"""A forward reads a value in each way that Python has, and the value changes: a recorded program
has the result of the calls, or there is none, or the audit finds it."""

from __future__ import annotations

import builtins
import os
import sys
import textwrap
import types
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch

import disttensor as dt
from tests.support.part import part
from tests.support.pool import fake_world, on_ranks
from tests.trace.test_replay import mesh_of


class Way(NamedTuple):
    """``before`` defines what ``read`` reads, 2; ``change`` makes it 3. ``body``: lines of the
    forward before the value is read. ``recorded``: False for what no guard can see."""

    before: str
    read: str
    change: str
    body: str = ""
    recorded: bool = True


_OBJECT = "class A:\n    v = 2\na = A()\n"
_KEPT = "class A:\n    def __init__(self): self.v = 2\na = A()\n"
_PATH = "class A: pass\na = A(); a.b = A(); a.b.v = 2\n"
_HIDDEN = False

WAYS = {
    "a global": Way("v = 2", "v", "v = 3"),
    "a global of a helper": Way("v = 2\ndef f(): return v", "f()", "v = 3"),
    "an attribute read by a helper": Way(_OBJECT + "def f(a, y): return y * a.v", "f(a, 1)",
                                         "A.v = 3"),
    "an attribute of an argument of a helper": Way(_KEPT + "def f(b): return b.v", "f(a)",
                                                   "a.v = 3"),
    "an attribute of a function": Way("def act(): pass\nact.v = 2", "act.v", "act.v = 3"),
    "an attribute of a function that runs": Way("def act(): return act.v\nact.v = 2", "act()",
                                                "act.v = 3"),
    "a class": Way(_OBJECT, "a.v", "A.v = 3"),
    "a class, then the object": Way(_OBJECT, "a.v", "a.v = 3"),
    "a base": Way(_OBJECT + "class B(A): pass\nb = B()", "b.v", "A.v = 3"),
    "a base, then the class": Way(_OBJECT + "class B(A): pass\nb = B()", "b.v", "B.v = 3"),
    "super": Way(_OBJECT + "class B(A):\n    def f(self): return super().v\nb = B()", "b.f()",
                 "A.v = 3"),
    "a metaclass": Way("class M(type):\n    v = 2\nclass A(metaclass=M): pass", "A.v", "M.v = 3"),
    "a property of a metaclass": Way(
        "class M(type):\n    @property\n    def v(self): return self.w\n"
        "class A(metaclass=M): w = 2", "A.v", "A.w = 3"),
    "an object": Way(_KEPT, "a.v", "a.v = 3"),
    "an object, then its class": Way(_KEPT + "A.v = 3", "a.v", "del a.v"),
    "an object in an object": Way(_KEPT + "class B: pass\nb = B(); b.c = B(); b.c.a = a",
                                  "b.c.a.v", "a.v = 3"),
    "a slot": Way("class A:\n    __slots__ = ('v',)\na = A(); a.v = 2", "a.v", "a.v = 3"),
    "a slot of a base": Way("class B:\n    __slots__ = ('v',)\nclass A(B):\n    __slots__ = ()\n"
                            "a = A(); a.v = 2", "a.v", "a.v = 3"),
    "the class of an object": Way(_OBJECT + "class B:\n    v = 3", "a.v", "a.__class__ = B"),
    "the bases of a class": Way("class A: v = 2\nclass B: v = 3\nclass C(A): pass\nc = C()", "c.v",
                                "C.__bases__ = (B,)"),
    "an operator of a class": Way("class A:\n    def __neg__(self): return 2\na = A()", "-a",
                                  "A.__neg__ = lambda self: 3"),
    "a property": Way("class A:\n    v = property(lambda self: self.w)\na = A(); a.w = 2", "a.v",
                      "a.w = 3"),
    "a cached property": Way("import functools\nw = 2\nclass A:\n    @functools.cached_property\n"
                             "    def v(self): return w\na = A()", "a.v", "w = 3; del a.v"),
    "a descriptor": Way("class D:\n    w = 2\n    def __get__(self, o, k): return self.w\n"
                        "class A:\n    v = D()\na = A()", "a.v", "D.w = 3"),
    "an object of a descriptor": Way(
        "class D:\n    def __init__(self): self.w = 2\n    def __get__(self, o, k): return self.w\n"
        "class A:\n    v = D()\na = A()", "a.v", "vars(A)['v'].w = 3"),
    "__getattr__": Way("class A:\n    def __init__(self): self.d = {'v': 2}\n"
                       "    def __getattr__(self, n): return self.d[n]\na = A()", "a.v",
                       "a.d['v'] = 3"),
    "__getattribute__": Way("w = 2\nclass A:\n    def __getattribute__(self, n): return w\na = A()",
                            "a.v", "w = 3"),
    "__getattribute__ of a computed name": Way(
        "class A:\n    def __init__(self): self.ab = 2\n    def __getattribute__(self, n):\n"
        "        return object.__getattribute__(self, 'a' + n)\na = A()", "a.b",
        "object.__setattr__(a, 'ab', 3)"),
    "__getitem__": Way("class A:\n    w = 2\n    def __getitem__(self, i): return self.w\na = A()",
                       "a[0]", "A.w = 3"),
    "__call__": Way("class A:\n    w = 2\n    def __call__(self): return self.w\na = A()", "a()",
                    "A.w = 3"),
    "a closure": Way("def make():\n    v = 2\n    def f(): return v\n    def g():\n"
                     "        nonlocal v\n        v = 3\n    return f, g\nf, g = make()", "f()",
                     "g()"),
    "a default": Way("def f(v=2): return v", "f()", "f.__defaults__ = (3,)"),
    "a list as default": Way("def f(v=[2]): return v[0]", "f()", "f.__defaults__[0][0] = 3"),
    "a keyword's default": Way("def f(*, v=2): return v", "f()", "f.__kwdefaults__ = {'v': 3}"),
    "code": Way("def f(): return 2\ndef g(): return 3", "f()", "f.__code__ = g.__code__"),
    "a method of an object": Way(_OBJECT + "A.f = lambda self: 2", "a.f()", "a.f = lambda: 3"),
    "a method of a class": Way(_OBJECT + "A.f = lambda self: 2", "a.f()",
                               "A.f = lambda self: 3"),
    "a bound method": Way("class A:\n    v = 2\n    def f(self): return self.v\nf = A().f", "f()",
                          "A.v = 3"),
    "a static method": Way("w = 2\nclass A:\n    @staticmethod\n    def f(): return w", "A.f()",
                           "w = 3"),
    "a class method": Way("class A:\n    v = 2\n    @classmethod\n    def f(cls): return cls.v",
                          "A.f()", "A.v = 3"),
    "partial": Way("import functools\nl = [2]\nf = functools.partial(lambda l: l[0], l)", "f()",
                   "l[0] = 3"),
    "a keyword of partial": Way("import functools\nf = functools.partial(lambda v: v, v=2)", "f()",
                                "f.keywords['v'] = 3"),
    "a decorator": Way("import functools\nclass A: v = 2\ndef deco(f):\n    @functools.wraps(f)\n"
                       "    def g(): return f() * A.v\n    return g\n@deco\ndef f(): return 1",
                       "f()", "A.v = 3"),
    "a function below a decorator": Way(
        "import functools\nw = 2\ndef deco(f):\n    @functools.wraps(f)\n"
        "    def g(): return f()\n    return g\n@deco\ndef f(): return w", "f()", "w = 3"),
    "a context manager": Way("import contextlib\nw = 2\n@contextlib.contextmanager\n"
                             "def c(): yield w", "v", "w = 3", "with c() as v: pass"),
    "no_grad on a function": Way("import torch\nw = 2\n@torch.no_grad()\ndef f(): return w", "f()",
                                 "w = 3"),
    "a generator function": Way("w = 2\ndef f(): yield w", "next(f())", "w = 3"),
    "a comprehension": Way("w = 2", "[w for _ in range(1)][0]", "w = 3"),
    "a lambda in a dict": Way("w = 2\nd = {'f': lambda: w}", "d['f']()", "w = 3"),
    "single dispatch": Way("import functools\n@functools.singledispatch\ndef f(a): return 2\n"
                           "def g(a): return 3", "f(1)", "f.register(int, g)", recorded=_HIDDEN),
    "a kept result": Way(
        "import functools\nclass A: pass\n@functools.lru_cache\ndef f():\n    a = A(); a.v = 2\n"
        "    return a\nf()", "f().v", "f().v = 3"),
    "one of the kept results": Way(
        "import functools\n@functools.cache\ndef f(k): return {k: 2}\nf('a'), f('b')",
        "f('b')['b']", "f('b')['b'] = 3"),
    "kept results that are dropped": Way(
        "import functools\nclass A: v = 2\n@functools.lru_cache\ndef f(): return A()\nf()", "f().v",
        "f.cache_clear(); f().v = 3"),
    "a list": Way("l = [2]", "l[0]", "l[0] = 3"),
    "a dict": Way("d = {'v': 2}", "d['v']", "d['v'] = 3"),
    "a nested container": Way("d = {'a': [(0, [2])]}", "d['a'][0][1][0]", "d['a'][0][1][0] = 3"),
    "an ordered dict": Way("import collections\nd = collections.OrderedDict(v=2)", "d['v']",
                           "d['v'] = 3"),
    "a default dict": Way("import collections\nd = collections.defaultdict(lambda: 2)", "d['v']",
                          "d['v'] = 3"),
    "a counter": Way("import collections\nd = collections.Counter(v=2)", "d['v']", "d['v'] = 3"),
    "a deque": Way("import collections\nd = collections.deque([2])", "d[0]", "d[0] = 3"),
    "a chain of maps": Way("import collections\nd = collections.ChainMap({}, {'v': 2})", "d['v']",
                           "d['v'] = 3"),
    "a user's dict": Way("import collections\nd = collections.UserDict(v=2)", "d['v']",
                         "d['v'] = 3"),
    "a mapping proxy": Way("import types\nd = {'v': 2}\np = types.MappingProxyType(d)", "p['v']",
                           "d['v'] = 3"),
    "the size of a set": Way("s = {1, 2}", "len(s)", "s.add(3)"),
    "a subclass of dict": Way("class D(dict): pass\nd = D(v=2)", "d['v']", "d['v'] = 3"),
    "an attribute of an int": Way("class I(int): pass\ni = I(1); i.v = 2", "i.v", "i.v = 3"),
    "an enum": Way("import enum\nclass E(enum.Enum):\n    A = 2\nE.A.w = 2", "E.A.w",
                   "E.A.w = 3"),
    "the value of an enum": Way("import enum\nclass E(enum.Enum):\n    A = 2", "E.A.value",
                                "E.A._value_ = 3"),
    "a dataclass": Way("import dataclasses\n@dataclasses.dataclass\nclass A:\n    v: int = 2\n"
                       "a = A()", "a.v", "a.v = 3"),
    "asdict": Way("import dataclasses\n@dataclasses.dataclass\nclass A:\n    v: int = 2\na = A()",
                  "[*dataclasses.asdict(a).values()][0]", "a.v = 3"),
    "a frozen dataclass": Way("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass A:\n"
                              "    v: int = 2\na = A()", "a.v", "a = A(3)"),
    "a named tuple": Way("import collections\nA = collections.namedtuple('A', 'v')\na = A(2)",
                         "a.v", "a = A(3)"),
    "a simple namespace": Way("import types\na = types.SimpleNamespace(v=2)", "a.v", "a.v = 3"),
    "a namespace of argparse": Way("import argparse\na = argparse.Namespace(v=2)", "a.v",
                                   "a.v = 3"),
    "a module": Way("import types\nm = types.ModuleType('m'); m.v = 2", "m.v", "m.v = 3"),
    "an import inside": Way("import sys, types\nsys.modules['read_inside'] = m = "
                            "types.ModuleType('read_inside'); m.v = 2", "read_inside.v",
                            "m.v = 3", "import read_inside"),
    "from an import inside": Way("import sys, types\nsys.modules['read_inside'] = m = "
                                 "types.ModuleType('read_inside'); m.v = 2", "v", "m.v = 3",
                                 "from read_inside import v"),
    "a function of another module": Way(
        "import types\nm = types.ModuleType('m')\nexec('v = 2\\ndef f(): return v', vars(m))",
        "m.f()", "m.v = 3"),
    "a function of torch that is replaced": Way(
        "import torch", "3 if torch.is_complex(x) else 2", "torch.is_complex = lambda x: True"),
    "getattr": Way(_KEPT, "getattr(a, 'v')", "a.v = 3"),
    "getattr by a name in a dict": Way(_KEPT + "d = {'n': 'v'}", "getattr(a, d['n'])", "a.v = 3"),
    "getattr of a computed name": Way(_KEPT.replace("v", "value") + "n = 'val'",
                                      "getattr(a, n + 'ue')", "a.value = 3"),
    "getattr by format": Way(_KEPT.replace("v", "v1") + "n = 1", "getattr(a, f'v{n}')",
                             "a.v1 = 3"),
    "getattr with a default": Way("class A: pass\na = A()", "getattr(a, 'v', 2)", "a.v = 3"),
    "hasattr": Way("class A: pass\na = A()", "3 if hasattr(a, 'v') else 2", "A.v = 3"),
    "an attribute that may be missing": Way("class A: pass\na = A()", "v", "a.v = 3",
        "try:\n    v = a.v\nexcept AttributeError:\n    v = 2"),
    "vars": Way(_KEPT, "vars(a)['v']", "a.v = 3"),
    "__dict__": Way(_KEPT, "a.__dict__['v']", "a.v = 3"),
    "__dict__ of a computed name": Way(_KEPT.replace("v", "ab") + "n = 'a'",
                                       "a.__dict__[n + 'b']", "a.ab = 3"),
    "globals": Way("v = 2", "globals()['v']", "v = 3"),
    "globals by a computed name": Way("ab = 2", "globals()['a' + 'b']", "ab = 3"),
    "attrgetter": Way("import operator\n" + _KEPT + "f = operator.attrgetter('v')", "f(a)",
                      "a.v = 3", recorded=_HIDDEN),
    "itemgetter": Way("import operator\nd = [2]\nf = operator.itemgetter(0)", "f(d)", "d[0] = 3",
                      recorded=_HIDDEN),
    "attrgetter of a path": Way("import operator\n" + _PATH, "operator.attrgetter('b.v')(a)",
                                "a.b.v = 3"),
    "reduce of getattr": Way("import functools\n" + _PATH,
                             "functools.reduce(getattr, 'b.v'.split('.'), a)", "a.b.v = 3"),
    "sys.modules": Way("import sys\nv = 2", "sys.modules[__name__].v", "v = 3", recorded=_HIDDEN),
    "import_module": Way("import importlib\nv = 2", "importlib.import_module(__name__).v", "v = 3",
                         recorded=_HIDDEN),
    "an array of objects": Way(_KEPT + "import numpy\nd = numpy.array([a], dtype=object)", "d[0].v",
                               "a.v = 3", recorded=_HIDDEN),
    "a name in builtins": Way("import builtins\nbuiltins.READ_INSIDE = 2", "READ_INSIDE",
                              "builtins.READ_INSIDE = 3"),
    "the anomaly mode": Way("import torch", "3 if torch.is_anomaly_enabled() else 2",
                            "torch.autograd.set_detect_anomaly(True)"),
    "the seed": Way("import torch\ntorch.manual_seed(2)", "torch.initial_seed()",
                    "torch.manual_seed(3)", recorded=_HIDDEN),
    "the version of a tensor": Way("import torch\nw = torch.ones(1).add_(1).add_(1)", "w._version",
                                   "w.add_(1)", recorded=_HIDDEN),
    "a builtin that a global hides later": Way("", "len([1, 1])", "len = lambda l: 3"),
    "type(self)": Way("class A:\n    v = 2\n    def f(self): return type(self).v\na = A()", "a.f()",
                      "A.v = 3"),
    "an array of numpy": Way("import numpy\na = numpy.full(3, 2)", "int(a[0])", "a[0] = 3"),
    "a number of numpy": Way("import numpy\na = numpy.int64(2)", "int(a)", "a = numpy.int64(3)"),
    "an array": Way("import array\na = array.array('l', [2])", "a[0]", "a[0] = 3"),
    "bytes that change": Way("a = bytearray(b'\\x02')", "a[0]", "a[0] = 3"),
    "a memory view": Way("b = bytearray(b'\\x02'); a = memoryview(b)", "a[0]", "b[0] = 3",
                         recorded=_HIDDEN),
    "an iterator": Way("i = iter([2] * 3 + [3] * 9)", "next(i)", "", recorded=_HIDDEN),
    "a generator": Way("def g():\n    yield from [2] * 3 + [3] * 9\ni = g()", "next(i)", "",
                       recorded=_HIDDEN),
    "a counter of itertools": Way("import itertools\ni = itertools.count(2, 0)", "next(i)",
                                  "i = itertools.count(3, 0)", recorded=_HIDDEN),
    "a context variable": Way("import contextvars\nc = contextvars.ContextVar('c', default=2)",
                              "c.get()", "c.set(3)"),
    "a local of threads": Way("import threading\nc = threading.local(); c.v = 2", "c.v", "c.v = 3",
                              recorded=_HIDDEN),
    "a weak reference": Way(_KEPT + "import weakref\nw = weakref.ref(a)", "w().v", "a.v = 3",
                            recorded=_HIDDEN),
    "the environment": Way("import os\nos.environ['READ_INSIDE'] = '2'",
                           "int(os.environ['READ_INSIDE'])", "os.environ['READ_INSIDE'] = '3'",
                           recorded=_HIDDEN),
    "getenv": Way("import os\nos.environ['READ_INSIDE'] = '2'", "int(os.getenv('READ_INSIDE'))",
                  "os.environ['READ_INSIDE'] = '3'", recorded=_HIDDEN),
    "a file": Way("import pathlib, tempfile\nf = pathlib.Path(tempfile.mktemp())\n"
                  "f.write_text('2')",
                  "int(f.read_text())", "f.write_text('3')", recorded=_HIDDEN),
    "the clock": Way("import time\nt = time.time() + 1e9", "2 if time.time() < t else 3",
                     "t = 0.0", recorded=_HIDDEN),
    "eval": Way("v = 2", "eval('v')", "v = 3", recorded=_HIDDEN),
}  # fmt: skip
_numbers = count()


def defined(way: Way, forward: str) -> types.ModuleType:
    """A module with the function ``forward(x)`` and ``change()``."""
    module = types.ModuleType(f"reads{next(_numbers)}")
    sys.modules[module.__name__] = module
    body = textwrap.indent(way.body or "pass", "    ")
    exec(f"{way.before}\ndef forward(x):\n{body}\n    return {forward.format(way.read)}\n",
         vars(module))  # fmt: skip
    return module


def check(name: str, run: Any, plain: Any, module: types.ModuleType) -> None:
    """Compares calls before and after the change."""
    way, kept = WAYS[name], torch.is_complex
    try:
        for _ in range(3):
            assert run() == plain(2)
        assert (run.forward.replays > 0) == way.recorded, run.forward.why()
        exec(way.change, vars(module))
        for _ in range(3):
            assert run() == plain(3)
    finally:
        torch.is_complex = kept
        torch.autograd.set_detect_anomaly(False)
        vars(builtins).pop("READ_INSIDE", None)
        os.environ.pop("READ_INSIDE", None)
        sys.modules.pop("read_inside", None)


class Run:
    def __init__(self, forward, *args):
        self.forward, self.args = forward, args

    def __call__(self):
        return self.forward(*self.args).tolist()


@on_ranks(1)
@pytest.mark.parametrize("name", WAYS)
def test_replays(name):
    module = defined(WAYS[name], "x * ({})")
    x = dt.ones(2, mesh=mesh_of(1))
    check(name, Run(dt.replay(module.forward), x), lambda v: [float(v)] * 2, module)


@on_ranks(1)
@pytest.mark.parametrize("name", part(list(WAYS), 6))
def test_compiled(name):
    module = defined(WAYS[name], "x * ({})")
    x = dt.ones(2, mesh=mesh_of(1))
    compiled = dt.compile(module.forward, backend="eager")
    check(name, Run(compiled, x), lambda v: [float(v)] * 2, module)


class Skipped(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = torch.nn.Parameter(torch.ones(2)), function

    def forward(self, x):
        return self.function(x * self.weight)


class Shape(Run):
    def __call__(self):
        return list(self.args[0](self.args[1]).shape)


@pytest.mark.parametrize("name", WAYS)
def test_modules_of_other_ranks(name):
    with fake_world(2, 1):
        mesh = dt.ProcessMesh([0], ("x",))
        module = defined(WAYS[name], "x.repeat({})")
        skipped = dt.pipeline.skip(dt.shard_module(Skipped(module.forward), mesh))
        x = dt.shard_tensor(torch.ones(2), mesh)
        check(name, Shape(skipped.forward, skipped, x), lambda v: [2 * v], module)
