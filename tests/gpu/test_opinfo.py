"""PyTorch's own samples of its functions, on two ranks of one CUDA device, against plain PyTorch on
that device."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="PyTorch's samples need it")

from tests.opinfo import opinfo

PARTS = 8
KNOWN = {  # beside those of the CPU
    "jiterator_": "refused: it computes the piece of a rank",
    "linspace.tensor_overload": "has no rule; with device= the full result is on the mesh's device",
    "logspace.tensor_overload": "the same",
    "nn.functional.channel_shuffle": "torch's kernel of CUDA refuses strided gradients",
}


@pytest.mark.limit(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_functions_match_plain_torch(part):
    jobs = opinfo.jobs_of(opinfo.OPS, ["float32"])[part::PARTS]
    results = opinfo.measure(jobs, most=2)
    failed = [r for r in results if r.failures and r.name not in opinfo.KNOWN]
    failed = [r for r in failed if not r.name.startswith(tuple(KNOWN))]
    assert not failed, "\n" + opinfo.table(failed, verbose=False)
