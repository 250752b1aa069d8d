"""torch's own layers, unmodified: loss and gradients on a mesh are those of one process."""

from __future__ import annotations

import pytest

import disttensor as dt
from tests.support.models.case import Case, check
from tests.support.models.torch_nn import CASES
from tests.support.pool import on_ranks


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("axis", ["dp", "tp"])
@on_ranks(2)
def test_two_ranks(case: Case, axis: str) -> None:
    check(case, dt.ProcessMesh([0, 1], (axis,)))


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(4)
def test_dp_x_tp(case: Case) -> None:
    check(case, dt.ProcessMesh([[0, 1], [2, 3]], ("dp", "tp")))


@pytest.mark.parametrize("case", [c for c in CASES if c.name.startswith(("lstm", "gru"))], ids=str)
@on_ranks(2)
def test_recurrent_networks_send_nothing_for_a_split_batch(case: Case) -> None:
    log = check(case, dt.ProcessMesh([0, 1], ("dp",)))
    assert not len(log), str(log)
