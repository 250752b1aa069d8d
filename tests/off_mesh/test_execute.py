"""What a program sees of tensors whose mesh this rank is not in: what the ranks inside see, but for
the data."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Shard
from disttensor.errors import FallbackWarning, PieceWarning
from disttensor.random import counter
from tests.support.oracle import randint, randn
from tests.support.pool import on_ranks
from tests.support.stages import stage_meshes


class Place:
    """Tensors on ``mesh``, split on dim 0."""

    def __init__(self, mesh):
        self.mesh = mesh

    def __call__(self, *shape, grad=True):
        return dt.shard_tensor(randn(*shape), self.mesh, [Shard(0)], requires_grad=grad)

    def ints(self, high, shape):
        return dt.shard_tensor(randint(0, high, shape), self.mesh)

    def module(self, m, plan=None):
        return dt.shard_module(m.double(), self.mesh, plan)

    def mlp(self):
        layers = nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        return self.module(nn.Sequential(*layers), {"0.weight": [Shard(0)]})


class PlainPlace(Place):
    """Plain tensors, as one process has them."""

    def __init__(self):
        self.mesh = None

    def __call__(self, *shape, grad=True):
        return randn(*shape).requires_grad_(grad)

    def ints(self, high, shape):
        return randint(0, high, shape)

    def module(self, m, plan=None):
        return m.double()


def metadata(x):
    a = x(6, 5)
    return (
        a.shape,
        a.dtype,
        str(a.device),
        a.placements,
        a.requires_grad,
        a.is_leaf,
        a.ndim,
        a.numel(),
        len(a),
        a.stride(),
        a.size(),
        a.size(1),
        a.dim(),
        a.element_size(),
        a.nbytes,
        a.is_contiguous(),
        a.layout,
        a.is_cuda,
        a.grad is None,
    )


def copies(x):
    a = nn.Parameter(x(6, 5))
    b = copy.deepcopy(a)
    d = copy.copy(a)
    return (
        type(b).__name__,
        b.requires_grad,
        b.is_leaf,
        isinstance(b, nn.Parameter),
        b.shape,
        b is a,
        type(d).__name__,
        d.requires_grad,
    )


def pickles(x):
    a = x(6, 5)
    b = pickle.loads(pickle.dumps(a))
    return b.shape, b.requires_grad, b.placements, b.process_mesh is x.mesh


def saved(x):
    a = nn.Parameter(x(6, 5))
    f = io.BytesIO()
    torch.save({"a": a}, f)
    f.seek(0)
    b = torch.load(f)["a"]
    return b.shape, b.requires_grad, isinstance(b, nn.Parameter), type(b).__name__


def state_dict(x):
    a, b = x.mlp(), x.mlp()
    sd = a.state_dict()
    r = b.load_state_dict(sd)
    return str(r), list(sd), [tuple(v.shape) for v in sd.values()]


def state_dict_saved(x):
    a, b = x.mlp(), x.mlp()
    sd = copy.deepcopy(a.state_dict())
    f = io.BytesIO()
    torch.save(sd, f)
    f.seek(0)
    b.load_state_dict(torch.load(f))
    b.load_state_dict(sd, assign=True)
    return [type(v).__name__ for v in b.state_dict().values()]


def module_to(x):
    a = x.mlp().to(torch.bfloat16)
    b = x.mlp().half()
    d = x.mlp().double()
    return [
        (p.dtype, p.requires_grad, p.is_leaf, isinstance(p, nn.Parameter))
        for mm in (a, b, d)
        for p in mm.parameters()
    ], [b_.dtype for b_ in a.buffers()]


def frozen_module(x):

    a = x.mlp().requires_grad_(False)
    r = [p.requires_grad for p in a.parameters()]
    a.requires_grad_(True)
    return r, [p.requires_grad for p in a.parameters()]


def grads(x):
    a = x(6, 5)
    (a * 2).sum().backward()
    return a.grad is None if not x.mesh.coordinate else a.grad is not None


def grad_set(x):
    a = x(6, 5)
    a.grad = torch.ones_like(a)
    a.grad = None
    del a.grad
    return a.grad


def locals_of_floats(x):
    a = x(6, 5).float()
    here = a.to_local()
    f = a.full_tensor()
    return here.dtype, f.dtype, str(here.device), type(here).__name__, type(f).__name__


def locals_of_bools(x):
    a = x(6, 5) > 0
    here = a.to_local()
    f = a.full_tensor()
    return here.dtype, f.dtype


def detach(x):
    a = x(6, 5)
    b = a.detach()
    d = a.data
    e = (a * 2).detach_()
    return b.requires_grad, d.requires_grad, e.requires_grad, b.is_leaf, e.is_leaf, b.shape


def inplace(x):
    a = x(6, 5) * 2
    a.add_(1)
    a += 1
    a[0] = 3
    a[1:3] *= 2
    a.clamp_(min=0)
    a.copy_(torch.zeros(6, 5))
    a.zero_()
    a.fill_(2)
    return a.shape, a.requires_grad


def inplace_nograd(x):
    a = x(6, 5)
    with torch.no_grad():
        a.add_(1)
        a.mul_(2)
    return a.requires_grad, a.is_leaf


def in_place_makes_grad(x):
    a = x(6, 5, grad=False)
    a.mul_(x(6, 5))
    v = x(6, 5, grad=False)
    w = v[1]
    w += x(5)
    return a.requires_grad, v.requires_grad, w.requires_grad


def out_given(x):
    o = torch.empty_like(x(6, 5, grad=False))
    r = torch.add(x(6, 5, grad=False), 1, out=o)
    return r is o, o.shape


def index(x):
    a = x(6, 5)
    i = torch.tensor([0, 2])
    return [
        tuple(t.shape)
        for t in (
            a[0],
            a[1:3],
            a[:, None],
            a[..., 0],
            a[i],
            a[i, i],
            a[[0, 1]],
            a[-1],
            a[::2],
            a[:, i],
            a[None],
            a[0, 0],
        )
    ]


def index_by_tensors(x):
    a = x(6, 5)
    i = x.ints(6, (2,))
    return (
        a[i].shape,
        a.index_select(0, i).shape,
        a.gather(0, i[:, None]).shape,
        torch.take(a, i).shape,
    )


def views(x):
    a = x(6, 5)
    return [
        tuple(t.shape)
        for t in (
            a.view(-1),
            a.reshape(5, 6),
            a.t(),
            a.T,
            a.mT,
            a.permute(1, 0),
            a.unsqueeze(0),
            a.flatten(),
            a.expand(2, 6, 5),
            a.transpose(0, 1),
            a.view(3, 2, 5),
            a.unflatten(0, (2, 3)),
            a.narrow(0, 1, 2),
            a.diagonal(),
            a.movedim(0, 1),
            a.contiguous(),
            a.view_as(a),
            a.repeat(2, 1),
            torch.broadcast_to(a, (3, 6, 5)),
        )
    ]


def iteration(x):
    a = x(6, 5)
    r = [t.shape for t in a]
    b, _, *e = a
    return len(r), b.shape, len(e)


def several_results(x):
    a = x(6, 5)
    t = a.topk(2)
    s = a.sort()
    sp = a.split(4)
    u = a.unbind(1)
    mx = a.max(0)
    ch = a.chunk(4)
    km = a.kthvalue(2)
    md = a.median(0)
    mo = a.mode(0)
    vm = torch.var_mean(a)
    am = torch.aminmax(a)
    return (
        [type(q).__name__ for q in (t, s, sp, u, mx, ch, km, md, mo, vm, am)],
        [tuple(q.shape) for q in (*t, *s, *sp, *u, *mx, *ch, *md, *vm, *am)],
        t.indices.dtype,
        t.values.requires_grad,
        t.indices.requires_grad,
    )


def linalg(x):
    a = x(5, 5)
    return [
        tuple(q.shape)
        for q in (
            *torch.linalg.svd(a),
            torch.linalg.inv(a),
            torch.linalg.det(a),
            *torch.linalg.qr(a),
            *torch.linalg.slogdet(a),
            torch.linalg.norm(a),
            torch.linalg.cholesky(a @ a.T + 5 * torch.eye(5, dtype=a.dtype)),
            torch.linalg.solve(a, a),
        )
    ], torch.linalg.eig(a)[0].dtype


def lstm(x):
    mm = x.module(nn.LSTM(5, 4, 2, bidirectional=True))
    y, (h, cc) = mm(x(3, 6, 5))
    return y.shape, h.shape, cc.shape, y.requires_grad


def mha(x):
    mm = x.module(nn.MultiheadAttention(8, 2, batch_first=True))
    y, w = mm(x(3, 6, 8), x(3, 6, 8), x(3, 6, 8))
    return y.shape, w.shape


def transformer(x):
    mm = x.module(encoder_layer())
    y = mm(x(3, 6, 8))
    mm.eval()
    z = mm(x(3, 6, 8))
    with torch.no_grad():
        q = mm(x(3, 6, 8))
    return y.shape, z.shape, q.shape, q.requires_grad


def conv(x):
    mm = x.module(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.5),
        )
    )
    y = mm(x(4, 3, 8, 8))
    return y.shape, y.requires_grad


def promotion(x):
    a = x(6, 5).float()
    i = x.ints(5, (6, 5))
    return (
        (a + i).dtype,
        (i + 1.5).dtype,
        (i / 2).dtype,
        (a * torch.tensor(2.0, dtype=torch.float64)).dtype,
        (a * torch.ones(5, dtype=torch.float64)).dtype,
        (a > 0).dtype,
        i.sum().dtype,
        (a + 1j).dtype,
        torch.result_type(a, i),
        i.float().mean().dtype,
    )


def autocast(x):
    a = x(6, 5).float()
    w = x(4, 5).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        r1 = F.linear(a, w)
        r2 = F.softmax(r1, -1)
        r3 = a @ w.t()
        r4 = F.layer_norm(r1, (4,))
        r5 = r1 + a[:, :4]
    r6 = F.linear(a, w)
    with torch.autocast("cpu", dtype=torch.float16):
        r7 = F.linear(a, w)
    return [q.dtype for q in (r1, r2, r3, r4, r5, r6, r7)]


def autocast_of_mixed_dtypes(x):
    """The first call of its kind under autocast, which casts one argument more."""
    low = lambda *shape: x(*shape).bfloat16()  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [
            F.linear(low(6, 5), x(4, 5).float(), x(4).float()),
            F.conv1d(low(2, 3, 8), x(4, 3, 3).float(), x(4).float()),
            F.conv2d(low(2, 3, 8, 8), x(4, 3, 3, 3).float(), x(4).float()),
            F.conv_transpose2d(low(2, 3, 8, 8), x(3, 4, 3, 3).float(), x(4).float()),
            torch.addmm(x(5).float(), low(6, 4), x(4, 5).float()),
            torch.baddbmm(x(5).float(), low(2, 6, 4), x(2, 4, 5).float()),
            low(2, 6, 4) @ x(4, 5).float(),
            torch.einsum("ij,kj->ik", low(6, 4), x(5, 4).float()),
            F.scaled_dot_product_attention(low(2, 2, 6, 4), low(2, 2, 6, 4), x(2, 2, 6, 4).float()),
            F.prelu(low(6, 5), x(1).float()),
            F.layer_norm(low(6, 5), (5,), x(5).float(), x(5).float()),
            F.group_norm(low(6, 4), 2, x(4).float(), x(4).float()),
            F.batch_norm(low(6, 4), x(4).detach().float(), x(4).detach().float().abs()),
            torch.cat([low(6, 5), x(6, 5).float()]),
        ]
    with pytest.raises(RuntimeError):
        F.conv2d(low(2, 3, 8, 8), x(4, 3, 3, 3).bfloat16(), x(4).float())
    return [(r.dtype, tuple(r.shape)) for r in results]


def factories(x):
    a = x(6, 5)
    return [
        (tuple(q.shape), q.dtype, q.requires_grad)
        for q in (
            torch.zeros_like(a),
            torch.ones_like(a, dtype=torch.int32),
            torch.empty_like(a),
            torch.full_like(a, 2),
            torch.rand_like(a),
            torch.randn_like(a),
            a.new_zeros(3),
            a.new_ones(2, 3),
            a.new_full((2,), 1.0),
            a.new_empty(2),
            a.new_tensor([1.0, 2.0]),
            a.clone(),
        )
    ]


def questions(x):
    a = x(6, 5)
    return (
        torch.numel(a),
        torch.is_tensor(a),
        torch.is_floating_point(a),
        a.is_same_size(a),
        torch.broadcast_shapes(a.shape, (5,)),
        a.is_complex(),
        a.type(),
        a.is_signed(),
        a.get_device(),
        a.is_meta,
        hash(a) == hash(a),
        bool(a is not None),
    )


def checkpointed(x):
    a = x(6, 5)
    w = x(5, 5)
    y = checkpoint(lambda a: torch.tanh(a @ w).sin(), a, use_reentrant=False)
    y.sum().backward()
    try:
        z = checkpoint(lambda a: torch.tanh(a @ w).sin(), a, use_reentrant=True)
        z.sum().backward()
        r = "ok"
    except Exception as e:
        r = type(e).__name__ + str(e)[:80]
    return y.shape, y.requires_grad, r


def functions_of_all_kinds(x):
    a = x(6, 5)
    return [
        tuple(q.shape)
        for q in (
            F.gelu(a),
            F.silu(a),
            F.normalize(a),
            F.pairwise_distance(a, a),
            torch.einsum("ij,kj->ik", a, a),
            torch.tensordot(a, a, ([1], [1])),
            torch.cdist(a, a),
            F.softmin(a, 0),
            torch.block_diag(a, a),
            torch.cartesian_prod(a[:, 0], a[:, 0]),
            torch.meshgrid(a[0], a[0], indexing="ij")[0],
            F.unfold(x(1, 2, 6, 6), 3),
            F.interpolate(x(1, 2, 6, 6), scale_factor=2),
            F.pad(a, (1, 1)),
            F.grid_sample(x(1, 2, 6, 6), x(1, 3, 3, 2), align_corners=False),
            F.one_hot(x.ints(4, (6,)), 5),
            torch.stft(x(40), 8, return_complex=True, window=torch.ones(8, dtype=torch.float64)),
            torch.atleast_3d(a),
            F.gumbel_softmax(a),
            torch.logsumexp(a, 0),
            torch.cummax(a, 0)[0],
            torch.trapezoid(a),
            torch.histc(a.detach()),
            torch.searchsorted(a.detach(), a.detach()),
            torch.stack([a, a]),
            torch.cat([a, a], 1),
            torch.where(a > 0, a, 0.0),
            torch.bucketize(a.detach(), torch.tensor([0.0, 1.0], dtype=a.dtype)),
        )
    ]


def attention(x):
    q = x(2, 3, 6, 4)
    return F.scaled_dot_product_attention(
        q, q, q, is_causal=True
    ).shape, F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).shape


def embeddings(x):
    mm = x.module(nn.Embedding(9, 4, padding_idx=0))
    i = x.ints(9, (3, 4))
    e = x.module(nn.EmbeddingBag(9, 4, mode="sum"))
    return mm(i).shape, e(i).shape


def nn_init(x):
    w = x(6, 5)
    for f in (
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.normal_,
        nn.init.zeros_,
        nn.init.eye_,
        lambda w: nn.init.sparse_(w, 0.5),
    ):
        f(w)
    return w.requires_grad, w.is_leaf


def autograd_grad(x):
    a = x(6, 5)
    y = a * 2
    (g,) = torch.autograd.grad(y.sum(), a)
    return type(g).__name__, g.shape, y.grad_fn is not None, (y.sum()).requires_grad


def complex_numbers(x):
    a = x(6, 5)
    z = torch.view_as_complex(x(6, 5, 2))
    f = torch.fft.fft(a)
    return (
        z.dtype,
        f.dtype,
        f.real.dtype,
        f.abs().dtype,
        torch.view_as_real(z).shape,
        z.conj().shape,
        z.H.shape,
    )


def data_set(x):
    a = x(6, 5)
    a.data = x(6, 5).data
    return a.requires_grad, a.is_leaf


def foreach_lists(x):
    a, b = x(6, 5, grad=False), x(3, grad=False)
    r = torch._foreach_mul([a, b], 2.0)
    torch._foreach_add_([a, b], 1.0)
    n = torch._foreach_norm([a, b])
    return [tuple(q.shape) for q in (*r, *n)]


PROGRAMS = [
    metadata,
    copies,
    pickles,
    saved,
    state_dict,
    state_dict_saved,
    module_to,
    frozen_module,
    grads,
    grad_set,
    locals_of_floats,
    locals_of_bools,
    detach,
    inplace,
    inplace_nograd,
    in_place_makes_grad,
    out_given,
    index,
    index_by_tensors,
    views,
    iteration,
    several_results,
    linalg,
    lstm,
    mha,
    transformer,
    conv,
    promotion,
    autocast,
    autocast_of_mixed_dtypes,
    factories,
    questions,
    checkpointed,
    functions_of_all_kinds,
    attention,
    embeddings,
    nn_init,
    autograd_grad,
    complex_numbers,
    data_set,
    foreach_lists,
]


# They ask for what plain tensors do not have: a mesh, a parameter that is a DistTensor. The
# reentrant checkpoint is refused for DistTensors.
OUR_WORDS = (
    metadata, copies, pickles, saved, grads, locals_of_floats, locals_of_bools, checkpointed,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@on_ranks(2)
def test_outside_as_inside(program):
    check_alike(program)


@on_ranks(4)
def test_outside_as_inside_of_two():
    for program in PROGRAMS:
        if program is not grads:
            check_alike(program)


def check_alike(program):
    """Both stages run the program for the tensors of the first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        warnings.simplefilter("ignore", PieceWarning)
        seen = repr(program(Place(stage_meshes()[0])))
    if program not in OUR_WORDS:
        assert seen.replace("DistTensor", "Tensor") == repr(program(PlainPlace())), program
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    assert everyone == [everyone[0]] * len(everyone)


@on_ranks(2)
def test_hooks_are_called_where_the_gradient_is():
    x, calls = Place(stage_meshes()[0]), []
    a = x(6, 5)
    handle = a.register_hook(lambda g: calls.append("leaf"))
    a.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    b = a * 2
    b.register_hook(lambda g: calls.append("result"))
    b.retain_grad()
    b.sum().backward()
    handle.remove()
    assert sorted(calls) == (["after", "leaf", "result"] if a.is_initialized else [])


# Values -------------------------------------------------------------------------------------------

ASKING = {
    "item": lambda x: x(1).item(), "bool": lambda x: bool((x(3) > 9).any()),
    "int": lambda x: int(x(1)),
    "float": lambda x: float(x(1)), "complex": lambda x: complex(x(1)),
    "tolist": lambda x: x(3).tolist(),
    "numpy": lambda x: x(3).numpy().sum().item(),
    "numpy forced": lambda x: x(3).numpy(force=True).tolist(),
    "format": lambda x: f"{x(3).sum():.3f}", "percent": lambda x: "%.2f" % x(3).sum(),  # noqa: UP031
    "in": lambda x: 2.0 in x(3),
    "equal": lambda x: torch.equal(x(3), x(3)), "allclose": lambda x: x(3).allclose(x(3)),
    "not": lambda x: not x(1),
    "index": lambda x: [7, 8, 9][x.ints(3, (1,))], "if": lambda x: 1 if x(3).sum() > 0 else 2,
    "and": lambda x: x(1) > 0 and 5,
    "is_nonzero": lambda x: torch.is_nonzero(x(1)),
    "sorted": lambda x: [float(v) for v in sorted(x(3))],
    "any": lambda x: any(x(3) > 9),
    "list of numbers": lambda x: torch.tensor([x(1).sum(), 2.0]).tolist(),
    "full": lambda x: torch.full((2,), x(1).sum()).tolist(),
}  # fmt: skip


class NoGrad(Place):
    def __call__(self, *shape):
        return super().__call__(*shape, grad=False)


@on_ranks(2)
def test_values_are_refused_outside_and_the_error_says_what_to_do():
    x = NoGrad(stage_meshes()[0])
    for name, ask in ASKING.items():
        if x.mesh.coordinate is None:
            with pytest.raises(RuntimeError, match=r"dt\.broadcast_value\(x\)") as caught:
                ask(x)
            if name != "is_nonzero":
                assert "test_execute.py:" in str(caught.value), name


@on_ranks(4)
def test_values_reach_everywhere():
    x = NoGrad(stage_meshes()[1])
    plain = NoGrad(stage_meshes()[dist.get_rank() // 2])
    for name, ask in ASKING.items():
        with dt.values_everywhere():
            found = ask(x)
        everyone = [None] * 4
        dist.all_gather_object(everyone, repr(found))
        assert set(everyone) == {repr(ask(plain))}, (
            name
        )  # the same tensor, on a mesh that this rank is in
    value = dt.broadcast_value(x(5, 3))
    assert type(value) is torch.Tensor
    torch.testing.assert_close(value, randn(5, 3))
    torch.testing.assert_close(x(5, 3).full_tensor(everywhere=True), randn(5, 3))
    here = x(5, 3).full_tensor()
    assert here.dtype == torch.float64 and here.numel() == (15 if x.mesh.coordinate else 0)


# Random numbers -----------------------------------------------------------------------------------


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)


DRAWING = [
    lambda x: F.dropout(x(6, 5), 0.5), lambda x: F.dropout(x(6, 5), 0.0),
    lambda x: F.dropout(x(6, 5), 0.5, training=False),
    lambda x: F.dropout(x(6, 5) * 1, 0.5, inplace=True), lambda x: F.dropout2d(x(2, 3, 4, 4), 0.5),
    lambda x: F.dropout(x(0, 5), 0.5),
    lambda x: F.alpha_dropout(x(6, 5), 0.5, True), lambda x: F.rrelu(x(6, 5), training=True),
    lambda x: F.rrelu(x(6, 5)),
    lambda x: F.gumbel_softmax(x(6, 5)), lambda x: torch.rand_like(x(6, 5)),
    lambda x: torch.bernoulli(x(6, 5).detach().abs().clamp(max=1)),
    lambda x: torch.multinomial(x(6, 5).detach().abs(), 2),
    lambda x: x(6, 5).detach().exponential_(),
    lambda x: F.scaled_dot_product_attention(*[x(2, 3, 6, 4)] * 3, dropout_p=0.3),
    lambda x: F.scaled_dot_product_attention(*[x(2, 3, 6, 4)] * 3),
    lambda x: dt.rand(3, mesh=x.mesh), lambda x: dt.zeros(3, mesh=x.mesh),
    lambda x: dt.randperm(5, mesh=x.mesh), lambda x: nn.init.orthogonal_(x(6, 5)),
    lambda x: nn.init.trunc_normal_(x(6, 5)),
    lambda x: nn.init.zeros_(x(6, 5)), lambda x: nn.init.kaiming_uniform_(x(6, 5)),
    lambda x: nn.init.sparse_(x(6, 5), 0.5),
    lambda x: F.fractional_max_pool2d(x(2, 3, 8, 8), 2, output_size=4),
    lambda x: x.module(nn.LSTM(5, 4, 2, dropout=0.5))(x(3, 6, 5)),
    lambda x: x.module(encoder_layer())(x(3, 6, 8)),
    lambda x: x.module(encoder_layer()).eval()(x(3, 6, 8)),
]  # fmt: skip


@pytest.mark.parametrize("policy", ["fast", "invariant"])
@on_ranks(2)
def test_random_calls_count_alike(policy):
    x, counts = Place(stage_meshes()[0]), []
    with warnings.catch_warnings(), dt.random.rng(policy):
        warnings.simplefilter("ignore", FallbackWarning)
        for draw in DRAWING * 2:
            before = counter.get_state()[1]
            draw(x)
            counts.append(counter.get_state()[1] - before)
    both = [None, None]
    dist.all_gather_object(both, counts)
    assert both[0] == both[1]
    assert counts[:3] == [1, 0, 0]


# Cost ---------------------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """The largest tensor that any kernel gave, and how many gave one of some size."""

    def __init__(self):
        super().__init__()
        self.largest, self.count = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.numel():
                self.largest, self.count = max(self.largest, t.numel()), self.count + 1
        return out


def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@on_ranks(2)
def test_no_kernel_and_no_memory_outside():
    mesh = stage_meshes()[0]
    big = dt.ProcessMesh([1 - dist.get_rank()], ("tp",))  # of the other rank, whichever this is
    x = Place(mesh)
    m = x.mlp()

    value = x(6, 5)

    for kernels in (Kernels(), Kernels()):  # cold and warm
        with kernels:
            m(value).square().sum().backward()
    assert bool(kernels.count) is value.is_initialized
    before = resident()
    w = dt.empty(2**15, 2**15, mesh=big, dtype=torch.float32, requires_grad=True)  # 4 GiB
    for _ in range(3):
        y = torch.tanh(w @ w + 1).softmax(-1)
        y[0] = 1.0
        (y * w).sum().backward()
    assert w.nbytes == 2**32 and y.shape == w.shape and w.grad is None
    assert resident() - before < 64 * 2**20


@on_ranks(2)
def test_a_random_call_counts_once_with_and_without_autocast():
    """What was planned without autocast and is then called under it, and the other way round."""
    for rows, order in ((4, (False, True, False)), (5, (True, False, True))):
        x = dt.shard_tensor(torch.ones(rows, 6), dt.ProcessMesh([0], ("a",)))
        for cast in order:
            before = counter.get_state()[1]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                F.dropout(x, 0.5)
            assert counter.get_state()[1] == before + 1, (rows, cast)


@on_ranks(2)
def test_regular_tensors_get_the_value_of_another_mesh_where_values_are_everywhere() -> None:
    mesh = dt.ProcessMesh([1], ("a",))
    x = dt.shard_tensor(torch.arange(3.0), mesh, [dt.Replicate()])
    y, mean = torch.zeros(3), nn.Parameter(torch.zeros(3))
    with dt.values_everywhere(), torch.no_grad():
        for _ in range(2):
            y.copy_(x)
            y[1:].lerp_(x[1:] * 3, 0.5)
            torch._foreach_add_([y], [x])
            mean.detach().copy_(mean.detach() * 0.5 + y * x)
    assert y.tolist() == [0.0, 3.0, 6.0] and mean.tolist() == [0.0, 4.5, 18.0]
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"Make the call inside `with dt.values_everywhere"):
            y.copy_(x)


# Writes of a value of a stage to a regular tensor: by a rule, by lists, by a body, by a gather.
WRITES = {
    "copy_": lambda y, x: y.copy_(x),
    "+=": lambda y, x: y.__iadd__(x),
    "setitem": lambda y, x: y.__setitem__(slice(1, None), x[1:]),
    "lists": lambda y, x: torch._foreach_copy_([y], [x]),
    "out": lambda y, x: torch.add(x, 1, out=y),
    "addcmul_": lambda y, x: y.addcmul_(x, x),
    "masked_fill_": lambda y, x: y.masked_fill_(x > 1, 7.0),
    "masked_scatter_": lambda y, x: y.masked_scatter_(torch.tensor([True, False, True]), x),
    "put_": lambda y, x: y.put_(torch.tensor([0, 2]), x[:2]),
    "index_copy_": lambda y, x: y.index_copy_(0, torch.tensor([2, 0, 1]), x),
    "scatter_": lambda y, x: y.scatter_(0, torch.tensor([1]), x),
    "addmm_": lambda y, x: y.view(1, 3).addmm_(x.view(1, 3), x.view(3, 1) @ x.view(1, 3)),
    "batch_norm": lambda y, x: F.batch_norm(torch.stack([x, x**2]), y, y + 1, training=True),
    "instance_norm": lambda y, x: F.instance_norm(torch.stack([x, x**2], 1)[None], y, y + 1),
}


@pytest.mark.parametrize("name", WRITES)
@on_ranks(2)
def test_each_way_of_writing_to_a_regular_tensor_sends_what_others_receive(name: str) -> None:
    plain, expected = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    WRITES[name](expected, plain)
    x = dt.shard_tensor(plain, dt.ProcessMesh([1], ("a",)), [dt.Replicate()])
    for _ in range(2):
        y = torch.zeros(3)
        with warnings.catch_warnings(), dt.values_everywhere():
            warnings.simplefilter("ignore", FallbackWarning)
            WRITES[name](y, x)
        assert torch.equal(y, expected)
