"""What a program depends on changes: it is recorded anew, or the calls go one by one; what cannot
be recorded says why."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor import Partial, Replicate, Shard
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.trace.test_replay import MLP, fed, mesh_of
from tests.trace.twins import agree, twice

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def on_one(net=MLP):
    """A module on a mesh of one, and a batch for it."""
    mesh = mesh_of(1)
    return twice(dt.shard_module(net(), mesh, {})), fed(mesh, 5, 6)


def parameter(m):
    new = dt.shard_tensor(randn(10, seed=5, dtype=torch.float32), mesh_of(1), (R, R))
    m.up.bias = nn.Parameter(new)


def loaded(m):
    m.load_state_dict({k: v.detach() * 2 for k, v in m.state_dict().items()})


def frozen(m):
    m.up.weight.requires_grad_(False)


def data(m):
    m.down.weight.data = m.down.weight.data * 2


def in_double(m):
    m.double().float()


def hooked(m):
    m.up.weight.register_hook(lambda g: g * 3)


# What is done to the module between calls -> is the call after it a replay?
CHANGES = {
    "nothing": (lambda m: None, True),
    "a parameter is another one": (parameter, False),
    "load_state_dict": (loaded, True),
    "a parameter is frozen": (frozen, False),
    "its data is replaced": (data, True),
    "to and fro": (in_double, True),
    "an attribute": (lambda m: setattr(m, "scale", 2.0), False),
    "a child is another one": (lambda m: setattr(m, "drop", nn.ReLU()), False),
    "eval": (lambda m: m.eval(), False),
    "train": (lambda m: m.train(), True),
    "a child alone in eval": (lambda m: m.drop.eval(), False),
    "a hook on a parameter": (hooked, True),
    "an optimizer step": (lambda m: torch.optim.SGD(m.parameters(), 0.1).step(), True),
    "gradients": (lambda m: m.up.weight.sum().backward(), True),
}  # fmt: skip


@on_ranks(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    make, batch = on_one()
    change, still = CHANGES[name]
    agree(make, batch, batch, batch, batch, steps=[None, None, change], replays=3 if still else 2)


@on_ranks(2)
@pytest.mark.parametrize("name", ["a hook on a parameter", "a parameter is frozen", "data"])
def test_a_change_is_seen_where_uses_vary(name):
    mesh = mesh_of(2)
    change = {"data": data, **{k: v[0] for k, v in CHANGES.items()}}[name]
    make = twice(dt.shard_module(MLP(), mesh, {"up.*": [R, S0], "down.weight": [R, S1]}))
    batch = fed(mesh, 5, 6, at=(R, S0))
    agree(make, *[batch] * 4, steps=[None, None, change], replays=-1)


class Cuts(MLP):
    """Computes with a piece of a weight that is replicated."""

    def forward(self, x):
        weight = self.up.weight
        return F.linear(x, dt.reshard(weight, weight.process_mesh, [R, S0]))


@on_ranks(2)
def test_a_hook_on_a_parameter_that_is_cut_is_seen():
    mesh = mesh_of(2)
    make, batch = twice(dt.shard_module(Cuts(), mesh, {})), fed(mesh, 5, 6, at=(R, R))
    agree(make, *[batch] * 4, steps=[None, None, hooked], replays=3)


@on_ranks(1)
def test_a_hook_on_a_module_in_it_ends_the_replays_and_its_removal_begins_them_again():
    make, batch = on_one()
    seen = []
    handles = {}

    def hook(m):
        handles[m] = m.up.register_forward_hook(lambda *_: seen.append(1))

    fast = agree(
        make, *[batch] * 6, replays=2,
        steps=[None, None, hook, None, lambda m: handles[m].remove(), None],
    )  # fmt: skip
    assert fast.forward.why() == ["there are hooks on modules in it"] and len(seen) == 4


@on_ranks(1)
def test_hooks_on_the_module_itself_run():
    make, batch = on_one()
    fast, seen = dt.replay(make()), []
    fast.register_forward_hook(lambda m, args, out: seen.append(1) or out * 2)
    (x,) = batch()
    first = fast(x)
    assert torch.equal(first.full_tensor(), fast(x).full_tensor()) and len(seen) == 2
    assert fast.forward.replays == 1


class State(nn.Module):
    """Counts its calls, or keeps what came last, or grows a list."""

    def __init__(self, what="counts"):
        super().__init__()
        self.linear, self.what, self.count, self.list = nn.Linear(6, 6), what, 0, []
        self.last = None
        self.mask = None

    def forward(self, x):
        y = self.linear(x)
        if self.what == "counts":
            self.count += 1
        if self.what == "keeps":
            self.last = y
        if self.what == "grows":
            self.list.append(1)
        if self.what == "notes":
            self.linear.weight.count = getattr(self.linear.weight, "count", 0) + 1
        if self.what == "lazy" and self.mask is None:
            self.mask = dt.ones(6, mesh=x.process_mesh)
        return y * (self.count + 1) if self.mask is None else y * self.mask


SIDE_EFFECTS = {"counts": 0, "keeps": 0, "grows": 0, "notes": 0, "lazy": 3, "": 4}


@on_ranks(1)
@pytest.mark.parametrize("what", SIDE_EFFECTS)
def test_assignments_to_attributes(what):
    make, batch = on_one(lambda: State(what))
    fast = agree(make, *[batch] * 5, replays=SIDE_EFFECTS[what])
    if what and what != "lazy":
        assert fast.forward.why() == ["it assigns to attributes"]


SCALE = {"by": 2.0}
FACTOR = 2.0


def _helper(x):
    return x * FACTOR


class Holder:
    def __init__(self):
        self.factor = 2.0

    def __call__(self, x):
        return x * self.factor


@on_ranks(1)
@pytest.mark.parametrize("way", ["closure", "global", "dict", "of a helper", "object", "list"])
def test_what_a_function_reads_besides(way):
    global FACTOR
    (x,) = fed(mesh_of(1), 5, 6)()
    factor, listed, held = 2.0, [2.0], Holder()
    f = dt.replay({
        "closure": lambda t: t * factor, "global": lambda t: t * FACTOR,
        "dict": lambda t: t * SCALE["by"], "of a helper": lambda t: _helper(t), "object": held,
        "list": lambda t: t * listed[0],
    }[way])  # fmt: skip
    found = [f(x).full_tensor() for _ in range(2)]
    factor, FACTOR, SCALE["by"], held.factor, listed[0] = 3.0, 3.0, 3.0, 3.0, 3.0
    try:
        found += [f(x).full_tensor() for _ in range(2)]
        factor, FACTOR, SCALE["by"], held.factor, listed[0] = map(float, "33333")
        found.append(f(x).full_tensor())  # other objects, of equal values
    finally:
        FACTOR, SCALE["by"] = 2.0, 2.0
    full = x.full_tensor()
    wanted = [full * 2, full * 2, full * 3, full * 3, full * 3]
    assert all(map(torch.equal, found, wanted)) and f.replays == 3


class Kept:
    pass


def _creates(kept):
    def attribute(x):
        kept.last = x.sum()
        return x * 2

    def by_name(x):
        setattr(kept, "last", x.sum())  # noqa: B010
        return x * 2

    def in_a_global(x):
        global LAST
        LAST = x.sum()
        return x * 2

    return attribute, by_name, in_a_global


@on_ranks(1)
@pytest.mark.parametrize("way", range(3))
def test_what_the_first_call_creates_is_assigned_in_each_call(way):
    (x,) = fed(mesh_of(1), 5, 6, grad=False)()
    kept = Kept()
    fast = dt.replay(_creates(kept)[way])
    globals().pop("LAST", None)
    for y in (x, x * 2, x * 3):
        fast(y)
        last = LAST if way == 2 else kept.last
        assert last.item() == y.sum().item()
    assert fast.replays == 0 and fast.why()[0].startswith("it changes what it reads: ")


@on_ranks(1)
@pytest.mark.parametrize("name", ["trace", "helpers"])
def test_a_users_module_may_have_the_name_of_one_of_pythons(name, tmp_path, monkeypatch):
    file = tmp_path / f"{name}.py"
    file.write_text("SCALE = 2.0\n\ndef scaled(x):\n    return x * SCALE\n")
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    replayed = dt.replay(module.scaled)
    x = dt.ones(3, mesh=dt.init_mesh((1,)))
    assert [replayed(x).tolist() for _ in range(4)] == [[2.0] * 3] * 4
    module.SCALE = 3.0
    assert replayed(x).tolist() == [3.0] * 3


@on_ranks(1)
def test_a_captured_tensor_may_be_replaced_or_written_to():
    mesh = mesh_of(1)
    (x,) = fed(mesh, 5, 6)()
    w = dt.ones(6, mesh=mesh)
    f = dt.replay(lambda t: t * w)
    assert [f(x).sum().item() for _ in range(2)] == [(x * w).sum().item()] * 2
    w.mul_(3)
    assert f(x).sum().item() == (x * w).sum().item() and f.replays == 2
    w = dt.zeros(6, mesh=mesh)
    assert f(x).sum().item() == 0.0 and f.replays == 2


class Loud(torch.Tensor):
    pass


LOUD = torch.ones(6).as_subclass(Loud)


def _rolled(x):
    return x * random.random()


def _rewound(x):
    torch.rand(1)  # the generator is not as it was seeded
    state = torch.default_generator.get_state()
    numbers = torch.rand(6)
    torch.default_generator.set_state(state)
    return x * (numbers == torch.rand(6))


@torch.no_grad()
def _counted(x):
    return x * x.sum().item()


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def _hooked_inside(x):
    y = x * 2
    y.register_hook(lambda g: g * 2)
    return y


def _noted(x):
    y = x * 2
    y.note = "a"
    return y


def _switched(x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


REFUSED = {
    "reads a value": (_counted, "item reads a value"),
    "branches on a value": (lambda x: x * 2 if x.sum() > 0 else x, "reads a value"),
    "list of values": (lambda x: x * x.sum().tolist(), "reads a value"),
    "numpy": (lambda x: x * float(x.detach().numpy().sum()), "reads a value"),
    "print": (lambda x: (repr(x), x * 2)[1], "reads a value"),
    "random of Python": (_rolled, "Python's or numpy's generator"),
    "generator set back": (_rewound, "it seeds torch's generator"),
    "random outside of torch": (lambda x: x * dt.rand(6, mesh=x.process_mesh), "random numbers"),
    "another Function": (lambda x: Cut.apply(x) * 1, "custom autograd.Function"),
    "attribute of a result": (_noted, "it sets attributes"),
    "hook inside": (_hooked_inside, "register_hook"),
    "shape by data": (lambda x: x[x > 0], "depends on data"),
    "autocast inside": (_switched, "autocast"),
    "backward inside": (lambda x: torch.autograd.grad((x * 2).sum(), x)[0], ""),
    "leaf inside": (lambda x: (x.detach() * 2).requires_grad_(), "requires_grad_"),
    "rng inside": (lambda x: _in_rng(x), "a setting inside"),
    "checkpoint inside": (lambda x: _checkpointed(x), "checkpointing"),
    "writes to parts": (lambda x: (x.detach().t_(), x * 2)[1], ""),
    "returns another": (lambda x: (x * 2, object), "it returns a type"),
    "another class": (lambda x: (LOUD.shape, x * 2)[1], "a tensor of another class"),
}  # fmt: skip


def _in_rng(x):
    with dt.random.rng("invariant"):
        return F.dropout(x, 0.5)


def _checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda t: t.relu() * 2, x, use_reentrant=False)


@on_ranks(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_recorded_says_why(name):
    f, why = REFUSED[name]
    (x,) = fed(mesh_of(1), 5, 6)()
    fast = dt.replay(f)
    warnings.simplefilter("ignore", dt.errors.FallbackWarning)
    for _ in range(3):
        random.seed(0)
        dt.manual_seed(0)
        first = fast(x)
        random.seed(0)
        dt.manual_seed(0)
        second = f(x)
        first, second = (t[0] if isinstance(t, tuple) else t for t in (first, second))
        assert torch.equal(first.full_tensor(), second.full_tensor())
    if why:
        assert fast.replays == 0 and why in fast.why()[0], fast.why()


@on_ranks(2)
def test_a_pending_sum_from_outside_is_not_recorded():
    mesh = mesh_of(2)
    x = dt.ones(4, mesh=mesh, placements=(R, S0)).sum()
    f = dt.replay(lambda t: t.relu() + 1)
    assert [f(x).item() for _ in range(3)] == [5.0] * 3 and f.replays == 0
    assert "pending sum" in f.why()[0]


@on_ranks(2)
@pytest.mark.parametrize(
    "write",
    [lambda z: z.mul_(2), lambda z: z.bernoulli_(0.5), lambda z: z.to_local().detach().mul_(2)],
)
@pytest.mark.parametrize("at", [(R, R), (R, S0)])
def test_a_view_of_what_is_written_to_later_is_not_recorded_if_its_uses_may_vary(write, at):
    def f(x):
        made = x * 2
        view = made[:, 1:].t()
        write(made)
        return view

    fast = dt.replay(f)
    for _ in range(3):
        found = []
        for call in (fast, f):
            (x,) = fed(mesh_of(2), 6, 6, at=at)()
            dt.manual_seed(0)
            out = call(x)
            (out * out.detach().cos()).sum().backward()
            found += [out.full_tensor(), x.grad.full_tensor()]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    if at == (R, R):
        assert fast.replays == 0 and "the program writes to tensors" in fast.why()[0]
    else:
        assert fast.replays == 2


@on_ranks(1)
def test_in_strict_and_under_other_modes_calls_go_one_by_one():
    f = dt.replay(lambda t: t * 2)
    (x,) = fed(mesh_of(1), 5, 6)()
    f(x)
    with dt.debugging.strict():
        f(x)
    with torch.device("cpu"):
        f(x)
    assert f.replays == 0
    f(x)
    assert f.replays == 1


@on_ranks(1)
def test_it_gives_up_where_all_changes_in_each_call():
    f = dt.replay(lambda t, n: t * n)
    (x,) = fed(mesh_of(1), 5, 6)()
    for i in range(40):
        assert f(x, i).sum().item() == (x * i).sum().item()
    assert f.why() == ["it changes too often"]


@on_ranks(1)
def test_a_module_with_replay_is_copied_and_pickled_without_programs():
    make, batch = on_one()
    net = dt.replay(make())
    (x,) = batch()
    first = [net(x).full_tensor() for _ in range(2)][1]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.forward.replays == 0 and other.forward.module is other
        assert torch.equal(first, other(x).full_tensor())
        with torch.no_grad():
            other.up.weight.zero_()
        assert not torch.equal(first, other(x).full_tensor())
    assert torch.equal(first, net(x).full_tensor())
    assert dt.replay(net) is net and set(net.state_dict()) == set(make().state_dict())


@on_ranks(2)
def test_the_first_replay_in_debug_is_compared_with_the_calls():
    mesh = mesh_of(2)
    (x,) = fed(mesh, 6, 6, at=(R, S0))()
    net = dt.replay(dt.shard_module(MLP(0.5, "batch"), mesh, {}))
    with dt.debugging.compare_ranks():
        for _ in range(3):
            net(x).sum().backward()
    assert net.forward.replays == 2
    empty = dt.replay(lambda t: t[:0] * 2)
    with dt.debugging.compare_ranks():
        assert [tuple(empty(x).shape) for _ in range(3)] == [(0, 6)] * 3
    assert empty.replays == 2
    f = dt.replay(lambda t: t * len(sys.argv))
    f(x)
    sys.argv.append("what no guard compares")
    with (
        dt.debugging.compare_ranks(),
        pytest.raises(RuntimeError, match=r"in place of t2 = .*mul\(t1, \d+\)"),
    ):
        f(x)
    sys.argv.pop()


@on_ranks(2)
def test_the_audit_finds_what_no_guard_compares():
    (x,) = fed(mesh_of(2), 6, 6, at=(R, S0))()
    for make in (dt.replay, lambda f: dt.compile(f, backend="eager")):
        f, expected = make(lambda t: t * len(sys.argv)), x * len(sys.argv)
        for _ in range(9):
            assert f(x).equal(expected)
        assert f.replays == 8
        sys.argv.append("what no guard compares")
        try:
            for _ in range(7):
                assert f(x).equal(expected)  # stale
            where = r"mul\(t1, \d+\) at .*test_guards.py:\d+ in place of t2 = .*mul\(t1, \d+\)"
            with pytest.raises(RuntimeError, match=where):
                f(x)
            assert f(x).equal(x * len(sys.argv))
        finally:
            sys.argv.pop()


@on_ranks(2)
def test_what_ranks_compare_of_the_program_is_the_same():
    """One rank replays, the other does not: no difference to the comparison at steps."""
    from disttensor.comm import compare_programs

    mesh = mesh_of(2)
    (x,) = fed(mesh, 5, 6, at=(R, S0))()
    net = dt.shard_module(MLP(0.5), mesh, {})
    noted = []
    for wrap in (lambda m: m, dt.replay):
        net = wrap(net)
        for _ in range(3):
            dt.manual_seed(3)  # the number of a random call is a part of the program
            compare_programs.CALLS.clear()
            net(x)
            noted.append([call.words() for call in compare_programs.recorded_calls()])
    assert noted[0] and all(n == noted[0] for n in noted)
    assert net.forward.replays == 2
