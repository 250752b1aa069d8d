"""DistTensor as a tensor: every attribute and method answers as on the global tensor, on every
rank."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from tests.support.layouts import (
    LAYOUTS,
    S0,
    S1,
    P,
    R,
    compare_expressions,
    counted,
    everywhere,
    grid,
    same,
)
from tests.support.part import part
from tests.support.pool import on_ranks

PIECES = pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")

METADATA = """
x.shape; x.size(); x.size(1); x.size(-1); x.size(dim=0); x.stride(); x.stride(0); x.stride(-1)
x.numel(); torch.numel(x); x.nelement()
x.ndim; x.dim(); x.ndimension(); len(x); x.dtype; x.device; x.layout; x.is_contiguous()
x.T.is_contiguous(); x.T.stride()
x.itemsize; x.nbytes; x.element_size(); x.is_floating_point(); x.is_complex()
torch.is_floating_point(x); torch.is_complex(x)
x.is_signed(); x.is_conj(); x.is_neg(); x.is_inference(); x.requires_grad; x.is_leaf; x.grad
x.grad_fn; x.retains_grad; x.grad_dtype
x.storage_offset(); x.type(); x.type("torch.FloatTensor").dtype; x.is_cuda; x.is_cpu; x.is_meta
x.is_sparse; x.is_quantized
x.is_nested; x.get_device(); x.output_nr; x.is_shared(); x.is_pinned(); x.dim_order(); x._version
torch.is_tensor(x); torch.is_storage(x); isinstance(x, torch.Tensor); isinstance(x, nn.Parameter)
hash(x) == id(x)
torch.result_type(x, 1); torch.can_cast(x.dtype, torch.int32)
torch.promote_types(x.dtype, torch.float32); x.is_same_size(x)
x.is_set_to(x); x.T.shape; x.mT.stride(); x.H.shape; x.mH.shape; x.data.requires_grad
torch.broadcast_shapes(x.shape, (1, 6))
x.unsqueeze(0).stride(); x[0].stride(); x[:, 0].shape; x.size(1) is x.shape[1]; bool(x.numel())
x.is_sparse_csr; x.is_mkldnn
"""

VALUES = """
x.tolist(); x.numpy(); np.asarray(x); np.asarray(x, dtype=np.float32); x.__array__()
x.detach().numpy(); x.numpy(force=True)
x[0].tolist(); x[4, 5].item(); bool(x[4, 5] > 29); int(x[1, 1]); float(x[1, 1]); complex(x[1, 1])
bool(x[0, 0])
30 in x; 31 in x; x[0, 0] in x; [row.sum().item() for row in x]; list(x); list(reversed(x))
sum(x); max(x[0]); [*x[0]]
x.sum().item(); x.max().item(); f"{x.sum():.3f}"; f"{x[2, 2]}"; f"{x[2, 2]:8.2e}"
"%.1f" % x[1, 1]; round(x.sum().item())
x[1]; x[-1, 2:5]; x[..., 0]; x[:, None, 1]; x[::2, 1::3]; x[[0, 3, 3]]; x[torch.tensor([4, 0])]
x[x > 10]; x[x[:, 0] > 10]
x[torch.tensor([0, 1]), torch.tensor([2, 3])]; x[2:2]; x[()]; x[None]; x[True]; x[x[0, 0].long()]
x[1:, [0, 2]]; x[0, 1]
x.T; x.mT; x.H; x.mH; x.real; x.detach(); x.data; x.clone(); x.contiguous(); copy.copy(x)
copy.deepcopy(x); x.t()
x.to(torch.float32); x.to("cpu"); x.to("cpu", torch.float16)
x.to(torch.zeros(1, dtype=torch.int32)); x.to(dtype=torch.int8)
x.cpu(); x.float(); x.half(); x.bfloat16(); x.int(); x.long(); x.bool(); x.short()
x.type(torch.float32); x.type_as(torch.zeros(1))
x.double() is x; x.to(torch.float64) is x; x.cpu() is x; x.to("cpu") is x; x.contiguous() is x
x.to(torch.float64, copy=True) is x
x + 1; 1 - x; 2 / x; 2.0 ** x; x ** 2; 7 % x; x % 4; -x; abs(x); +x; x // 4; 9 // x; x == 3
x != x; x >= 5; x @ x.T; divmod(8, 3)
(x > 3) & (x < 9); ~(x > 3); (x > 3) | (x == 1); (x > 3) ^ True; x.long() << 1; x.long() >> 1
1 << (x.long() % 4)
x.sum().long().__index__(); range(10)[x[0, 1].long()]; x.sum(0).tolist(); torch.tensor(x.tolist())
torch.as_tensor(x) is x
x.new_zeros(2, 3); x.new_ones(2); x.new_full((2, 2), 3); x.new_tensor([1.0, 2.0])
x.new_empty(3).shape; torch.zeros_like(x); torch.ones_like(x)
x.nonzero(); x.unique(); x.masked_select(x > 7); torch.equal(x, x + 0); torch.equal(x, x + 1)
torch.allclose(x, x); x.equal(x)
[r.tolist() for r in x.split(2)]; x.expand_as(x); x.view_as(x); x.reshape_as(x)
x.sum().exp().isinf().item(); x.any().item(); x.all()
x.argmax().item(); x.median().item(); x.std().item(); x.count_nonzero()
x.is_nonzero() if x.numel() == 1 else 0; x.item() if x.ndim == 0 else 1
torch.stack([x, x]); torch.cat([x, x], 1); torch.where(x > 3, x, 0.0); torch.add(x, x, alpha=2)
x.storage_offset(); x.sum(dtype=torch.float32)
"""

MORE = """
x.unfold(0, 2, 1); torch.from_dlpack(x); np.from_dlpack(x)
torch.utils.data.default_collate([x, x]); torch.asarray(x)
torch.tensor([x[0, 0], x[1, 1]]); torch.stack(list(x)); torch.stack([x], out=None)
torch.full((2,), x[0, 0]); torch.arange(x[0, 4].long())
x.to_sparse().to_dense(); x.view(torch.int64); x.view(torch.int64).view(torch.float64)
torch.complex(x, x).imag; torch.complex(x, x).H
x.expand(2, 5, 6); x.expand(2, 5, 6).stride(); torch.broadcast_tensors(x, x[0])[1]
torch.atleast_3d(x); torch.meshgrid(x[0], x[1], indexing="ij")[0]
torch.atleast_2d(x) is x; x.tensor_split(3)[1]; torch.block_diag(x, x)
torch.cartesian_prod(x[0], x[1]); x.kron(x[:1]); x.histc(4); x.flatten()[x.argmax()]
x.as_strided((2, 2), (6, 1)); "%d" % x.sum(); "{:d}".format(x.sum().long())
torch.ops.aten.add(x, x); torch.Tensor.sum(x, 0); [float(v) for v in x[0]]
nn.Parameter(x).data; nn.Parameter(x, requires_grad=False).requires_grad
nn.ParameterList([nn.Parameter(x)])[0].detach(); nn.Buffer(x); x.sum() and 3
"""

# Each is run on a copy y of x, which is then compared.
IN_PLACE = """
y.t_(); y.transpose_(0, 1); y.unsqueeze_(0); y.unsqueeze_(1).squeeze_(); y.swapdims_(0, 1)
y.apply_(lambda v: v + 1); y.resize_(5, 6); y.resize_as_(x)
y.__setitem__((0, 0), 100.0); y.__setitem__(y > 5, 0.0)
y.__setitem__(slice(1, 3), y[2:4].clone()); y[0].copy_(y[1]); y.T.mul_(2); y[:, 1].zero_()
y[2:4].add_(1); y.masked_fill_(y > 4, 0.0); y.clamp_(3, 9)
y.scatter_(0, torch.zeros(1, 6, dtype=torch.long), 5.0)
y.index_add_(0, torch.tensor([0, 4]), y[:2].clone())
y.put_(torch.tensor([1]), torch.tensor([5.0], dtype=torch.float64))
y.index_fill_(0, torch.tensor([1]), 9.0); y.t_().add_(1); y.tril_(); y.sqrt_(); y.cumsum_(0)
"""


def questions(text: str) -> list[str]:
    return [q.strip() for q in text.replace("\n", ";").split(";") if q.strip()]


@everywhere
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_metadata(layout):
    plain = counted(5, 6)
    compare_expressions(questions(METADATA), dt.shard_tensor(plain, grid(), layout), plain, nn=nn)


@pytest.mark.feature("As a torch.Tensor")
@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@everywhere
@pytest.mark.parametrize("layout", part(LAYOUTS, 6, "values"), ids=str)
def test_values(layout):
    plain = counted(5, 6)
    compare_expressions(
        questions(VALUES + MORE), dt.shard_tensor(plain, grid(), layout), plain, copy=copy, nn=nn
    )


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@everywhere
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_changes_in_place(layout):
    plain = counted(5, 6)
    wrong = []
    for text in questions(IN_PLACE):
        x = dt.shard_tensor(plain, grid(), layout)
        y, want = x.clone(), plain.clone()
        try:
            eval(text, {"torch": torch}, {"y": want, "x": plain})
            eval(text, {"torch": torch}, {"y": y, "x": x})
            same(y, want)
            assert y.local.shape == y.spec.local_shape
            same(y + 0, want)
            same(x, plain)
        except Exception as error:
            wrong.append(f"{text}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@everywhere
def test_reading_an_attribute_sends_nothing():
    """A debugger, or ``getattr(p, "name", None)`` of a library, reads attributes on one rank."""
    sent = {}
    for layout in LAYOUTS[:6]:
        x = dt.shard_tensor(counted(5, 6), grid(), layout)
        for y in (x, (x.clone().requires_grad_() * 2)):
            for name in dir(y):
                with dt.debugging.record_comms() as log, contextlib.suppress(Exception):
                    getattr(y, name)
                sent.update({name: log.counts()} if len(log) else {})
    assert not sent
    x.requires_grad_().sum().backward()
    assert x._grad is x.grad and x.name is None and (x * 2)._grad_fn is not None


@everywhere
def test_repr_is_the_spec_then_the_piece():
    x = dt.shard_tensor(counted(5, 6), grid(), (dt.Shard(0), dt.Partial()))
    x.requires_grad_()
    text = repr(x)
    assert text.startswith("DistTensor(f64[5@dp, 6] {tp: P(sum)}") and "requires_grad" in text
    assert f"rank {torch.distributed.get_rank()}" in text and repr(x.local.detach()) in text
    assert repr(nn.Parameter(x.detach())).startswith(
        "Parameter of DistTensor(f64[5@dp, 6] {tp: P(sum)}"
    )
    assert str(x) == text and f"{x}" == text


@PIECES
@everywhere
@pytest.mark.parametrize("parameter", [False, True])
def test_copies_and_pickles(parameter):
    plain = counted(5, 6)
    for layout in LAYOUTS:
        x = dt.shard_tensor(plain, grid(), layout)
        x = nn.Parameter(x) if parameter else x
        saved, sent = io.BytesIO(), pickle.dumps(x)
        torch.save({"x": x, "n": 3}, saved)
        saved.seek(0)
        for y in (copy.deepcopy(x), pickle.loads(sent), torch.load(saved)["x"], copy.copy(x)):
            assert type(y) is dt.DistTensor and y.spec is x.spec and y is not x
            assert (
                isinstance(y, nn.Parameter) is parameter
                and y.requires_grad is parameter
                and y.is_leaf
            )
            same(y, plain)
        y = copy.copy(x)
        y.data.add_(1)  # it shares the memory, as torch's
        same(x, plain + 1)
        x.data.sub_(1)
        y = copy.deepcopy({"a": x, "b": [x]})
        assert y["a"] is y["b"][0]
        y["a"].data.add_(1)
        same(x, plain)


class Mirrored(dt.Shard):
    """A placement of the test's own."""


@PIECES
@on_ranks(4)
def test_a_pickle_of_another_ranks_piece_is_refused_by_all_ways(tmp_path):
    """Even and uneven pieces, empty ones, pending sums; ranks in and outside the mesh."""
    world, rank = dt.init_mesh((4,), ("w",)), dist.get_rank()
    stage = dt.ProcessMesh([1, 3], ("x",))

    def by_file(x, src):
        if rank == src:
            torch.save({"x": x}, tmp_path / "x")
        dist.barrier()
        try:
            return torch.load(tmp_path / "x")["x"]
        finally:
            dist.barrier()

    def by_broadcast(x, src):
        objects = [x]
        dist.broadcast_object_list(objects, src=src)
        return objects[0]

    def by_gather(x, src):
        everyone = [None] * 4
        dist.all_gather_object(everyone, pickle.dumps(x))
        return pickle.loads(everyone[src])

    for mesh, layout, size, dtype in [
        (world, [dt.Shard(0)], 8, torch.float32),
        (world, [dt.Shard(0)], 5, torch.int64),  # uneven, and one empty piece
        (world, [dt.Partial()], 8, torch.float32),
        (world, [dt.Replicate()], 8, torch.int64),
        (stage, [dt.Shard(0)], 4, torch.int64),
        (stage, [dt.Replicate()], 4, torch.float32),
    ]:
        plain = torch.arange(size).to(dtype)
        x = dt.shard_tensor(plain, mesh, layout)
        for src in (0, 1):
            mine = rank == src or mesh.coordinate is None
            shared = layout == [dt.Replicate()] and src in mesh.ranks
            for way in (by_file, by_broadcast, by_gather):
                if mine or shared:
                    y = way(x, src)
                    assert y.spec is x.spec and torch.equal(y.to_local(), x.to_local())
                else:
                    with pytest.raises(RuntimeError, match=rf"on rank {src}.*rank {rank} needs"):
                        way(x, src)
    x = dt.from_local(torch.zeros(2, 2), world, [Mirrored(1)], shape=(2, 8))
    assert pickle.loads(pickle.dumps(x)).spec is x.spec


@PIECES
@everywhere
def test_a_saved_piece_is_no_larger_than_the_piece():
    x = dt.shard_tensor(torch.zeros(1 << 16), grid(), (dt.Shard(0), dt.Shard(0)))
    saved = io.BytesIO()
    torch.save(x, saved)
    assert len(saved.getvalue()) < (4 << 16) // grid().size + 4096


@everywhere
def test_deepcopy_takes_the_gradient_along_and_refuses_results():
    x = dt.shard_tensor(counted(5, 6), grid(), (S0, R), requires_grad=True)
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    same(y.grad, 2 * counted(5, 6))
    assert y.grad.local is not x.grad.local
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x + 1)


# Gradients as attributes --------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("layout", [(R, R), (S0, R), (S0, S1), (S1, S1)], ids=str)
def test_gradient_attributes(layout):
    plain = counted(5, 6).requires_grad_()
    x = dt.shard_tensor(plain, grid(), layout)
    assert (
        x.requires_grad
        and x.is_leaf
        and x.grad is None
        and x.grad_fn is None
        and not x.detach().requires_grad
    )
    results = []
    for t in (x, plain):
        y = t * 3
        y.retain_grad()
        seen = []
        y.register_hook(seen.append)
        handle = t.register_hook(lambda g: g * 2)
        posts = []
        late = t.register_post_accumulate_grad_hook(lambda p: posts.append(p.grad))
        (y * y).sum().backward(retain_graph=True)
        assert (
            y.retains_grad
            and not y.is_leaf
            and y.grad_fn is not None
            and y.requires_grad
            and len(posts) == 1
        )
        assert t.grad is t.grad
        results.append([t.grad.clone(), y.grad.clone(), seen[0], posts[0].clone()])
        handle.remove()
        late.remove()
        (y * y).sum().backward()
        results[-1].append(t.grad.clone())
        t.grad = None
        assert t.grad is None
        (t * t).sum().backward(torch.tensor(2.0, dtype=torch.float64))
        results[-1].append(t.grad.clone())
        del t.grad
        t.grad = torch.ones(5, 6, dtype=torch.float64)
        t.grad.mul_(4)
        (t * t).backward(torch.full((5, 6), 0.5, dtype=torch.float64))
        results[-1].append(t.grad.clone())
        t.grad.zero_()
        results[-1].append(t.grad)
        results[-1].extend(torch.autograd.grad((t**3).sum(), t))
        assert (t.requires_grad_(False) is t) and not t.requires_grad
        t.requires_grad = True
        results[-1].append(t.detach().add_(0))
        with torch.no_grad():
            assert not (t * 2).requires_grad
            t.mul_(2)
        results[-1].append(t.data)
        t.data = t.data + 1
        results[-1].append(t)
    same(results[0], results[1])


# Plain tensors and numbers among DistTensors ------------------------------------------------------

MIXED = """
x + p; p + x; x * p; p * x; p - x; x / p; p @ x.t(); x @ p.t(); p.add(x); torch.where(x > 4, x, p)
torch.where(p > 4, p, x); x.mul(p) + p
torch.nn.functional.linear(x, p); torch.nn.functional.linear(p, x); torch.cat([p, x])
torch.stack([x, p]); torch.addmm(p @ p.t(), x, p.t())
(x * p.sum()).cos(); p.sin() * x; torch.einsum("ij,kj->ik", x, p); x.pow(2) + p.pow(2) * 2.5
torch.maximum(x, p); x.sum() * p; p[0] * x; x * p[:, :1]
torch.lerp(x, p, 0.3); torch.nn.functional.mse_loss(x, p); torch.nn.functional.mse_loss(p, x)
torch.addcmul(x, p, x); x.masked_fill(p > 9, 2.0); x.sum(0) + p
p.expand(5, 6) + x; torch.nn.functional.layer_norm(x, (6,), p[0], p[1])
(p if True else x) * x.detach(); x.t() * p.t(); 2 * x + 3 * p
"""


@pytest.mark.filterwarnings("ignore::disttensor.errors.FallbackWarning")
@everywhere
@pytest.mark.parametrize("leaf", [True, False])
def test_plain_tensors_that_require_grad(leaf):
    start = counted(5, 6).sin()
    for layout in [(R, R), (S0, S1), (P, S0), (S1, R)]:
        for text in questions(MIXED):
            outs = []
            for sharded in (True, False):
                a, b = start.clone().requires_grad_(), (start + 0.5).requires_grad_()
                x = dt.shard_tensor(a * 1, grid(), layout) if sharded else a * 1
                p = b if leaf else b * 1
                y = eval(text, {"torch": torch}, {"x": x, "p": p})
                (y * y).sum().backward()
                outs.append([y, a.grad, b.grad])
            try:
                same(*outs)
            except Exception as error:
                raise AssertionError(f"{text} with x in {layout}: {error}") from error


@everywhere
def test_numbers_and_zero_dim_tensors_mix_in():
    plain = counted(5, 6)
    for layout in LAYOUTS:
        x = dt.shard_tensor(plain, grid(), layout)
        for c in (
            2,
            2.5,
            True,
            torch.tensor(2.0),
            torch.tensor(3),
            np.float64(1.5),
            torch.ones((), dtype=torch.float32),
        ):
            compare_expressions(
                ["x + c", "c + x", "x * c", "c * x", "x / c", "x ** c", "x > c", "torch.add(x, c)"],
                x,
                plain,
                c=c,
            )
            if c is not True:
                compare_expressions(["x - c", "c - x", "c / x", "x % c", "x // c"], x, plain, c=c)


@everywhere
def test_copy_from_plain_tensors_keeps_the_placement():
    plain = counted(5, 6)
    for layout in LAYOUTS:
        x = dt.shard_tensor(plain * 0, grid(), layout)
        for text in (
            "x.copy_(p)",
            "x.copy_(p[0])",
            "x.copy_(p.float())",
            "x.fill_(3)",
            "x.add_(p)",
            "x.mul_(p)",
            "x.zero_()",
            "x.sub_(1)",
        ):
            y, q = x.clone(), plain * 0
            got = eval(text, {}, {"x": y, "p": plain})
            eval(text, {}, {"x": q, "p": plain})
            assert got is y and y.spec is x.spec, (text, layout, y.spec)
            same(y, q)
        x[1:3] = 7.0
        x[0] = plain[0]
        want = plain * 0
        want[1:3], want[0] = 7.0, plain[0]
        same(x, want)
        x += plain
        assert x.placements == layout
        into = plain * 0
        into.copy_(x.full_tensor())
        same(into, want + plain)


@everywhere
@pytest.mark.parametrize("parameter", [False, True])
def test_a_copy_shares_memory_that_is_part_of_a_larger_one(parameter):
    for layout in LAYOUTS:
        whole = dt.shard_tensor(counted(5, 6), grid(), layout)
        x = whole[1:, 2:].detach()
        x = nn.Parameter(x) if parameter else x
        y = copy.copy(x)
        assert isinstance(y, nn.Parameter) is parameter and y.requires_grad is parameter
        y.detach().zero_()
        same(x, torch.zeros(4, 4, dtype=x.dtype))


@everywhere
def test_the_mesh_has_the_name_that_it_has_in_torch_and_no_other():
    x = dt.shard_tensor(torch.ones(4, 4), grid(), [S0, R])
    for y in (x, dt.reshard(x, grid(), [R, R])):  # one that is under way
        assert y.device_mesh is y.process_mesh is grid()
        assert not hasattr(y, "mesh")
        with pytest.raises(AttributeError, match=r"no attribute 'mesh'.*x.process_mesh"):
            _ = y.mesh


@pytest.mark.parametrize("where", [S0, R, dt.Partial(), dt.Partial("avg")], ids=str)
@on_ranks(2)
def test_a_result_takes_the_gradient_that_is_given_to_it(where):
    mesh, plain = dt.init_mesh((2,), ("x",)), counted(5, 3)
    w = dt.shard_tensor(plain, mesh, [R]).redistribute(placements=[where]).detach()
    y = w.requires_grad_() * 2
    y.retain_grad()
    y.grad = plain
    same(y.grad, plain)
    torch.optim.SGD([y], 0.5).step()
    same(y, plain * 1.5)
    with pytest.raises(RuntimeError, match=r"dtype is torch\.float64, the gradient's"):
        y.grad = torch.ones(5, 3)
    y.sum().backward()
    same(w.grad, torch.full((5, 3), 2.0, dtype=torch.float64))
