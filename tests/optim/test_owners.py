"""dt.optim.own: each matrix is whole on one rank in the step, under every strategy, and everything
else is as without owners."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import disttensor as dt
from disttensor import DistTensor, pipeline
from disttensor.optim import owners
from tests.support.oracle import randn
from tests.support.pool import on_ranks
from tests.support.training import S0, R, full, line, mesh_of, mlp, over, values

SEEN: list[tuple[int, ...]] = []  # the shapes that ``Whole`` has stepped on this rank


class Whole(torch.optim.Optimizer):
    """Muon in the dtype of the parameter. Its state has a tensor like
    the parameter, a tensor of another shape, a tensor that torch makes and a number."""

    def __init__(self, params: Any, lr: float = 0.05, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                SEEN.append(tuple(p.shape if type(p) is nn.Parameter else p.to_local().shape))
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p.grad)
                    state["factors"] = [torch.zeros(len(p), dtype=p.dtype), torch.zeros(())]
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(p.grad)
                m = state["momentum"]
                if p.ndim == 2:
                    state["factors"][0] += m.square().sum(1)
                    m = orthogonal(m) + m / (1 + state["factors"][0]).sqrt().unsqueeze(1)
                p.mul_(1 - group["lr"] * group["decay"]).sub_(m, alpha=group["lr"])
        return loss


def orthogonal(x: Tensor) -> Tensor:
    """The iteration of Muon, in the dtype of x."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def matrices(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.ndim == 2]


def optimizers(model: nn.Module) -> tuple[Any, Any]:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return dt.optim.own(Whole(matrices(model))), torch.optim.AdamW(vectors, lr=0.01)


def train(model: nn.Module, steps: int = 3, mesh: Any = None, made: Any = None) -> dict[str, Any]:
    used = made or optimizers(model)
    for i in range(steps):
        step(model, used, mesh, i)
    return values(model)


def step(model: nn.Module, used: Any, mesh: Any, number: int) -> None:
    x = randn(5, 6, seed=number)
    x = x if mesh is None else dt.shard_tensor(x, mesh, over(mesh))
    for optimizer in used:
        optimizer.zero_grad()
    model(x).square().sum().backward()
    for optimizer in used:
        optimizer.step()


def net() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


PLAN = {"0.weight": S0, "0.bias": S0, "2.weight": dt.Shard(1), "4.weight": dt.Shard(1)}  # on tp
TWO: dict[str, dict[str, Any]] = {
    "dp": {"shard_axis": None},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
}


def sharded(mesh: Any, plan: Any, **options: Any) -> nn.Module:
    model = net()
    if plan:
        tp = [name == "tp" for name in mesh.dim_names]
        dt.shard_module(
            model, mesh, {k: [p if here else R for here in tp] for k, p in plan.items()}
        )
    return dt.shard_data_parallel(model, mesh, **options)


@pytest.mark.parametrize("way", TWO)
@on_ranks(2)
def test_two_ranks_train_as_one_process(way: str) -> None:
    want = train(net())
    SEEN.clear()
    close(train(sharded(line(), None, **TWO[way]), mesh=line()), want)
    assert set(SEEN) <= {(7, 6), (5, 7), (1, 5)} and len(SEEN) < 9, SEEN


@pytest.mark.parametrize("way", ["dp x fsdp", "tp", "dp x tp", "fsdp x tp", "fsdp"])
@on_ranks(4)
def test_four_ranks_train_as_one_process(way: str) -> None:
    want = train(net())
    names = way.split(" x ")
    mesh = mesh_of((4,) if len(names) == 1 else (2, 2), names)
    shard = "fsdp" if "fsdp" in names else None
    options = {"shard_axis": shard, **({"replicate_axis": "dp"} if "dp" in names and shard else {})}
    SEEN.clear()
    model = sharded(mesh, PLAN if "tp" in names else None, **options)
    close(train(model, mesh=mesh), want)
    assert set(SEEN) <= {(7, 6), (5, 7), (1, 5)} and len(SEEN) <= 3, SEEN


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"sharding": 2, "zero_stage": 3}], ids=str)
@on_ranks(4)
def test_stages_accumulation_clipping_and_scaling_as_in_one_process(degrees: Any) -> None:
    def run(strategy: Any) -> tuple[Any, list[float]]:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        stages = [None]
        if strategy is not None:
            strategy.apply(model, layers=["0", "1", "2", "3"])
            stages = strategy.stages()
        used, norms = optimizers(model), []
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler = scaler if strategy is None else dt.optim.shard_scaler(scaler)
        for step in range(3):
            parts = [(x,) for x in randn(8, 6, seed=step).chunk(2)]
            if strategy is None:
                for (x,) in parts:
                    scaler.scale(model(x).square().sum()).backward()
            else:

                def loss(part: Any) -> Any:
                    x = dt.shard_tensor(part[0], stages[0], strategy.batch())
                    return scaler.scale(model(x).square().sum())

                pipeline.run(loss, parts, "1f1b", stages=stages)
            for optimizer in used:
                scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            for optimizer in used:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        return [dt.broadcast_value(p) for p in model.parameters()], norms

    torch.manual_seed(1)
    want = run(None)
    torch.manual_seed(1)
    close(run(dt.Strategy(pp=2, **degrees)), want)


@pytest.mark.parametrize("placement", [R, S0], ids=str)
@on_ranks(2)
def test_a_step_sends_each_matrix_once_and_its_update_once(placement: Any) -> None:
    shapes = [(8, 12), (12, 8), (9, 9), (16, 5)]
    params = [dt.shard_tensor(randn(*s), line(), [placement], requires_grad=True) for s in shapes]
    optimizer = dt.optim.own(Whole(params))
    x = dt.shard_tensor(randn(4), line(), [S0])
    for _ in range(2):  # the second step has state
        for p in params:  # a sum over the ranks is pending, or it is split
            (p * x.view(4, 1, 1)).square().sum().backward()
        with dt.debugging.record_comms() as comms:
            optimizer.step()
        assert comms.counts() == {"all_to_all": 2}, comms
        mine = [p in optimizer.state for p in params]
        assert True in mine and False in mine
        sent = 0
        for p, owned in zip(params, mine, strict=True):
            piece = p.to_local().numel()
            if owned:  # the new value of the other rank's piece
                sent += p.numel() if placement == R else p.numel() - piece
            else:  # the gradient of this rank's piece, and its value if the owner has it not
                sent += piece if placement == R else 2 * piece
        assert comms.total_bytes == 8 * sent, (comms, sent)


@on_ranks(4)
def test_costs_are_assigned_evenly_and_alike() -> None:
    mesh = mesh_of((4,), ("dp",))
    sizes = [8, 8, 4, 4, 4, 4, 4, 4, 4, 4]
    params = [dt.ones(n, n, mesh=mesh, requires_grad=True) for n in sizes]
    muon = dt.optim.own(torch.optim.Muon(params))
    assigned = owners.owners_of(muon)
    loads = Counter[int]()
    for i, p in enumerate(params):
        (rank,) = assigned[id(p)][1].ranks
        loads[rank] += sizes[i] ** 3
    assert sorted(loads.values()) == [256, 256, 512, 512]
    assert [assigned[id(p)][1].ranks for p in params[:2]] == [(0,), (1,)]


@on_ranks(2)
def test_torchs_optimizers_that_read_whole_matrices() -> None:
    kinds = [(torch.optim.Muon, 2e-3), (torch.optim.Adafactor, 1e-6)]
    for kind, tolerance in kinds:

        def run(model: nn.Module, mesh: Any = None, kind: Any = kind) -> Any:
            return train(model, 3, mesh, [dt.optim.own(kind(matrices(model), lr=0.05))])

        want = run(net().float().double())
        close(run(sharded(line(), None), line()), want, tolerance)


@on_ranks(2)
def test_one_optimizer_of_all_parameters_with_groups_added_later() -> None:
    def run(model: nn.Module, mesh: Any = None) -> Any:
        first, *rest = model.children()
        optimizer = dt.optim.own(Whole(first.parameters()))
        train(model, 1, mesh, [optimizer])
        optimizer.add_param_group(
            {"params": [p for m in rest for p in m.parameters()], "lr": 0.02, "decay": 0.0}
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        got = [train(model, 1, mesh, [optimizer])]
        schedule.step()
        return [*got, train(model, 2, mesh, [optimizer])]

    want = run(net())
    close(run(sharded(line(), None, stage=2), line()), want)


@on_ranks(2)
def test_a_closure_runs_once_before_gradients_are_sent() -> None:
    def run(model: nn.Module, mesh: Any = None) -> Any:
        x = randn(5, 6)
        x = x if mesh is None else dt.shard_tensor(x, mesh, [S0])
        optimizer = dt.optim.own(Whole(model.parameters()))

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        losses = [full(optimizer.step(closure)), full(optimizer.step(closure=closure))]
        return losses, values(model)

    want = run(net())
    close(run(sharded(line(), None, shard_axis=None), line()), want)
    model = sharded(line(), None, shard_axis=None)
    lbfgs = dt.optim.own(torch.optim.LBFGS(matrices(model), max_iter=3))
    x = dt.shard_tensor(randn(5, 6), line(), [S0])

    def closure() -> Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="calls its closure twice"):
        lbfgs.step(closure)
    assert lbfgs.param_groups[0]["params"] == matrices(model)  # the step gives them back


@on_ranks(2)
def test_state_dict_and_state_from_before_the_call() -> None:
    want = train(net(), 4)
    model = sharded(line(), None)
    used = optimizers(model)
    train(model, 2, line(), used)
    saved = copy.deepcopy([one.state_dict() for one in used])
    again = optimizers(model)
    for optimizer, state in zip(again, saved, strict=True):
        optimizer.load_state_dict(state)

    def rest(model: nn.Module, made: Any) -> Any:
        for i in (2, 3):
            for optimizer in made:
                optimizer.zero_grad()
            model(dt.shard_tensor(randn(5, 6, seed=i), line(), [S0])).square().sum().backward()
            for optimizer in made:
                optimizer.step()
        return values(model)

    close(rest(model, again), want)

    model = sharded(line(), None)
    late = Whole(matrices(model)), torch.optim.AdamW(model.parameters(), lr=0.0)
    train(model, 2, line(), late)  # without owners
    matrix = matrices(model)[0]
    assert late[0].state[matrix]["momentum"].process_mesh is line()
    dt.optim.own(late[0])
    got = rest(model, late)
    plain = net()
    close(got, train(plain, 4, None, (Whole(matrices(plain)), torch.optim.AdamW([matrix], lr=0.0))))


@pytest.mark.filterwarnings("ignore::disttensor.errors.PieceWarning")
@pytest.mark.parametrize("is_pickled", [False, True])
@on_ranks(2)
def test_copies_have_the_owners(is_pickled: bool) -> None:
    want = train(net(), 4)
    model = dt.shard_module(net(), line(), {"0.weight": [S0], "4.weight": [dt.Shard(1)]})
    used = optimizers(model)
    train(model, 2, line(), used)
    both = model, used
    copied, others = pickle.loads(pickle.dumps(both)) if is_pickled else copy.deepcopy(both)
    for one, made in ((copied, others), both):
        ranks = [mesh.ranks for _, mesh in owners.owners_of(made[0]).values()]
        assert ranks == [mesh.ranks for _, mesh in owners.owners_of(used[0]).values()] != []
        for i in (2, 3):
            step(one, made, line(), i)
        close(values(one), want)


def finish(folder: Path, mesh: Any, **options: Any) -> Any:
    model = net() if mesh is None else sharded(mesh, None, **options)
    used = optimizers(model)
    saver = dt.Checkpointer(folder)
    state = {"model": model, "matrices": used[0], "vectors": used[1]}
    done = saver.load(**state) or 0
    for i in range(done, done + 2):
        step(model, used, mesh, i)
    saver.save(done + 2, **state)
    if mesh is not None:
        held = [x for s in used[0].state.values() for x in s.values() if type(x) is DistTensor]
        assert all(x.process_mesh.ranks in ((r,) for r in mesh.ranks) for x in held)
    return values(model)


@on_ranks(4)
def test_checkpoints_are_resumed_on_another_mesh(tmp_path: Path) -> None:
    want = train(net(), 6)
    finish(tmp_path, mesh_of((4,), ("dp",)), shard_axis=None)
    finish(tmp_path, mesh_of((2, 2), ("dp", "fsdp")), shard_axis="fsdp", replicate_axis="dp")
    close(finish(tmp_path, mesh_of((4,), ("fsdp",))), want)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="own: optimizer"):
        dt.optim.own([torch.ones(2, 2)])  # type: ignore[type-var]
    with pytest.raises(TypeError, match="own: choose"):
        dt.optim.own(torch.optim.SGD([torch.ones(2)]), [torch.ones(2)])  # type: ignore[arg-type]


class Mixing(torch.optim.Optimizer):
    """Scales each update by a norm that is computed over several parameters: by a list of norms
    (LAMB), by a running sum (Prodigy) of tensors or numbers, or from lists of tensors."""

    def __init__(self, params: Any, way: str) -> None:
        super().__init__(params, {"way": way})
        self.total = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            if group["way"] == "stack":
                norm = torch.stack([g.norm() for g in grads]).norm()
            elif group["way"] == "sum":
                for g in grads:
                    self.total.add_(g.square().sum())
                norm = self.total.sqrt()
            elif group["way"] == "cells":
                norms = torch.zeros(len(grads), dtype=torch.float64)
                for i, g in enumerate(grads):
                    norms[i] = g.norm()
                norm = norms.norm()
            elif group["way"] == "numbers":
                norm = 1.0
                for g in grads:
                    norm = 2 * norm + g.norm().item()
            elif group["way"] == "lists":
                norm = torch._foreach_norm(grads)[0] + torch._foreach_norm(grads)[-1]
            else:
                grads[0].mul_(grads[0].norm().item() / grads[0].norm().item())
                group["norm"] = 2 * grads[0].norm().item()
                self.state[params[0]] = {"norms": [group["norm"]]}
                norm = torch.ones(())
            torch._foreach_add_(grads, params, alpha=0.1)
            torch._foreach_div_(grads, norm)
            torch._foreach_sub_(params, grads)


@pytest.mark.parametrize("way", ["stack", "sum", "cells", "lists", "numbers", "alone"])
@on_ranks(2)
def test_an_optimizer_that_combines_parameters_raises(way: str) -> None:
    values = [randn(4, 3, seed=i) for i in range(5)]
    params = [dt.shard_tensor(x, line(), [S0], requires_grad=True) for x in values]
    optimizer = dt.optim.own(Mixing(params, way))
    sum((p * p).sum() for p in params).backward()
    if way == "alone":
        optimizer.step()
        kept = [group["norm"] for group in optimizer.param_groups if "norm" in group]
        kept += [x for state in optimizer.state.values() for x in state["norms"]]
        assert len(kept) == 2 and {*map(type, kept)} == {float}, kept
        want = [x - 2.1 * x for x in values]
        close([p.full_tensor() for p in params], want)
    else:
        match = "combines (a parameter|.*) of shape .* without dt.optim.own"
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        close([p.full_tensor() for p in params], values)
