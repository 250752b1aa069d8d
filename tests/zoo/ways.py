"""How each library saves: the ways that suit any module, and the own way of a library.

A way has two functions: ``save(model, folder)`` as the library's manual has it, and ``load(model,
folder)``, which fills a new model, or returns the model that it has read.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

Save = Callable[[Any, Path], Any]


class Way(NamedTuple):
    """``name``: as the table of docs/zoo.md has it."""

    name: str
    save: Save
    load: Save


def _file(name: str, write: Save, read: Callable[[Path], dict[str, Any]]) -> Way:
    """A file with the state dict."""
    return Way(
        name,
        lambda model, folder: write(model.state_dict(), folder / name),
        lambda model, folder: model.load_state_dict(read(folder / name)) and None,
    )


def _arrays(state: dict[str, Any], path: Path) -> None:
    np.savez(path, **{key: x.detach().cpu().numpy() for key, x in state.items()})


def _from_arrays(path: Path) -> dict[str, Any]:
    return {key: torch.from_numpy(x) for key, x in np.load(f"{path}.npz").items()}


def _safetensors(name: str) -> Callable[..., Any]:
    return lambda *args: getattr(importlib.import_module("safetensors.torch"), name)(*args)


GENERAL = (
    _file("torch.save", torch.save, lambda path: torch.load(path, weights_only=False)),
    _file(
        "pickle",
        lambda state, path: path.write_bytes(pickle.dumps(state)),
        lambda path: pickle.loads(path.read_bytes()),
    ),
    _file("numpy", _arrays, _from_arrays),
    Way(
        "safetensors",
        lambda model, folder: _safetensors("save_model")(model, str(folder / "safetensors")),
        lambda model, folder: (
            _safetensors("load_model")(model, str(folder / "safetensors")) and None
        ),
    ),
)
OWN: dict[str, Way] = {}


def own(library: str, name: str, load: Save) -> Callable[[Save], Save]:
    """Decorator: ``library`` saves with this function."""

    def register(save: Save) -> Save:
        OWN[library] = Way(name, save, load)
        return save

    return register


def _pretrained(model: Any, folder: Path) -> Any:
    dtype = next(model.parameters()).dtype
    try:
        return type(model).from_pretrained(folder, torch_dtype=dtype).eval()
    except TypeError:
        return type(model).from_pretrained(folder).to(dtype).eval()


for _library in ("diffusers", "transformers", "huggingface-hub"):
    own(_library, "save_pretrained", _pretrained)(lambda m, folder: m.save_pretrained(folder))


def _load_adapter(model: Any, folder: Path) -> None:
    model.load_adapter(folder, "default", is_trainable=True)


@own("peft", "save_pretrained", _load_adapter)
def _(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def _load_own(model: Any, folder: Path) -> None:
    model.load_state_dict(torch.load(folder / "own"))


@own("monai", "save_state", _load_own)
def _(model: Any, folder: Path) -> None:
    from monai.networks.utils import save_state

    save_state(model, folder / "own")


def _tabnet(model: nn.Module) -> Any:
    from pytorch_tabnet.tab_model import TabNetRegressor

    found = TabNetRegressor(verbose=0)
    found.network, found.preds_mapper = model, None
    found._set_network = lambda: None
    return found


@own("pytorch-tabnet", "save_model", lambda m, f: _tabnet(m).load_model(str(f / "own.zip")))
def _(model: Any, folder: Path) -> None:
    _tabnet(model).save_model(str(folder / "own"))


@own("nbeats-pytorch", "save", lambda m, f: type(m).load(f / "own", weights_only=False))
def _(model: Any, folder: Path) -> None:
    model.save(folder / "own")


def _flow(model: nn.Module) -> Any:
    import normflows

    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(6), [model])


@own("normflows", "NormalizingFlow.save", lambda m, f: _flow(m).load(f / "own"))
def _(model: Any, folder: Path) -> None:
    _flow(model).save(folder / "own")


@own("neuraloperator", "save_checkpoint", lambda m, f: m.load_checkpoint(f, "own"))
def _(model: Any, folder: Path) -> None:
    model.save_checkpoint(folder, "own")


def _load_parts(model: Any, folder: Path) -> None:
    model[0].load_state_dict(type(model[0]).load(str(folder / "own")).state_dict())


@own("sentence-transformers", "Dense.save", _load_parts)
def _(model: Any, folder: Path) -> None:
    (folder / "own").mkdir()
    model[0].save(str(folder / "own"))


def _load_mapped(model: Any, folder: Path) -> None:
    from tensordict import TensorDict

    TensorDict.load_memmap(folder / "own").to_module(model)


@own("torchrl", "TensorDict.memmap", _load_mapped)
def _(model: Any, folder: Path) -> None:
    from tensordict import TensorDict

    TensorDict.from_module(model).memmap(folder / "own")


def _load_store(model: Any, folder: Path) -> None:
    import pyro

    pyro.get_param_store().load(folder / "own")
    pyro.module("model", model, update_module_params=True)


@own("pyro-ppl", "ParamStore.save", _load_store)
def _(model: Any, folder: Path) -> None:
    import pyro

    pyro.clear_param_store()
    pyro.module("model", model)
    pyro.get_param_store().save(folder / "own")


@own("pytorch-metric-learning", "save_model", _load_own)
def _(model: Any, folder: Path) -> None:
    from pytorch_metric_learning.utils.common_functions import save_model

    save_model(model, folder / "own")


@own("pytorch-ignite", "Checkpoint", _load_own)
def _(model: Any, folder: Path) -> None:
    from ignite.engine import Engine
    from ignite.handlers import Checkpoint, DiskSaver

    save = Checkpoint({"model": model}, DiskSaver(str(folder)), filename_pattern="own")
    save(Engine(lambda *_: None))


def _skorch(model: nn.Module) -> Any:
    from skorch import NeuralNet

    return NeuralNet(model, nn.MSELoss).initialize()


@own("skorch", "save_params", lambda m, f: _skorch(m).load_params(f_params=f / "own"))
def _(model: Any, folder: Path) -> None:
    _skorch(model).save_params(f_params=folder / "own")


@own("stable-baselines3", "save", lambda m, f: type(m).load(str(f / "own")))
def _(model: Any, folder: Path) -> None:
    model.save(str(folder / "own"))


def ways(library: str) -> list[Way]:
    """The own way comes first."""
    return [*([OWN[library]] if library in OWN else []), *GENERAL]
