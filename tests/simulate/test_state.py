"""A simulation is the same whatever was simulated before it, and each rank starts as a process."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

import disttensor as dt
import ops
from disttensor.simulate import shapes, simulate
from disttensor.simulate.flop_formulas import formulas
from disttensor.simulate.run import simulate_program
from disttensor.simulate.run_rank import of_script
from disttensor.simulate.world import torchrun_variables


def default_of(dtype):
    """A ``build`` of a program that computes in ``dtype`` by default."""

    def build():
        torch.set_default_dtype(dtype)
        mesh = dt.init_mesh((2,), ("dp",))
        w = dt.ones(6, 5, mesh=mesh, requires_grad=True)
        optimizer = torch.optim.SGD([w])

        def step():
            made = torch.ones(6, 5), torch.arange(30) * 1.5, torch.full((3,), 2.0), torch.rand(3)
            promoted = torch.ones(6, 5, dtype=torch.int64) / 2
            assert {t.dtype for t in (*made, promoted)} == {dtype}
            (w @ dt.shard_tensor(promoted.T, mesh)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return build


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_program_of_another_default_dtype_has_its_own_results(dtypes):
    kinds = []
    for dtype in dtypes:
        report = simulate(default_of(dtype), world=2)
        assert report.kinds[0].flops_by("dtype") == {str(dtype): 2 * report.kinds[0].flops // 2}
        kinds.append(report.kinds[0])
    wide, narrow = sorted(kinds, key=lambda kind: kind.peak_memory, reverse=True)
    assert wide.peak_memory == 2 * narrow.peak_memory
    assert torch.get_default_dtype() == torch.float32


def test_a_formula_that_is_registered_later_counts():
    op = torch.ops.aten.cumsum

    def build():
        x = torch.ones(6, 5)
        w = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([w])

        def step():
            x.cumsum(0)
            optimizer.step()

        return step

    assert simulate(build, world=2).kinds[0].flops == 0
    formulas()[op] = lambda x, *args, out_val=None, **kwargs: x.numel()
    try:
        assert simulate(build, world=2).kinds[0].flops == 30
    finally:
        del formulas()[op]
    assert simulate(build, world=2).kinds[0].flops == 0


class Holds(torch.Tensor):
    """A scalar outside; its negative is that of the tensor inside."""

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(args[0].inner)


def test_results_that_depend_on_more_than_shape_and_dtype_are_computed_each_time():
    """Results of constants (on the value), of conjugates (on a bit), and of subclasses."""
    aten = torch.ops.aten
    real, outer = torch.tensor(1.0), torch.Tensor._make_wrapper_subclass(Holds, ())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = torch.empty(()), torch.tensor(2.0), real
        _, three, two = (shapes.run(aten.add.Tensor, (x, 1), {}, mode)[0] for x in inputs)
        assert three.item() == 3 and two.item() == 2
        z = torch.empty(3, dtype=torch.complex64)
        assert all(shapes.run(aten._conj.default, (z,), {}, mode)[0].is_conj() for _ in range(2))
        for rows in (1, 2):
            outer.inner = torch.ones(rows)
            assert shapes.run(aten.neg.default, (outer,), {}, mode)[0].shape == (rows,)


def test_what_is_read_and_written_of_an_expanded_tensor_does_not_depend_on_its_storage():
    large, small = torch.ones(100, 5)[:1].expand(100, 5), torch.ones(1, 5).expand(100, 5)
    neg = torch.ops.aten.neg.default
    costs = [shapes.cost(neg, (x,), {}, x.neg()) for x in (large, small)]
    assert costs[0] == costs[1] and costs[0].nbytes == 4 * (5 + 500)


HELPERS = {
    "settings.py": "import os\nRANK = int(os.environ['RANK'])\nimported = []\n",
    "parts/place.py": """
import disttensor as dt
import ops
import torch
from settings import RANK
mesh = dt.init_mesh((4,), ("dp",))

@ops.rule(torch.conv_tbc)  # it has none, and a second one is refused
def conv_tbc(x, weight, bias):
    return ops.Factors(["tbi", "kio", "o"], ["tbo"])
""",
    "late.py": "from settings import RANK, imported\nimported.append(RANK)\n",
}
SCRIPT = """
import os
import torch
import disttensor as dt
import settings
from parts import place

w = dt.ones(6, 5, mesh=place.mesh, requires_grad=True)
optimizer = torch.optim.SGD([w])
for i in range(3):
    import late
    x = dt.shard_tensor(torch.ones(7, 5), place.mesh, [dt.Shard(0)])
    (x @ w.T).sum().backward()
    seen = settings.RANK, late.RANK, place.RANK, *settings.imported, *place.mesh.coordinate
    assert seen == (int(os.environ["RANK"]),) * 5, seen
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path):
    for name, text in HELPERS.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_each_rank_of_a_script_imports_its_modules(script):
    """Ranks 0 to 2 have two rows, rank 3 has one."""
    before = dict(sys.modules)
    report = simulate_program(of_script(str(script), []), 4)
    assert [kind.ranks for kind in report.kinds] == [(0, 1, 2), (3,)]
    assert not {"parts", "late", "settings"} & {*sys.modules}
    assert torch.conv_tbc not in ops.RULES
    assert all(sys.modules[name] is module for name, module in before.items())


def test_modules_that_a_build_imports_are_imported_by_each_rank(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))

    def build():
        from parts import place  # type: ignore[import-not-found]

        w = dt.ones(6, 5, mesh=place.mesh, requires_grad=True)
        optimizer = torch.optim.SGD([w])
        assert place.mesh.coordinate == (place.RANK,)

        def step():
            x = dt.shard_tensor(torch.ones(7, 5), place.mesh, [dt.Shard(0)])
            (x @ w.T).sum().backward()
            optimizer.step()

        return step

    assert len(simulate(build, world=4).kinds) == 2
    assert "parts" not in sys.modules and "settings" not in sys.modules


@pytest.mark.parametrize("size, ranks_per_node", [(12, 8), (3, 8), (16, 8), (5, 2)])
def test_ranks_of_a_node_know_how_many_they_are(size, ranks_per_node):
    """As torchrun says it on nodes of which the last has fewer."""
    told = [torchrun_variables(rank, size, ranks_per_node) for rank in range(size)]
    for rank, mine in enumerate(told):
        beside = [r for r in range(size) if r // ranks_per_node == rank // ranks_per_node]
        assert mine["RANK"] == str(rank) and mine["WORLD_SIZE"] == str(size)
        assert mine["GROUP_RANK"] == str(rank // ranks_per_node)
        assert mine["LOCAL_RANK"] == str(beside.index(rank))
        assert mine["LOCAL_WORLD_SIZE"] == str(len(beside))
