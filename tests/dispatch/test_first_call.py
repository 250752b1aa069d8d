"""The first call of a kind is read from top to bottom: few functions, in few files."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

import disttensor as dt
from disttensor.cache import clear_caches
from disttensor.dispatch.resolve import DECISIONS
from ops.answer import KNOWN
from tests.support.part import ROOT
from tests.support.pool import fake_world

OURS = tuple(str(ROOT / folder) for folder in ("disttensor", "ops", "reshard"))


class Visits:
    """The functions of this project that run, without comprehensions: (file, name)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(OURS):
            self.found.append((code.co_filename, code.co_qualname))


def test_a_first_linear_visits_few_functions_in_few_files() -> None:
    visits = Visits()
    with fake_world(4):
        mesh = dt.init_mesh((4,), ("tp",))
        x = dt.shard_tensor(torch.randn(8, 16), mesh, [dt.Replicate()])
        w = dt.shard_tensor(torch.randn(32, 16), mesh, [dt.Shard(0)])
        torch.mm(x, x.T), torch.relu(x)  # torch's own imports are done
        clear_caches()
        KNOWN.clear()
        DECISIONS.clear()
        sys.setprofile(visits)
        try:
            F.linear(x, w)
        finally:
            sys.setprofile(None)
    files = [file for file, _ in visits.found]
    turns = [b for a, b in itertools.pairwise(files) if a != b]
    returns = len(turns) + 1 - len(set(files))
    assert len(set(visits.found)) <= 115, sorted(set(visits.found))
    assert (len(set(files)), returns) <= (34, 70), files
