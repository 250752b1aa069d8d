"""from_pretrained: a model of transformers from its files, or a module, under a Strategy."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from disttensor.checkpoint.load_pretrained import load_into
from disttensor.checkpoint.safetensors_files import stored_in
from disttensor.checks import argument_error, check_type
from disttensor.integrations.model import place
from disttensor.parallel.strategy import Strategy

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt"]


def from_pretrained(
    model: str | Path | nn.Module,
    strategy: Any = None,
    *,
    dtype: torch.dtype | None = None,
    plan: Any = None,
    layers: Iterable[nn.Module | str] | None = None,
) -> Any:
    """Returns a model under a strategy: from a folder, a name of the Hugging Face Hub, or a module.

    A model from files has the class that its config names. It is made on the meta device and
    sharded; then each rank reads its pieces of the safetensors files. If transformers converts the
    weights of this model (renames or joins them), each rank loads the whole model on the CPU and
    keeps its pieces. Regular tensors with the rows of a batch are split when the model is called.
    All ranks make the call. ``generate`` works.

    Args:
        model: a folder, a name of the Hub, or a module (of timm, torchvision, your own).
        strategy: a Strategy, or a transformers DistributedConfig (``tp_size``, ``fsdp_size``,
            ``dp_replicate_size``, ``pp_size``, ``tp_plan``). None: the one in the config of the
            model, else ``Strategy()``.
        dtype: of the parameters. None: as in the config, or as in the module.
        plan: as for ``Strategy.apply``. None: with ``tp``, the model's own plan, and
            ``dt.plans.megatron`` for parameters that it does not name.
        layers: as for ``Strategy.apply``. None: with ``pp``, the model's pipeline plan.

    Returns:
        The model, in eval mode if it is read from files.

    Raises:
        TypeError, ValueError: invalid arguments, or files that do not fit the model.

    >>> model = dt.from_pretrained(torch.nn.Linear(4, 2), dt.Strategy())
    >>> model(torch.ones(3, 4)).placements[0]
    Shard(0)
    """
    check_type(
        "from_pretrained: model", model, (str, Path, nn.Module), "a name, a folder, a module"
    )
    if dtype is not None:
        check_type("from_pretrained: dtype", dtype, torch.dtype, "a dtype of torch")
    if isinstance(model, nn.Module):
        net: Any = model if dtype is None else model.to(dtype)
        place(net, _strategy(strategy, net), plan, layers)
        return net
    transformers = import_module("transformers")
    folder = Path(model)
    if not folder.is_dir():
        folder = Path(
            import_module("huggingface_hub").snapshot_download(str(model), allow_patterns=_FILES)
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = dtype or config.dtype or torch.float32
    kind = getattr(transformers, config.architectures[0])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            net = kind(config)
    finally:
        torch.set_default_dtype(before)
    strategy = _strategy(strategy, net)
    if _is_converted(net, folder):
        net = kind.from_pretrained(folder, dtype=dtype)
        place(net, strategy, plan, layers)
    else:

        def shard(init: Any) -> None:
            if len(stages := strategy.stages()) > 1:  # buffers outside of the layers stay regular
                for module in net.modules():
                    if module._buffers and not module._parameters and not module._modules:
                        init(module.to_empty(device=stages[0].device))
            place(net, strategy, plan, layers, init=init)

        load_into(net, folder, shard)
    if (folder / "generation_config.json").exists():
        net.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return net.eval()


def _strategy(value: Any, net: Any) -> Strategy:
    if value is None:
        value = getattr(getattr(net, "config", None), "distributed_config", None) or Strategy()
    if isinstance(value, Strategy):
        return value
    if type(value).__name__ != "DistributedConfig" or value.ep_size > 1:
        expected = "a dt.Strategy, or a DistributedConfig without ep_size,"
        raise argument_error("from_pretrained: strategy", value, expected)
    if isinstance(value.tp_plan, dict):
        net.tp_plan = {**net.tp_plan, **value.tp_plan}
    sizes = {"tp": value.tp_size, "sharding": value.fsdp_size, "pp": value.pp_size}
    return Strategy(dp=value.dp_replicate_size, **sizes)


def _is_converted(net: Any, folder: Path) -> bool:
    """Returns True if the files are not the state dict of ``net`` by name and value."""
    if import_module("transformers.conversion_mapping").get_model_conversion_mapping(
        net, add_legacy=False
    ):
        return True
    stored = {name for path in folder.glob("*.safetensors") for name in stored_in(path)}
    return not stored <= net.state_dict().keys()
