"""shard_data_parallel: what is communicated, kept and saved; low precision; errors leave everything
as it was."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import disttensor as dt
from disttensor import DistTensor
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import (
    EACH,
    S0,
    R,
    adamw,
    at_rest,
    compare,
    engine,
    full,
    gradients,
    line,
    mesh_of,
    mlp,
    sgd,
    squares,
    stages,
    usable,
    values,
    ways,
)


def batch(i=0, dtype=torch.float64):
    return dt.shard_tensor(randn(5, 6, seed=i).to(dtype), line(), [S0])


# What is communicated -----------------------------------------------------------------------------


def counted(model, step=squares, dtype=torch.float64):
    """The collectives of the third step, when the order of segments is known."""
    for i in range(2):
        step(model, batch(i, dtype))
        model.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    with dt.debugging.record_comms() as log:
        step(model, batch(2, dtype))
    return log


ROWS = [
    7 * 6 // 7 * 4 + 4,
    3 * 7 + 3,
    5 + 1,
]  # elements of a rank's row of "0", "2", "4": dims 0 of 7, 5 and 1 over two


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("again", [True, False])
@on_ranks(2)
def test_collectives_of_stage_3(prefetch, again):
    model = dt.shard_data_parallel(
        mlp(), line(), segments=EACH, prefetch=prefetch, reshard_after_forward=again
    )
    log = counted(model)
    gathers = [r for r in log if r.kind == "all_gather"]
    scatters = [r for r in log if r.kind == "reduce_scatter"]
    assert len(log) == len(gathers) + len(scatters), str(log)
    assert sorted(r.bytes for r in gathers) == sorted(8 * n for n in ROWS * (2 if again else 1)), (
        str(log)
    )
    assert sorted(r.bytes for r in scatters) == sorted(8 * (n + 2) for n in ROWS), str(log)
    assert [r.phase for r in gathers].count("forward") == 3


@on_ranks(2)
def test_a_root_segment_is_gathered_once():
    model = dt.shard_data_parallel(mlp(), line())
    counts = counted(model).counts()
    assert counts == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize(
    ("stage", "kinds"),
    [
        (1, ["all_gather", "all_reduce"]),
        (2, ["all_gather", "reduce_scatter"]),
        (None, ["all_reduce"]),
    ],
)
@on_ranks(2)
def test_collectives_of_the_other_stages(stage, kinds):
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    log = counted(model)
    assert log.counts() == dict.fromkeys(kinds, 3), str(log)


@stages
@on_ranks(2)
def test_parameters_that_did_not_change_are_not_gathered_again(stage):
    """Stages 1 and 2 keep them."""
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    squares(model, batch())
    with dt.debugging.record_comms() as log, torch.no_grad():
        model(batch(1))
    assert log.counts() == ({"all_gather": 3} if stage == 3 else {})


@on_ranks(4)
def test_the_gradients_of_replicas_are_reduced_as_shards():
    mesh = mesh_of((2, 2), ("dp", "fsdp"))
    model = dt.shard_data_parallel(mlp(), mesh, segments=EACH, replicate_axis="dp")
    x = dt.shard_tensor(randn(5, 6), mesh, [S0, S0])
    squares(model, x)
    with dt.debugging.record_comms() as log:
        squares(model, x)
    assert [r.axis for r in log if r.kind == "all_reduce"] == ["dp"] * 3, str(log)
    assert [r.axis for r in log if r.kind == "reduce_scatter"] == ["fsdp"] * 3
    assert len(log) == 12
    assert {r.bytes for r in log if r.kind == "all_reduce"} == {8 * (n + 2) for n in ROWS}


# Low precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", [None, torch.float32])
@stages
@on_ranks(2)
def test_computing_in_bf16(stage, wire):
    """Parameters in fp32: a plain model that casts by hand is the reference. Traffic is of the low
    precision."""
    torch.manual_seed(0)
    plain = mlp(torch.float32)
    torch.manual_seed(0)
    model = dt.shard_data_parallel(
        mlp(torch.float32),
        line(),
        segments=EACH,
        param_dtype=torch.bfloat16,
        reduce_dtype=wire,
        **ways(stage),
    )
    opt, ref = sgd(model.parameters()), sgd(plain.parameters())
    for i in range(3):
        opt.zero_grad()
        ref.zero_grad()
        with dt.debugging.record_comms() as log:
            loss = model(batch(i, torch.float32)).float().square().sum()
            loss.backward()
        low = {k: v.detach().bfloat16().requires_grad_() for k, v in plain.named_parameters()}
        want = (
            torch.func.functional_call(plain, low, (randn(5, 6, seed=i).bfloat16(),))
            .float()
            .square()
            .sum()
        )
        want.backward()
        for name, p in plain.named_parameters():
            p.grad = low[name].grad.float()
        assert all(
            p.dtype is torch.float32 and p.grad.dtype is torch.float32 for p in model.parameters()
        )
        compare(full(loss), want.detach(), 2e-2)
        compare(gradients(model), gradients(plain), 5e-2)
        for r in log:
            if r.kind == "all_gather":
                assert r.dtype is torch.bfloat16, str(log)
            elif r.dtype.is_floating_point and len(r.shape) == 1 and r.shape[0] > 1:
                assert r.dtype is (wire or torch.bfloat16), str(log)
        opt.step()
        ref.step()
    compare(values(model), values(plain), 2e-2)
    at_rest(model, list(model.parameters()))


@stages
@on_ranks(2)
def test_gradients_in_low_precision_add_up_in_that_of_the_parameters(stage):
    model = dt.shard_data_parallel(
        nn.Linear(4, 1, bias=False), line(), param_dtype=torch.bfloat16, **ways(stage)
    )
    x = dt.shard_tensor(torch.ones(2, 4), line(), [S0])
    for scale in (256.0, 1.0, 1.0):  # 256 + 1 is 256 in bf16
        (model(x) * scale).sum().backward()
    compare(full(model.weight.grad), torch.full((1, 4), 516.0))


@on_ranks(2)
def test_integers_keep_their_dtype():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.count = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)

        def forward(self, i):
            return self.embed(i) * self.count.sum()

    model = dt.shard_data_parallel(Model(), line(), param_dtype=torch.bfloat16)
    y = model(dt.shard_tensor(torch.tensor([0, 4, 2]), line(), [S0]))
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    compare(full(model.embed.weight.grad)[:, 0], torch.tensor([6.0, 0, 6, 0, 6]))
    assert model.count.grad is None


# Born as shards, saved and resumed ----------------------------------------------------------------


@stages
@on_ranks(2)
def test_a_module_on_the_meta_device(stage):
    out = []
    for device in ("cpu", "meta"):
        dt.manual_seed(5)
        with torch.device(device):
            model = mlp()
        if device == "cpu":
            dt.shard_module(model, line(), {})
            for m in model:
                if hasattr(m, "reset_parameters"):
                    m.reset_parameters()
        else:
            dt.shard_data_parallel(model, line(), segments=EACH, **ways(stage))
            assert model[0].weight.placements == ((R,) if stage is None else (S0,))
            assert model[0].weight.to_local().shape[0] in ((7,) if stage is None else (4, 3))
        if device == "cpu":
            dt.manual_seed(5)
            dt.shard_data_parallel(model, line(), segments=EACH, **ways(stage))
        out.append(model)
    for p in out[1].parameters():
        assert not p.is_meta and full(p).isfinite().all() and full(p).abs().sum() > 0


@stages
@on_ranks(2)
def test_what_is_saved(stage):
    """Shards, never what was gathered, whenever it is asked for."""
    model = dt.shard_data_parallel(
        mlp(), line(), segments=EACH, reshard_after_forward=False, **ways(stage)
    )
    held = dict(model.named_parameters())
    opt = adamw(model.parameters())

    def right():
        state = model.state_dict()
        assert list(state) == list(held)
        for name, x in state.items():
            assert type(x) is DistTensor and x.spec is held[name].spec, name
            assert x.to_local().data_ptr() == held[name].to_local().data_ptr()
        assert [id(p) for p in model.parameters()] == [id(p) for p in held.values()]

    y = model(batch())
    right()
    loss = y.square().sum()
    loss.backward(retain_graph=True)
    right()
    opt.step()
    right()
    for entry, p in zip(opt.state_dict()["state"].values(), held.values(), strict=True):
        assert entry["exp_avg"].spec is p.spec and entry["exp_avg_sq"].spec is p.spec


@pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")
@stages
@on_ranks(2)
def test_a_run_resumes(stage):
    def start():
        torch.manual_seed(0)
        model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
        return model, adamw(model.parameters())

    def go_on(model, opt, steps):
        losses = []
        for i in steps:
            opt.zero_grad()
            losses.append(full(squares(model, batch(i))))
            opt.step()
        return losses

    model, opt = start()
    losses = go_on(model, opt, range(5))
    model, opt = start()
    first = go_on(model, opt, range(2))
    model(batch(3))  # not finished
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    torch.manual_seed(7)
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    opt = adamw(model.parameters())
    squares(model, batch(9))
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    rest = go_on(model, opt, range(2, 5))
    compare([*first, *rest], losses, 0)


# Errors -------------------------------------------------------------------------------------------

HALF = MixedPrecisionPolicy(torch.bfloat16)
BAD = {
    "axis": ({"shard_axis": "nope"}, ValueError, "'nope'"),
    "replicas": ({"replicate_axis": "nope"}, ValueError, "'nope'"),
    "the same axis": ({"replicate_axis": "fsdp"}, ValueError, "both"),
    "stage 0": ({"stage": 0}, ValueError, "stage=0"),
    "stage 4": ({"stage": 4}, ValueError, "stage=4"),
    "stage True": ({"stage": True}, ValueError, "stage=True"),
    "anchors": ({"segments": dt.fsdp.SegmentByAnchors(["0", "nope"])}, ValueError, "'nope'"),
    "names": ({"segments": ["nope"]}, ValueError, "'nope'"),
    "a name twice": ({"segments": ["0", "0"]}, ValueError, "twice"),
    "a name in two lists": ({"segments": [["0", "2"], ["*"]]}, ValueError, "in two lists"),
    "ignored": ({"ignored_params": [nn.Parameter(torch.ones(2))]}, ValueError, "is none of"),
    "ignored, by name": ({"ignored_params": ["0.weight"]}, TypeError, "an entry='0.weight'"),
    "policy": ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy=torch.bfloat16"),
    "policy of no module": ({"mp_policy": {"9": HALF}}, ValueError, "'9' matches no module"),
    "policies of no names": ({"mp_policy": {0: HALF}}, TypeError, "a name of a module"),
    "two of the whole": ({"mp_policy": HALF, "param_dtype": torch.half}, ValueError, "names the"),
    "policy of wrong dtype": (
        {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.int8)}, ValueError, "output_dtype"),
    "policy without a flag": (
        {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=1)}, TypeError, "cast_forward_inp"),
    "prefetch": ({"prefetch": -1}, ValueError, "prefetch"),
    "param_dtype": ({"param_dtype": torch.int32}, ValueError, "floating"),
    "reduce_dtype": ({"reduce_dtype": torch.int32}, ValueError, "floating"),
    "dtype of no kind": ({"param_dtype": "bf16"}, (TypeError, ValueError), "bf16"),
    "prefetch True": ({"prefetch": True}, TypeError, "prefetch"),
    "mesh": ({"mesh": None}, ValueError, "regular tensor"),
    "no mesh at all": ({"mesh": "fsdp"}, (TypeError, ValueError), "mesh"),
    "stage 2.0": ({"stage": 2.0}, ValueError, "stage=2.0"),
}  # fmt: skip


def as_it_was(model):
    """The module's tensors and hooks, to be compared by identity."""
    return [
        (m, id(x) if isinstance(x, torch.Tensor) else len(x))
        for m in model.modules()
        for x in (
            *m._parameters.values(),
            *m._buffers.values(),
            m._forward_pre_hooks,
            m._forward_hooks,
            m.__dict__,
        )
        if x is not None
    ]


@pytest.mark.parametrize("kind", BAD)
@on_ranks(2)
def test_bad_input_changes_nothing(kind):
    options, error, words = BAD[kind]
    model = mlp()
    before = as_it_was(model)
    with pytest.raises(error, match=words):
        dt.shard_data_parallel(model, **{"mesh": line(), "segments": EACH, **options})
    assert as_it_was(model) == before
    squares(dt.shard_data_parallel(model, line()), batch())


@on_ranks(2)
def test_twice_with_a_gradient_or_without_parameters():
    model = mlp()
    model(randn(5, 6)).sum().backward()
    before = as_it_was(model)
    with pytest.raises(ValueError, match="has a gradient"):
        dt.shard_data_parallel(model, line())
    assert as_it_was(model) == before
    model.zero_grad()
    dt.shard_data_parallel(model, line())
    for again in (model, model[0], nn.Sequential(model[2])):
        before = as_it_was(again)
        with pytest.raises(ValueError, match="already"):
            dt.shard_data_parallel(again, line())
        assert as_it_was(again) == before
    with pytest.raises(ValueError, match="already"):
        dt.shard_data_parallel(dt.shard_data_parallel(nn.Tanh(), line()), line())
    with pytest.raises(TypeError, match="module"):
        dt.shard_data_parallel([model], line())


@stages
@on_ranks(2)
def test_an_optimizer_from_before_is_told_so(stage):
    model = mlp()
    opt = sgd(model.parameters())
    dt.shard_data_parallel(model, line(), **ways(stage))
    squares(model, batch())
    with pytest.raises(RuntimeError, match="no longer those of the model"):
        opt.step()


@pytest.mark.parametrize(
    "change", [lambda m: m.float(), lambda m: m.to(torch.bfloat16)], ids=["float", "to"]
)
@stages
@on_ranks(2)
def test_another_dtype_afterwards_is_an_error(change, stage):
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    for some in (
        model,
        dt.shard_data_parallel(mlp(), dt.ProcessMesh([0], ("fsdp",)), **ways(stage)),
    ):
        with pytest.raises(RuntimeError, match="before it is sharded"):
            change(some)  # on the ranks outside, too
    squares(model, batch())


@stages
@on_ranks(2)
def test_parameters_from_a_vector(stage):
    """A part of the vector moves to the shards of its parameter."""
    plain = mlp()
    model = dt.shard_data_parallel(copy.deepcopy(plain), line(), segments=EACH, **ways(stage))
    params = list(model.parameters())
    vector = nn.utils.parameters_to_vector(params) * 2
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(plain.parameters()) * 2, plain.parameters()
    )
    nn.utils.vector_to_parameters(vector, params)
    compare(full(squares(model, batch())), full(squares(plain, full(batch()))))
    compare(gradients(model), gradients(plain))


# Exceptions ---------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


@pytest.mark.parametrize("where", [0, 1, 2, 3, 4, None])
@pytest.mark.parametrize("after", [True, False])
@stages
@on_ranks(2)
def test_an_exception_in_a_forward(where, after, stage):
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    held = list(model.parameters())
    squares(model, batch())
    module = model if where is None else model[where]
    handle = (module.register_forward_hook if after else module.register_forward_pre_hook)(boom)
    for _ in range(2):
        with pytest.raises(Boom):
            model(batch())
        assert [id(p) for p in model.parameters()] == [id(p) for p in held]
    handle.remove()
    usable(model)


@pytest.mark.parametrize("where", [0, 1, 2, 3, 4])
@stages
@on_ranks(2)
def test_an_exception_in_a_backward(where, stage):
    model = dt.shard_data_parallel(mlp(), line(), segments=EACH, **ways(stage))
    held = list(model.parameters())
    squares(model, batch())
    for _ in range(2):
        handle = model[where].register_forward_hook(lambda m, a, y: y.register_hook(boom) and None)
        loss = model(batch()).square().sum()
        handle.remove()
        with pytest.raises(Boom):
            loss.backward()
    usable(model)
    assert [id(p) for p in model.parameters()] == [id(p) for p in held]


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_module_that_is_dropped_takes_its_engine_along(stage):
    def engine_of_a_step():
        model = dt.shard_data_parallel(mlp(), line(), segments=EACH, stage=stage)
        squares(model, batch())
        return weakref.ref(engine(model))

    engine_of_a_step()  # what torch and dispatch keep of a first call
    last = engine_of_a_step()
    gc.collect()
    assert last() is None
