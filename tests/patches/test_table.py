"""The changes to torch: listed, taken back completely, and each of them necessary."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import ProcessMesh, Shard, patches
from disttensor.comm import failure_watch
from disttensor.patches import draws
from disttensor.random.counter import _State
from tests.support.oracle import line
from tests.support.pool import on_ranks

ROOT = Path(__file__).resolve().parents[2]

# Everything in torch's modules and classes, before and after.
COMPARE = """
import sys, types, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed, torch.utils.checkpoint, torch.nn.utils.clip_grad
import torch.nn.utils.prune, torch.amp.grad_scaler, torch.optim, torch._subclasses.fake_tensor
import torch.distributed.checkpoint.state_dict

def content(value):
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), len(value), *sorted(map(id, value))
    if isinstance(value, dict):
        return type(value), len(value), *map(id, value.values())
    return id(value)

def state():
    owners = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torch"}
    for name, module in list(owners.items()):
        for value in list(vars(module).values()):
            if isinstance(value, type) and str(value.__module__).startswith("torch"):
                owners[f"{value.__module__}.{value.__qualname__}"] = value
    out = {("sys", "excepthook"): id(sys.excepthook)}
    for owner, of in owners.items():
        for name, value in list(vars(of).items()):
            if not isinstance(value, types.ModuleType) and (name == "__init__" or name[:2] != "__"):
                out[owner, name] = content(value)
    return out

def changed(before, after):
    names = [k for k in before if before[k] != after.get(k, 0) and k[1] not in CACHES]
    return sorted(map(".".join, names))

CACHES = {"next_id"}  # a counter of hooks
before, finders = state(), list(sys.meta_path)
import disttensor
from disttensor import patches
with_it = state()
print(*changed(before, with_it))
patches.uninstall()
assert not changed(before, state()), changed(before, state())
assert sys.meta_path == finders, sys.meta_path
patches.install()
assert changed(before, state()) == changed(before, with_it)
"""


def test_all_changes_are_listed_and_taken_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    generator = next(n for n in done.stdout.split() if n.startswith("torch.utils.checkpoint."))
    assert generator.startswith("torch.utils.checkpoint._checkpoint_without_reentrant_generator")
    samplers = {place.replace(":", ".") for place in draws.SAMPLERS}
    assert len(samplers) > 30 and "torch.distributions.normal.Normal.rsample" in samplers
    assert set(done.stdout.split()) - {generator} - samplers == {
        "torch._C.Generator.manual_seed",
        "torch._C.Generator.set_state",
        "torch._weights_only_unpickler._marked_safe_globals_set",
        "torch.ScriptModule._create_method_from_trace",
        "torch.ScriptModule._create_method_from_trace_with_dict",
        "torch._C._create_function_from_trace",
        "torch._C._create_function_from_trace_with_dict",
        "torch._functorch.eager_transforms._func_decrement_nesting",
        "torch._functorch.eager_transforms._func_increment_nesting",
        "torch._functorch.eager_transforms._grad_decrement_nesting",
        "torch._functorch.eager_transforms._grad_increment_nesting",
        "torch._functorch.eager_transforms._jvp_decrement_nesting",
        "torch._functorch.eager_transforms._jvp_increment_nesting",
        "torch._functorch.vmap._vmap_decrement_nesting",
        "torch._functorch.vmap._vmap_increment_nesting",
        "torch.amp.grad_scaler.GradScaler._unscale_grads_",
        "torch._C._will_engine_execute_node",
        "torch.autograd._engine_run_backward",
        "torch.autograd.graph._get_grad_fn_or_grad_acc",
        "torch.autograd.graph._engine_run_backward",
        "torch.autograd.forward_ad.enter_dual_level",
        "torch.autograd.forward_ad.exit_dual_level",
        "torch.autograd.function.Function.apply",
        "torch.distributed._state_dict_utils._broadcast_tensors",
        "torch.distributed._state_dict_utils._iterate_state_dict",
        "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
        "torch.distributed.checkpoint.state_dict._state_dict_fn",
        "torch.distributed.fsdp._fully_shard._fully_shard._validate_module",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.__init__",
        "torch.distributed.tensor._optim_foreach_supported_types",  # the two lists of torch.optim
        "torch.distributed.tensor._util_foreach_supported_types",  # and torch.utils again
        "torch.nn.init._no_grad_trunc_normal_",
        "torch.nn.init.sparse_",
        "torch.nn.modules.module.Module._load_from_state_dict",
        "torch.nn.modules.module.Module._maybe_warn_non_full_backward_hook",
        "torch.nn.parallel.distributed.DistributedDataParallel.__init__",
        "torch.nn.utils.clip_grad._get_total_norm",
        "torch.nn.utils.clip_grad.clip_grad_norm_",
        "torch.nn.utils.clip_grad.clip_grad_value_",
        "torch.nn.utils.clip_grad_norm_",
        "torch.nn.utils.clip_grad_value_",
        "torch.nn.utils.get_total_norm",
        "torch.nn.utils.parametrizations._Orthogonal.right_inverse",
        "torch.nn.utils.prune.RandomStructured.compute_mask",
        "torch.get_rng_state",
        "torch.optim.optimizer._foreach_supported_types",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.random.get_rng_state",
        "torch.random.set_rng_state",
        "torch.set_rng_state",
        "torch.utils._foreach_utils._foreach_supported_types",
        "torch.utils.hooks.BackwardHook._apply_on_tensors",
    }


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"there is no change 'clip'; there are torch\.autograd"):
        patches.uninstall("clip")


# Each is necessary --------------------------------------------------------------------------------


def of_each_rank(rank: int | None = None) -> ProcessMesh:
    """The mesh of one rank, of this one by default."""
    return ProcessMesh([dist.get_rank() if rank is None else rank], ("x",))


def leaf(mesh: ProcessMesh, size: int = 4) -> Any:
    return dt.ones(size, mesh=mesh, requires_grad=True)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def custom_function() -> None:
    x = leaf(of_each_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 4


def transformed() -> None:
    """The gradient of a sum over rows that other ranks have."""
    x, w = torch.ones(4), dt.shard_tensor(torch.arange(4.0), line(), [Shard(0)])
    found = torch.func.vmap(lambda row: (row * w).sum())(x.expand(2, 4))
    assert found.tolist() == [6.0, 6.0]


def traced() -> None:
    x = leaf(line()).detach()
    for trace in (make_fx(torch.relu), lambda x: torch.jit.trace(torch.relu, (x,))):
        said = ""
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # of torch.jit
                warnings.simplefilter("ignore", kind)
            try:
                trace(x)
            except NotImplementedError as error:
                said = str(error)
        assert "inside make_fx" in said or "inside torch.jit.trace" in said


def not_compiled() -> None:
    name = "disttensor/dispatch/dispatch.py"
    found = torch._dynamo.trace_rules.check_file(str(ROOT / name))
    assert found.skipped


def wrapped(wrapper: str) -> None:
    model = dt.shard_module(nn.Linear(4, 4), line())
    place, _, name = wrapper.rpartition(".")
    with pytest.raises(TypeError, match=f"{name} of a model .*'weight' is f32.*one program"):
        getattr(importlib.import_module(place), name)(model)
    assert type(model) is nn.Linear and not model._forward_pre_hooks


def hooked() -> None:
    module, seen = nn.ReLU(), []
    module.register_full_backward_hook(lambda *grads: seen.append(grads[1:]))
    x = leaf(of_each_rank())
    module(x).sum().backward()
    assert torch.equal(x.grad.to_local(), torch.ones(4))
    assert [type(g) for pair in seen[0] for g in pair] == [dt.DistTensor] * 2


def hooked_as_before() -> None:
    module = nn.ReLU()
    module.register_backward_hook(lambda *_: None)
    with (
        warnings.catch_warnings(),
        pytest.raises(NotImplementedError, match="Use register_full_backward_hook"),
    ):
        warnings.simplefilter("ignore")  # torch has given them up
        module(leaf(of_each_rank()))


def recomputed() -> None:
    w = dt.rand(6, 6, mesh=line(), requires_grad=True)
    grads = []
    for run in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        dt.manual_seed(3)
        w.grad = None
        run(lambda x: F.dropout(x.sin() @ w, 0.5), w * 2).sum().backward()
        grads.append(w.grad.full_tensor())
    assert torch.equal(*grads)


def step() -> None:
    """One message for all gradients."""
    leaves = [leaf(line()) for _ in range(3)]
    x = dt.ones(4, mesh=line(), placements=[Shard(0)])
    sum((w * x).sum() for w in leaves).backward()
    with dt.debugging.record_comms() as comms:
        torch.optim.SGD(leaves, lr=1.0).step()
    assert len(comms.records) == 1


def with_grads() -> list[Any]:
    leaves = [leaf(of_each_rank(0)), leaf(of_each_rank(1))]
    for w in leaves:
        (w * 3).sum().backward()
    return leaves


def clipped() -> None:
    norm = nn.utils.clip_grad_norm_(with_grads(), 100.0)
    assert norm.item() == pytest.approx(72**0.5)


def norm_of_a_stage() -> None:
    here = [w.grad for w in with_grads() if w.grad is not None]
    try:
        nn.utils.get_total_norm(here)
    except RuntimeError:
        return
    raise AssertionError("the norm of one stage")


def value_clipped() -> None:
    other = with_grads()[1 - dist.get_rank()]
    nn.utils.clip_grad_value_([other], 1.0)


def scaled() -> None:
    leaves = with_grads()
    if leaves[0].grad is not None:
        leaves[0].grad[0] = float("inf")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    try:
        scaler.step(torch.optim.SGD(leaves, lr=1.0))
        mine = leaves[dist.get_rank()].tolist()
    except RuntimeError as error:
        mine = str(error)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine)
    assert everyone == [[1.0] * 4] * 2


def truncated() -> None:
    dt.manual_seed(0)
    w = dt.zeros(50, mesh=of_each_rank(0))
    try:
        nn.init.trunc_normal_(w, 0.0, 1.0, -0.5, 2.0)
        mine: Any = _State.calls
    except RuntimeError as error:
        mine = str(error)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine)
    assert isinstance(mine, int) and everyone[0] == everyone[1]


def sparse() -> None:
    """Replicas are one value, however torch's own generators stand."""
    dt.manual_seed(0)
    torch.rand(dist.get_rank())
    w = dt.zeros(20, 3, mesh=line())
    nn.init.sparse_(w, 0.5)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, w.to_local().tolist())
    assert everyone[0] == everyone[1]


def equal_on_ranks(*tensors: Any) -> None:
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, [t.to_local().tolist() for t in tensors])
    assert everyone[0] == everyone[1]


def sampled() -> None:
    torch.rand(dist.get_rank())
    mean = dt.zeros(4, mesh=line())
    normal = torch.distributions.Normal(mean, mean + 1)
    equal_on_ranks(normal.rsample(), torch.distributions.Independent(normal, 1).rsample())


def edges_and_hooks() -> None:
    w = dt.ones(4, mesh=line(), requires_grad=True)
    total = (w * dt.ones(6, 4, mesh=line(), placements=[Shard(0)])).sum() + w.sum()
    (g,) = torch.autograd.grad(total, torch.autograd.graph.get_gradient_edge(w))
    assert isinstance(g, dt.DistTensor) and g.full_tensor().tolist() == [7.0] * 4


def pruned() -> None:
    wide, tall = (dt.ones(6, n, mesh=line()).requires_grad_() for n in (40, 3))
    layers = nn.Module(), nn.Module()
    layers[0].weight, layers[1].weight = nn.Parameter(wide), nn.Parameter(tall)
    torch.rand(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dt.errors.FallbackWarning)
        prune.random_structured(layers[0], "weight", 0.5, dim=1)
        nn.init.eye_(layers[1].weight)
        orthogonal(layers[1])
    equal_on_ranks(layers[0].weight_mask, layers[1].parametrizations.weight[0].base)


def restored() -> None:
    """The numbers of DistTensors come back with torch's."""
    x = dt.ones(20, mesh=line())
    torch.manual_seed(0)
    torch.rand_like(x)
    state = torch.get_rng_state()
    found = []
    for _ in range(2):
        found.append(torch.rand_like(x).to_local())
        torch.set_rng_state(state)
    assert torch.equal(*found)


def seeded_again() -> None:
    """The numbers of DistTensors restart with torch's, also after draws of one rank."""
    x = dt.ones(20, mesh=line())
    found = []
    for seed in (torch.manual_seed, torch.default_generator.manual_seed) * 2:
        seed(0)
        torch.rand(1)
        found.append(torch.rand_like(x).to_local())
    assert all(torch.equal(numbers, found[0]) for numbers in found)


def lists_of_optimizers() -> None:
    """As on a GPU."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    devices = optimizer._get_foreach_kernels_supported_devices
    optimizer._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    try:
        assert optimizer._default_to_fused_or_foreach([leaf(line())], False) == (False, True)
    finally:
        optimizer._get_foreach_kernels_supported_devices = devices


def lists_of_clipping() -> None:
    grads = [dt.ones(4, mesh=line(), placements=[Shard(0)]) for _ in range(3)]
    with dt.debugging.record_comms() as comms:
        nn.utils.get_total_norm(grads)
    assert len(comms.records) == 1


def loaded() -> None:
    file = io.BytesIO()
    torch.save(leaf(line()), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        raise AssertionError from error


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.flat = nn.Parameter(torch.ones(4)), nn.Flatten(0)

    def forward(self, x):
        return self.flat((x * self.weight).view(2, 2))


def changed_modules() -> None:
    for rank in (0, 1):
        mesh = of_each_rank(rank)
        module = dt.pipeline.skip(dt.shard_module(Flat(), mesh, {}))
        for start, shape in ((0, (4,)), (0, (4,)), (1, (2, 2))):
            module.flat.start_dim = start
            assert module(leaf(mesh)).shape == shape


def pieces() -> Any:
    return dt.shard_tensor(torch.arange(5.0), line(), [Shard(0)])


def of_torch(module: str) -> Any:
    """A module that ``import disttensor`` does not load."""
    return importlib.import_module(f"torch.distributed.{module}")


def whole_state() -> None:
    got = of_torch("_state_dict_utils")._gather_state_dict({"w": {"a": [pieces()]}})
    assert type(got["w"]["a"][0]) is torch.Tensor and got["w"]["a"][0].tolist() == [0, 1, 2, 3, 4]


def received_state() -> None:
    full, mine = {"w": torch.ones(5)}, {"w": pieces()}
    of_torch("_state_dict_utils")._broadcast_state_dict(full, mine, torch.device("cpu"))
    assert isinstance(mine["w"], dt.DistTensor) and mine["w"].sum().item() == 5


def staged_state() -> None:
    stager = of_torch("checkpoint._state_dict_stager").StateDictStager()
    x = pieces()
    got = stager.stage({"w": x})["w"]
    assert torch.equal(got.to_local(), x.to_local())
    assert got.to_local().data_ptr() != x.to_local().data_ptr()


def states_of_stages() -> None:
    leaves = with_grads()
    model = nn.ParameterList(leaves)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    state = of_torch("checkpoint.state_dict").get_optimizer_state_dict(model, optimizer)["state"]
    assert list(state) == ["0", "1"] and all(s["step"] == 1 for s in state.values())


def assigned() -> None:
    model = dt.shard_module(nn.Linear(4, 2), line(), {"weight": [Shard(0)]})
    model.load_state_dict(nn.Linear(4, 2).state_dict(), assign=True)
    assert isinstance(model.weight, dt.DistTensor) and model.weight.placements == (Shard(0),)


def refused_to_save() -> None:
    hf = importlib.import_module("transformers")
    config = hf.GPT2Config(n_layer=1, n_head=1, n_embd=2, vocab_size=4, n_positions=4)
    model = dt.shard_module(hf.GPT2LMHeadModel(config), line(), {"transformer.wte": [Shard(0)]})
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
        except RuntimeError as error:
            assert "dt.pretrained.save" in str(error)
        assert not list(Path(folder).iterdir())
    dist.barrier()


OPT_EINSUM = {
    "__init__": "",
    "backends/__init__": "",
    "backends/dispatch": "_aliases = {'torch': 'opt_einsum.backends.torch'}",
    "backends/torch": "import torch; einsum = lambda equation, *xs: torch.einsum(equation, xs)",
}


@contextlib.contextmanager
def opt_einsum() -> Iterator[Any]:
    """The module of opt_einsum that finds the backend of an array; a small one of ours where it is
    not installed."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in OPT_EINSUM.items():
            file = Path(folder, "opt_einsum", f"{name}.py")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        sys.path.append(folder)
        before = set(sys.modules)
        importlib.invalidate_caches()
        try:
            yield importlib.import_module("opt_einsum.backends.dispatch")
        finally:
            sys.path.remove(folder)
            for name in set(sys.modules) - before:
                del sys.modules[name]


def contracted() -> None:
    """As ``opt_einsum.contract`` does: by NumPy where the array's own module has no einsum."""
    x = dt.ones(4, 3, mesh=line(), placements=[Shard(0)], requires_grad=True)
    with opt_einsum() as dispatch:
        backend = type(x).__module__.partition(".")[0]
        library = importlib.import_module(dispatch._aliases.get(backend, backend))
        einsum = getattr(library, "einsum", np.einsum)
        einsum("ij,kj->ik", x, x).sum().backward()
    assert x.grad.full_tensor().eq(8).all()


def told_of_failures() -> None:
    leaf(line()).sum()
    assert sys.excepthook is failure_watch._hook


def attended_by_flex_attention() -> None:
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    q = dt.shard_tensor(torch.ones(2, 2, 16, 4), line(), [Shard(1)])
    with pytest.raises(TypeError, match=r"flex_attention of .*over heads or rows.*local_map"):
        flex.flex_attention(q, q, q)
    on_heads = dt.local_map(
        lambda q, k, v: flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + j),
        in_placements=[[Shard(1)]] * 3, out_placements=[Shard(1)],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is slow without torch.compile
        assert on_heads(q, q, q).full_tensor().allclose(torch.ones(2, 2, 16, 4))


def set_data() -> None:
    x, y = torch.zeros(3), nn.Parameter(torch.zeros(3))
    for regular in (x, y):
        with pytest.raises(TypeError, match="data of a regular tensor"):
            regular.data = dt.ones(3, mesh=line())
    x.data = y.data = torch.ones(3)
    assert torch.equal(x.data, y.detach()) and y.data.requires_grad is False


def sharded_and_vmapped() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    dt.fully_shard(model, mesh=line(), segments=["0", "2"])
    torch.vmap(model)(torch.ones(2, 4)).sum().backward()


def compiled_for_cuda() -> None:
    jiterator = importlib.import_module("torch.cuda.jiterator")
    double = jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    x = leaf(line())
    with pytest.raises(TypeError, match="twice, a function of torch"):
        double(x)


WRAPPERS = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed.fsdp.FullyShardedDataParallel",
)
PROGRAMS: dict[str, Callable[[], None]] = {
    "torch.autograd.Function.apply": custom_function,
    "torch.autograd.backward, torch.autograd.grad": sharded_and_vmapped,
    "torch.autograd.graph: get_gradient_edge, register_multi_grad_hook": edges_and_hooks,
    "torch.Tensor.data": set_data,
    **{name: functools.partial(wrapped, name) for name in WRAPPERS},
    "torch.nn.attention.flex_attention": attended_by_flex_attention,
    "torch.cuda.jiterator": compiled_for_cuda,
    "torch.nn.Module.register_full_backward_hook": hooked,
    "torch.nn.Module.register_backward_hook": hooked_as_before,
    "torch.utils.checkpoint.checkpoint": recomputed,
    "torch.optim.Optimizer.step": step,
    "torch.nn.utils.clip_grad_norm_": clipped,
    "torch.nn.utils.get_total_norm": norm_of_a_stage,
    "torch.nn.utils.clip_grad_value_": value_clipped,
    "torch.amp.GradScaler.unscale_": scaled,
    "torch.nn.init.trunc_normal_": truncated,
    "torch.nn.init.sparse_": sparse,
    "torch.distributions: sample, rsample": sampled,
    "torch.nn.utils.prune.random_structured, torch.nn.utils.parametrizations.orthogonal": pruned,
    "torch.get_rng_state, torch.set_rng_state": restored,
    "torch.Generator.manual_seed": seeded_again,
    "torch.optim: functions on lists": lists_of_optimizers,
    "torch.nn.utils: functions on lists": lists_of_clipping,
    "torch.load(weights_only=True)": loaded,
    "torch.distributed.checkpoint: full_state_dict": whole_state,
    "torch.distributed.checkpoint: broadcast_from_rank0": received_state,
    "torch.distributed.checkpoint: async_save": staged_state,
    "torch.distributed.checkpoint: optimizers of several stages": states_of_stages,
    "transformers: save_pretrained": refused_to_save,
    "opt_einsum.contract": contracted,
    "torch.nn.Module: attributes and hooks": changed_modules,
    "torch.nn.Module.load_state_dict(assign=True)": assigned,
    "torch.func, torch.autograd.forward_ad": transformed,
    "make_fx, torch.jit.trace": traced,
    "torch.compile": not_compiled,
    "sys.excepthook": told_of_failures,
}


def test_each_change_has_a_program() -> None:
    """Names of groups have a test of their own: without them ranks wait for each other."""
    names = [change.what for change in patches.TABLE]
    assert [*PROGRAMS, "torch.distributed.new_group"] == names


WRONG = (AssertionError, RuntimeError, TypeError, dt.errors.FallbackWarning, pytest.fail.Exception)


@pytest.mark.parametrize("what", PROGRAMS)
@on_ranks(2)
def test_each_change_is_necessary(what: str) -> None:
    program = PROGRAMS[what]
    dt.ones(2, mesh=line(), placements=[Shard(0)]).sum().item()
    program()
    patches.uninstall(what)
    try:
        with pytest.raises(WRONG):
            program()
    finally:
        patches.install(what)
    program()


@on_ranks(2)
def test_torch_names_a_group_by_the_number_of_groups() -> None:
    """Which ranks of different meshes do not agree on."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    before = c10d._process_group_name([0, 1], True)
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
        assert c10d._process_group_name([0, 1], True) != before
    assert dt.ones(4, mesh=ProcessMesh([1, 0], ("new",)), placements=[Shard(0)]).sum().item() == 4
