"""The methods of torch's FSDPModule; fully_shard and replicate in one model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

import disttensor as dt
from disttensor import Replicate, Shard
from tests.support.oracle import line, randn
from tests.support.pool import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Any) -> Any:
        for layer in self.inner:
            x = layer(x)
        return self.last(x)


def net() -> Any:
    torch.manual_seed(0)
    return Net().double()


ROWS = [randn(6, 5) + i for i in range(4)]


def train(model: Any, batches: list[Any], before: Callable[[int], Any] = lambda i: None) -> None:
    """Trains with one optimizer step for two micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i, x in enumerate(batches):
        before(i)
        model(x).square().mean().backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def same(model: Any, expected: Any, message: str) -> None:
    for key, value in expected.state_dict().items():
        found = model.state_dict()[key].full_tensor()
        torch.testing.assert_close(found, value, msg=lambda m, k=key: f"{message} {k}\n{m}")


def split(batches: list[Any], mesh: Any) -> list[Any]:
    how = [Shard(0)] * mesh.ndim
    return [dt.shard_tensor(x, mesh, how) for x in batches]


def nested(model: Any, mesh: Any, kinds: str = "sss", root: str = "s", **options: Any) -> Any:
    """``kinds``: of each inner layer, s: fully sharded, r: replicated, -: part of the root."""
    calls = {"s": partial(dt.fully_shard, **options), "r": dt.replicate}
    for kind, layer in zip(kinds, model.inner, strict=True):
        if kind != "-":
            calls[kind](layer, mesh=mesh)
    return calls[root](model, mesh=mesh)


@on_ranks(2)
def test_fully_shard_and_replicate_in_one_model_train_as_one_process() -> None:
    expected = net()
    train(expected, ROWS)
    for kinds, root in (("sss", "s"), ("srs", "r"), ("rr-", "s"), ("-s-", "r"), ("rrr", "r")):
        model = nested(net(), line(), kinds, root)
        same(model, net(), "placed")
        assert isinstance(model, dt.fsdp.FSDPModule) and type(model).__name__ == "Net"
        twin = copy.deepcopy(model)
        for one in (model, twin):
            train(one, split(ROWS, line()))
            same(one, expected, f"{kinds} {root}")
            layers = [model.inner[i][0].weight.placements for i in range(3)]
        assert layers == [
            (Shard(0) if (root if k == "-" else k) == "s" else Replicate(),) for k in kinds
        ]
        with dt.debugging.record_comms() as log:  # one prefetch order for all calls
            model(split(ROWS[:1], line())[0])
        assert len(log) == sum(k == "s" for k in kinds) + (root == "s")


class Counted:
    """A collective of the user that allocates and counts."""

    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class Gather(Counted, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool) -> Any:
        self.calls += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(Counted, ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, _: bool) -> None:
        """Ends before it returns, as torch allows."""
        self.calls += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)


@on_ranks(2)
def test_methods_of_torch_change_what_is_sent_and_no_value() -> None:
    """Numbers of collectives of a forward and of a backward, of four segments of one layer each."""
    expected = net()
    train(expected, ROWS)
    gather, scatter = Gather(), Scatter()

    def each(name: str, *args: Any) -> Callable[[Any, int], None]:
        return lambda model, i: [getattr(m, name)(*args) for m in [model, *model.inner]]

    def prefetch(model: Any, i: int) -> None:
        first, second, third = model.inner
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        second.set_modules_to_forward_prefetch([])
        second.set_modules_to_backward_prefetch([])

    def gathered(model: Any, i: int) -> None:
        model.inner[0].unshard()
        handle = model.inner[1].unshard(async_op=True)
        handle.wait()
        model.inner[2].unshard()
        model.inner[2].reshard()

    last = ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward")
    methods: dict[str, tuple[Callable[[Any, int], Any], Any]] = {
        "none": (lambda model, i: None, (4, 7)),
        last[0]: (lambda model, i: getattr(model, last[0])(i % 2 == 1), (4, 3)),
        last[1]: (lambda model, i: getattr(model, last[1])(i % 2 == 1), (4, 7)),
        last[2]: (lambda model, i: getattr(model, last[2])(i % 2 == 1), (4, 7)),
        "never": (lambda model, i: getattr(model, last[0])(False), (4, 3)),
        "after forward": (lambda model, i: model.set_reshard_after_forward(False), (4, 4)),
        "root after forward": (lambda model, i: model.set_reshard_after_forward(True), (4, 8)),
        "after backward": (lambda model, i: model.set_reshard_after_backward(False), (4, 7)),
        "prefetch": (prefetch, (4, 7)),
        "unshard": (gathered, (2, 7)),
        "buffers": (each("set_reduce_scatter_max_input_buffers", 1), (4, 7)),
        "sums": (each("set_force_sum_reduction_for_comms", True), (4, 7)),
        "event": (lambda model, i: model.set_post_optim_event(torch.Event()), (4, 7)),
        "unused": (each("set_reduce_scatter_unused_params", True), (4, 7)),
        "group": (each("set_separate_reduce_scatter_group"), (4, 7)),
        "memory": (each("set_allocate_memory_from_process_group_for_comm", True), (4, 7)),
        "symmetric": (each("set_symm_mem_for_comm"), (4, 7)),
        # no backward needs the weight of the first layer
        "backward": (lambda model, i: model.inner[0].set_unshard_in_backward(False), (4, 6)),
        "gather": (each("set_custom_all_gather", gather), (4, 7)),
        "scatter": (each("set_custom_reduce_scatter", scatter), (4, 7)),
    }
    for name, (method, counts) in methods.items():
        model = nested(net(), line())
        method(model, 0)
        model = copy.deepcopy(model)  # with what was set
        if name == "unshard":
            method(model, 0)
        (first,) = split(ROWS[:1], line())
        with dt.debugging.record_comms() as forward:
            loss = model(first).square().mean()
        with dt.debugging.record_comms() as backward:
            loss.backward()
        assert (len(forward), len(backward)) == counts, name
        if name == "after backward":
            with dt.debugging.record_comms() as forward:
                model(first)
            assert not len(forward)
        model.zero_grad()
        train(model, split(ROWS, line()), partial(method, model))
        same(model, expected, name)
    assert gather.calls and scatter.calls


def check_grads(model: Any, expected: Any, factor: float, name: str) -> None:
    for key, p in expected.named_parameters():
        found = model.get_parameter(key).grad.full_tensor()
        torch.testing.assert_close(found, p.grad * factor, msg=lambda m, k=key: f"{name} {k}\n{m}")


@on_ranks(2)
def test_gradients_change_in_hooks_and_are_dropped_after_errors() -> None:
    expected = net()
    expected(ROWS[0]).square().sum().backward()
    for kinds, root in (("sss", "s"), ("rrr", "r"), ("s-s", "s")):
        for how in (Shard(0), Replicate()):
            model, x = nested(net(), line(), kinds, root), dt.shard_tensor(ROWS[0], line(), [how])
            for module in [m for m in model.modules() if isinstance(m, dt.fsdp.FSDPModule)]:
                module.set_all_reduce_hook(lambda grad: grad.mul_(3))
            for one in (model, copy.deepcopy(model)):
                for share in (0.25, 0.75):
                    (one(x).square().sum() * share).backward()
                check_grads(one, expected, 3, f"{kinds} {how}")
    loss = model(x).square().sum()
    with pytest.raises(RuntimeError, match="set_all_reduce_hook"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reference cycle")
        loss.backward(create_graph=True)

    model = nested(net(), line())
    model.inner[1].set_unshard_in_backward(False)
    with pytest.raises(RuntimeError):  # its weight is read
        model(x).sum().backward()
    model.inner[1].set_unshard_in_backward(True)
    model.zero_grad()
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(x).sum().backward()
        y = model(x)
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        model.reset_iter_state()
        assert sync or all(p.grad is None for p in model.parameters())
        model.zero_grad()
    model(x).square().sum().backward()
    check_grads(model, expected, 1, "after errors")
    with pytest.raises(RuntimeError, match="outermost call"):
        model.inner[0].reset_iter_state()


@on_ranks(2)
def test_modules_are_gathered_ahead_as_was_set() -> None:
    """Which segments are gathered when the first layer has run, and when the last one's backward
    has: by default none in the first forward, and one in a backward."""
    for is_set in (False, True):
        model = nested(net(), line())
        layers, seen = list(model.inner), []
        segments = [vars(m)["_segments"][0] for m in layers]

        def look(*_: Any, segments: Any = segments, seen: Any = seen) -> None:
            seen.append([s.state.name != "SHARDED" for s in segments])

        if is_set:
            layers[0].set_modules_to_forward_prefetch(layers[1:])
            layers[2].set_modules_to_backward_prefetch([layers[1], layers[0]])
        layers[0].register_forward_hook(look)
        layers[1].register_forward_hook(lambda m, a, out, f=look: out.register_hook(f) and None)
        model(split(ROWS[:1], line())[0]).sum().backward()
        assert [seen[0][1:], seen[1][:2]] == [[is_set, is_set], [is_set, True]], seen


@on_ranks(4)
def test_reductions_over_replicas_wait_for_set_requires_all_reduce() -> None:
    expected = net()
    train(expected, ROWS)
    mesh = dt.init_mesh((2, 2), ("dp", "fsdp"))
    model = nested(net(), mesh)

    def before(i: int) -> None:
        model.set_requires_all_reduce(i % 2 == 1)

    with dt.debugging.record_comms() as log:
        train(model, split(ROWS, mesh), before)
    same(model, expected, "HSDP")
    kinds = [r.kind for r in log.records if r.axis == "dp"]
    assert len(kinds) == 2 * 4, kinds
    model, expected = nested(net(), mesh), net()
    for module in (model, *model.inner):
        module.set_all_reduce_hook(lambda grad: grad.mul_(3))
    for i, (x, whole) in enumerate(zip(split(ROWS[:2], mesh), ROWS[:2], strict=True)):
        before(i)
        model(x).square().mean().backward()
        expected(whole).square().mean().backward()
    check_grads(model, expected, 3, "once, after the last reduction")


@on_ranks(2)
def test_gradients_are_divided_as_by_torch() -> None:
    """Of split and of whole batches, accumulated, and in a graph; only where it was called."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torchs = net()
    for module in [*torchs.inner, torchs]:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    whole = ROWS[0]
    for factor in (5.0,):
        for module in (torchs.inner[1], torchs):
            module.set_gradient_divide_factor(factor)
        torchs.inner[0].set_gradient_divide_factor(1.0)
        torchs.inner[2].set_gradient_divide_factor(1.0)
        torchs.zero_grad()
        torchs(whole.chunk(2)[dist.get_rank()]).square().sum().backward()
        for kinds, root in (("sss", "s"), ("rrr", "r"), ("s--", "r")):
            for how in (Shard(0), Replicate()):
                for graph in (False, True):
                    model = nested(net(), line(), kinds, root)
                    x = dt.shard_tensor(whole, line(), [how])
                    if graph:  # else the leaves are made after the call
                        model(x).sum().backward()
                        model.zero_grad()
                    for module in [m for m in (model.inner[1], model) if vars(m).get("_segments")]:
                        module.set_gradient_divide_factor(2.0)
                        module.set_gradient_divide_factor(factor)
                    inside = [m for m, k in zip(model.inner, kinds, strict=True) if k == "-"]
                    for half in (0.25, 0.75):
                        model.set_requires_gradient_sync(half > 0.5 or graph)
                        loss = model(x).square().sum() * half
                        with warnings.catch_warnings():
                            warnings.filterwarnings("ignore", message=".*reference cycle")
                            loss.backward(create_graph=graph)
                    for name, p in model.named_parameters():
                        expected = torchs.get_parameter(name).grad.full_tensor()
                        if any(p is r for m in inside[1:] for r in m.parameters()):
                            expected = expected / factor
                        found = p.grad.full_tensor().detach()
                        torch.testing.assert_close(
                            found, expected, msg=lambda m: f"{name} {kinds} {how} {graph}\n{m}"
                        )


@on_ranks(2)
def test_calls_that_do_not_fit_together_are_refused() -> None:
    mesh = line()
    model = dt.fully_shard(net(), mesh=mesh)
    for again in (model, model.inner[0], nn.Sequential(net(), model.last)):
        with pytest.raises(ValueError, match="is sharded already"):
            dt.fully_shard(again, mesh=mesh)
    tied = net()
    tied.inner[1][0].weight = tied.inner[0][0].weight
    dt.fully_shard(tied.inner[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"'inner.1.0.weight' is tied: '0.weight' became"):
        dt.fully_shard(tied, mesh=mesh)
    tied.inner[1][0].weight = tied.inner[0][0].weight
    tied.inner[1][0].bias = tied.inner[0][0].bias
    with pytest.raises(ValueError, match=r"is tied: it is a parameter of a module"):
        dt.replicate(tied, mesh=mesh)
    model = net()
    dt.shard_data_parallel(model.last, mesh, mesh.dim_names[0], stage=1)
    with pytest.raises(ValueError, match="'last' in it was sharded with stage 1"):
        dt.fully_shard(model, mesh=mesh)
    sequence = dt.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), mesh=mesh)
    with pytest.raises(RuntimeError, match="is not sharded itself"):
        sequence[:1].set_reshard_after_forward(True)
