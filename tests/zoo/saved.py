"""Trains a model of ``strangers.py``, saves it by each way of ``ways.py``, loads the files and
resumes; see ``saving.py``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

import disttensor as dt
from tests.zoo import check
from tests.zoo.strangers import Stranger
from tests.zoo.ways import Way, ways

State = dict[str, torch.Tensor]


def inside(model: nn.Module) -> nn.Module:
    """The library's module in the wrappers of a recipe."""
    while type(model).__name__ in ("Positional", "Calls"):
        model = model.module if type(model).__name__ == "Calls" else model.model  # type: ignore[assignment]
    return model


def put_inside(model: nn.Module, new: nn.Module | None) -> None:
    """Replaces the library's module. None: it was filled."""
    outer: Any = model
    while inside(outer) is not new and new is not None:
        name = "module" if type(outer).__name__ == "Calls" else "model"
        if getattr(outer, name) is inside(outer):
            setattr(outer, name, new)
        outer = getattr(outer, name)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: check.Batch) -> None:
    """Two steps. Batch norms learn their statistics."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    for seed in range(2):
        torch.manual_seed(seed)  # a few draw numbers in each forward
        check.loss_of(model(**batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def save(model: nn.Module, optimizer: Any, library: str, folder: Path) -> dict[str, str]:
    """Saves by each way. Returns the error of each way that failed."""
    errors = {}
    for way in ways(library):
        try:
            (folder / way.name).mkdir()
            with contextlib.redirect_stdout(io.StringIO()):
                way.save(inside(model), folder / way.name)
        except Exception as error:
            errors[way.name] = f"{type(error).__name__}: {error}"
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return errors


def load(way: Way, model: nn.Module, folder: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        put_inside(model, way.load(inside(model), folder / way.name))


def in_one_process(recipe: Stranger, folder: Path) -> dict[str, str]:
    """Trains four steps, and saves after two. Returns what plain torch cannot save."""
    model, batch = recipe.build()
    start = copied(model)
    optimizer = optimizer_of(model)
    train(model, optimizer, batch)
    (folder / "one").mkdir()
    errors = save(model, optimizer, recipe.library, folder / "one")
    states = [start, copied(model)]
    train(model, optimizer, batch)
    torch.save([*states, copied(model)], folder / "states.pt")
    return errors | loaded(recipe, folder, "one", errors)


def copied(model: nn.Module) -> State:
    state = {**model.state_dict(), **dict(model.named_parameters())}  # of factories, those only
    tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    return {name: check.whole(x).clone() for name, x in tensors.items()}


def on_ranks(recipe: Stranger, axis: str, folder: Path) -> dict[str, str]:
    """On each of two ranks: trains two steps and saves. Returns the errors of saving."""
    model, batch = recipe.build()
    with dt.integrations.one_process() as process:
        mine, _ = check.place(model, batch, axis)
        optimizer = optimizer_of(model)
        train(model, optimizer, mine)
        with process.saving(folder / axis) as place:
            return save(model, optimizer, recipe.library, place)


def loaded(recipe: Stranger, folder: Path, axis: str, known: dict[str, str]) -> dict[str, str]:
    """In one process: the errors of the ways whose files do not have the values of one process."""
    errors = {}
    for way in ways(recipe.library):
        if way.name in known:
            continue
        try:
            model, _ = recipe.build()
            load(way, model, folder / axis)
            compare(recipe, folder, model, 1)
        except Exception as error:
            errors[way.name] = f"{type(error).__name__}: {error}"
    return errors


def compare(recipe: Stranger, folder: Path, model: nn.Module, number: int) -> None:
    """Raises WrongError unless the state of the model is that of one process, saved by number."""
    states = torch.load(folder / "states.pt")
    wanted, got, most = states[number], copied(model), check.TOLERANCE[recipe.dtype] / 10
    if wanted.keys() != got.keys():
        raise check.WrongError(f"names differ: {sorted(wanted.keys() ^ got.keys())[:5]}")
    found = sorted(((check.distance(got[name], x), name) for name, x in wanted.items()))[::-1]
    if found and not found[0][0] <= most:
        raise check.WrongError(f"{found[0][1]} differs by {found[0][0]:.2g}")
    if all(check.distance(states[0][name], x) <= 100 * most for name, x in wanted.items()):
        raise check.WrongError("the model does not learn")


def resumed(recipe: Stranger, axis: str, folder: Path, known: dict[str, str]) -> list[str]:
    """On each of two ranks: resumes under ``axis`` what was saved under another, twice, and trains
    two steps. Returns the names of the ways."""
    both = [way for way in ways(recipe.library) if way.name not in known]
    both = [*both[:1], *(way for way in both[1:] if way.name == "torch.save")]
    for number, way in enumerate(both):
        model, batch = recipe.build()
        with dt.integrations.one_process():
            if number == 0:  # read by one process, then placed
                load(way, model, folder)
            mine, _ = check.place(model, batch, axis)
            if number == 1 or len(both) == 1:  # into DistTensors
                load(way, model, folder)
            optimizer = optimizer_of(model)
            optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
            train(model, optimizer, mine)
            compare(recipe, folder.parent, model, 2)
    return [way.name for way in both]
