"""transformers' ``save_pretrained`` of a model of which no rank holds all."""

from __future__ import annotations

from functools import wraps
from typing import Any

from disttensor.nn.parameters import slots
from disttensor.tensor.dist_tensor import DistTensor


def refusing(original: Any) -> Any:
    """Wraps ``save_pretrained``, which writes the memory of rank 0 only. Raises an error on every
    rank that calls it, before the folder is touched. Replicated values are written as before."""

    @wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        for slot in slots(self):
            spec = slot.value.spec if isinstance(slot.value, DistTensor) else None
            if spec is None:
                continue
            split = any(spec.mesh.shape[axis] > 1 for axis in spec.varies)
            if split or 0 not in spec.mesh.root.ranks:
                raise RuntimeError(
                    f"{type(self).__name__}.save_pretrained: {slot.name!r} is {spec!r}, of which "
                    "this writer sees one rank's piece. dt.save_pretrained(model, folder) writes "
                    "the same files from all ranks (each must call it)"
                )
        return original(self, *args, **kwargs)

    return save_pretrained
