"""Functions of torch and transformers that refuse DistTensors, because they would take the piece of
this rank for the whole value. They raise before anything is changed or written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from disttensor.nn.parameters import slots
from disttensor.patches.change import Undo
from disttensor.pytree import collect
from disttensor.tensor.dist_tensor import DistTensor


def wrap_check(check: Callable[..., None]) -> Callable[[Any], Any]:
    """Decorates a check, which gets the arguments of each call and may raise. It becomes a wrapper
    of the function that it checks."""

    def wrapper(original: Any) -> Any:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            check(*args, **kwargs)
            return original(*args, **kwargs)

        return run

    return wrapper


@wrap_check
def data_parallel(self: Any, module: Any = None, *_: Any, **__: Any) -> None:
    """Refuses DistributedDataParallel and FSDP: they take pieces for replicas, or cut them
    again."""
    _check_parameters(module, type(self).__name__)


def set_data() -> Undo:
    """Refuses ``regular.data = x`` of a DistTensor: C++ would take the number that stands for the
    elements of its wrapper. ``Tensor.data`` becomes a property of the same getter and setter."""
    original: Any = torch.Tensor.data

    def assign(self: Any, value: Any) -> None:
        if isinstance(value, DistTensor) and not isinstance(self, DistTensor):
            raise TypeError(
                f"data of a regular tensor: the value is {value.spec!r}, a DistTensor, which has "
                "another memory on each rank. Give the global value, value.full_tensor(), or the "
                "piece of this rank, value.to_local(); or shard the module that holds the tensor "
                "first (dt.shard_module)"
            )
        original.__set__(self, value)

    own: Any = torch.Tensor
    own.data = property(original.__get__, assign, original.__delete__, original.__doc__)

    def undo() -> None:
        del own.data

    return undo


@wrap_check
def fully_shard(module: Any = None, *_: Any, **__: Any) -> None:
    """Refuses torch's fully_shard, of one module or several."""
    for each in module if isinstance(module, (list, tuple)) else [module]:
        _check_parameters(each, "fully_shard")


def _check_parameters(module: Any, name: str) -> None:
    for key, p in module.named_parameters() if isinstance(module, torch.nn.Module) else ():
        if isinstance(p, DistTensor):
            raise TypeError(
                f"{name} of a model of DistTensors ({key!r} is {p.spec!r}): its ranks are one "
                "program, and its gradients are reduced without a wrapper. Call the model as it "
                "is, on a batch that is split: dt.shard_tensor(batch, mesh, [dt.Shard(0)]). "
                "dt.shard_data_parallel(model, mesh, axis) shards its state and reduces during the "
                "backward. Trainers that wrap models have to find one process: docs/hugging_face.md"
            )


@wrap_check
def flex_attention(*args: Any, **kwargs: Any) -> None:
    """Refuses flex_attention, which compiles its query, key and value."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, DistTensor):
            raise TypeError(
                f"flex_attention of {x.spec!r}: torch compiles it together with its mask and "
                "score functions, and cannot compile DistTensors. Run it on the pieces, split "
                "over heads or rows of the batch: dt.local_map(lambda q, k, v: "
                "flex_attention(q, k, v, block_mask=mask), in_placements=[[dt.Shard(1)]] * 3, "
                "out_placements=[dt.Shard(1)])(q, k, v); its functions then count the heads "
                "and rows of a piece. scaled_dot_product_attention takes DistTensors"
            )


@wrap_check
def jiterator(self: Any, *tensors: Any, **_: Any) -> None:
    """Refuses functions of torch.cuda.jiterator, which read the memory of their arguments."""
    for x in tensors:
        if isinstance(x, DistTensor):
            raise TypeError(
                f"{self.kernel_name}, a function of torch.cuda.jiterator, of {x.spec!r}: it would "
                "compute only this rank's piece. Run it on the pieces: dt.local_map(function, "
                "in_placements=[x.placements], out_placements=x.placements)(x)"
            )


@wrap_check
def backward_hook(self: Any, args: Any, result: Any, grad_fn: Any) -> None:
    """Refuses ``register_backward_hook``: torch puts its hooks on the node of a module's result,
    which is the node of this rank's piece."""
    found = [x for x in collect((args, result), []) if isinstance(x, DistTensor)]
    if found:
        raise NotImplementedError(
            f"register_backward_hook of {type(self).__name__}: the hook would get the "
            f"gradient of this rank's piece of {found[-1].spec!r}. Use "
            "register_full_backward_hook, whose hook gets DistTensors"
        )


@wrap_check
def save_pretrained(self: Any, *_: Any, state_dict: Any = None, **__: Any) -> None:
    """Refuses transformers' save_pretrained, which writes the memory of rank 0. It may write
    replicated values, or a ``state_dict`` of regular tensors."""
    if state_dict is not None and not collect(state_dict, [], DistTensor):
        return
    for slot in slots(self):
        spec = slot.value.spec if isinstance(slot.value, DistTensor) else None
        if spec is None:
            continue
        split = any(spec.mesh.shape[axis] > 1 for axis in spec.varies)
        if split or 0 not in spec.mesh.root.ranks:
            raise RuntimeError(
                f"{type(self).__name__}.save_pretrained: {slot.name!r} is {spec!r}, of which "
                "this writer sees one rank's piece. dt.pretrained.save(model, folder) writes "
                "the same files from all ranks (each must call it). In one_process(), all ranks "
                "may call it in `with process.saving(folder) as folder:`"
            )
