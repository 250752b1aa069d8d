"""Files of values that are no tensors, and of the layouts of tensors. Rank 0 writes the values of
the program. The first rank of each mesh writes what only this mesh has, so that no rank sends it.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from disttensor.checkpoint.folder import check_sum, open_checked
from disttensor.checkpoint.synced_file import Sums

_NAME = re.compile(r"values(-\d+)?\.pt")


def file_of_values(rank: int) -> str:
    return f"values-{rank}.pt" if rank else "values.pt"


class SavedValues(NamedTuple):
    """The values that one rank writes. ``values``: the trees of objects, of rank 0. ``states``: of
    optimizers, by object and parameter. ``layouts``: of tensors, as tuples."""

    values: dict[str, Any]
    states: dict[str, dict[str, Any]]
    layouts: dict[str, Any]


def read_values(folder: Any, path: Path, files: Sums) -> SavedValues:
    """Returns the values of a checkpoint, of all its files, with the states in ``values``."""
    whole = SavedValues({}, {}, {})
    for name in filter(_NAME.fullmatch, sorted(files)):
        with open_checked(folder, path, name, files) as file:
            data = bytes(file.read(0, file.size))
        check_sum(data, files[name][1], path / name)
        part = SavedValues(*torch.load(io.BytesIO(data), weights_only=True))
        whole.values.update(part.values)
        whole.layouts.update(part.layouts)
        for key, states in part.states.items():
            whole.states.setdefault(key, {}).update(states)
    for key, states in whole.states.items():
        whole.values[key]["state"] = states
    return whole
