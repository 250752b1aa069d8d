"""Objects of ours that a program makes again and again end with their last use: many are made, and
the live ones are counted. Bounded tables (plans, specs, the log of calls) do not count."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disttensor as dt
from disttensor import Replicate, Shard
from disttensor.fsdp import engine
from tests.support.pool import on_ranks

R, S = Replicate(), Shard(0)
BOUNDED = {"CallSignature", "CallPlan", "PythonCall", "NativePlan", "DistSpec", "SpecShape"}
TIMES = 3
Scene = Callable[[Any], Any]


def made(mesh: Any, placement: Any = S) -> Any:
    return dt.shard_tensor(torch.ones(4, 4), mesh, [placement], requires_grad=True)


def layer(mesh: Any) -> Any:
    return dt.shard_module(nn.Linear(4, 4), mesh)


def sharded(mesh: Any, **how: Any) -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    how = {"shard_axis": "x"} | how
    return dt.shard_data_parallel(net, mesh, **how)


def step(net: Any, mesh: Any) -> None:
    optimizer = torch.optim.Adam(net.parameters())
    net(made(mesh)).sum().backward()
    optimizer.step()


def hook(x: Any) -> Any:
    x.register_hook(lambda g: None)
    return x


def leaf_with_hooks(mesh: Any, placement: Any) -> Any:
    x = hook(made(mesh, placement))
    x.register_post_accumulate_grad_hook(lambda p: None)
    return x


def hook_of_itself(mesh: Any) -> None:
    x = made(mesh)
    x.register_hook(lambda g: print(x.shape) if g is None else None)
    (x * 2).sum().backward()


def in_forward_hooks(mesh: Any, last: Callable[[Any], Any]) -> None:
    net = layer(mesh)
    net.register_forward_hook(lambda m, args, out: hook(out))
    net.register_full_backward_hook(lambda m, gi, go: None)
    last(net(made(mesh)).relu().sum())


def around_regions(mesh: Any, last: Callable[[Any], Any]) -> None:
    net = layer(mesh)
    y = checkpoint(lambda x: hook(net(x).tanh()), made(mesh), use_reentrant=False)
    last(hook(y).sum())


def placed(mesh: Any) -> None:
    net = nn.Linear(4, 4)
    net.weight.register_post_accumulate_grad_hook(lambda p: None)
    hook(net.bias)
    step(dt.shard_module(net, mesh), mesh)


def meshes(mesh: Any) -> None:
    other = dt.init_mesh((mesh.size, 1), ("a", "b"))
    dt.ones(4, mesh=other["a"], placements=[S]).sum().relu()
    dt.ones(4, mesh=dt.ProcessMesh([*range(mesh.size)], ("c",)), placements=[S]).sum()


def accumulated(mesh: Any, last: bool) -> None:
    net = sharded(mesh)
    with dt.accumulate(net, last=last):
        net(made(mesh)).sum().backward()


def loader(mesh: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    next(iter(dt.shard_loader(torch.utils.data.DataLoader(data, batch_size=2), mesh, [S])))


def again(f: Any, mesh: Any) -> None:
    for _ in range(2):
        out = f(made(mesh))
    out.sum().backward()


def nothing(loss: Any) -> None:
    pass


SCENES: dict[str, Scene] = {
    "hooks of leaves": lambda m: (leaf_with_hooks(m, S) * 2).sum().backward(),
    "hooks of replicated leaves": lambda m: (leaf_with_hooks(m, R) * made(m)).sum().backward(),
    "hooks without a backward": lambda m: hook(hook(leaf_with_hooks(m, R) * made(m)).relu()),
    "a hook of its own leaf": hook_of_itself,
    "removed hooks": lambda m: made(m).register_hook(lambda g: None).remove(),
    "hooks in forward hooks": lambda m: in_forward_hooks(m, lambda loss: loss.backward()),
    "forward hooks without a backward": lambda m: in_forward_hooks(m, nothing),
    "regions": lambda m: around_regions(m, lambda loss: loss.backward()),
    "regions without a backward": lambda m: around_regions(m, nothing),
    "placed hooks": placed,
    "meshes": meshes,
    **{f"stage {n}": lambda m, n=n: step(sharded(m, stage=n), m) for n in (1, 2, 3)},  # type: ignore[misc]
    "replicas": lambda m: step(sharded(m, shard_axis=None), m),
    "engines without a backward": lambda m: sharded(m)(made(m)),
    "accumulation": lambda m: accumulated(m, True),
    "unfinished accumulation": lambda m: accumulated(m, False),
    "strategies": lambda m: dt.Strategy(sharding=2).apply(nn.Sequential(nn.Linear(4, 4))),
    "optimizers": lambda m: step(layer(m), m),
    "scalers": lambda m: dt.optim.shard_scaler(torch.amp.GradScaler("cpu")),
    "loaders": loader,
    "replays": lambda m: again(dt.replay(layer(m)), m),
    "local maps": lambda m: dt.local_map(lambda x: x * 2, in_placements=[[S]], out_placements=[S])(
        made(m)
    ),
    "records": lambda m: dt.debugging.record_comms().__enter__().__exit__(None, None, None),
}


def live() -> Counter[str]:
    gc.collect()
    kinds = [type(x) for x in gc.get_objects()]
    ours = [k.__name__ for k in kinds if str(k.__module__).startswith(("disttensor", "torch"))]
    return Counter({k: n for k, n in Counter(ours).items() if k not in BOUNDED})


def growth(scenes: Sequence[Scene], mesh: Any) -> Counter[str]:
    """How many more objects of a kind are alive after each of two rounds."""
    counts = []
    for _ in range(3):
        for scene in scenes * TIMES:
            scene(mesh)
        counts.append(live())
    return (counts[1] - counts[0]) & (counts[2] - counts[1])


@on_ranks(2)
def test_live_objects_do_not_grow_with_the_number_that_was_made() -> None:
    mesh = dt.init_mesh((2,), ("x",))
    warnings.simplefilter("ignore")
    if any(n >= TIMES for n in growth([*SCENES.values()], mesh).values()):
        found = {name: growth([scene], mesh) for name, scene in SCENES.items()}
        raise AssertionError(
            {k: n for k, n in found.items() if any(v >= TIMES for v in n.values())}
        )


@on_ranks(2)
def test_engines_are_forgotten_with_their_modules() -> None:
    mesh = dt.init_mesh((2,), ("x",))
    gc.collect()
    before = len(engine._ENGINES.data)
    for _ in range(TIMES):
        step(sharded(mesh), mesh)
    gc.collect()
    step(sharded(mesh), mesh)
    assert len(engine._ENGINES.data) <= before + 1


@on_ranks(2)
def test_compiled_functions_end_with_their_last_use() -> None:
    mesh = dt.init_mesh((2,), ("x",))
    warnings.simplefilter("ignore")

    def compiled(mesh: Any) -> None:
        again(dt.compile(lambda x: (x * 2).relu(), backend="eager"), mesh)

    assert not any(n >= TIMES for n in growth([compiled], mesh).values())
