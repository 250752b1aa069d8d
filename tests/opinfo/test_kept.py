"""Sharding is kept without communication where that is natural: by most functions, and by all of
these families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.opinfo import kept

SHARE = 0.85  # of the OpInfos that have an independent dim

# One or more OpInfos of each family: all keep their first independent dim, and the second where
# there is one.
FAMILIES = {
    "matrix products":
        "matmul mm bmm baddbmm addmm mv einsum nn.functional.linear nn.functional.bilinear "
        "linalg.multi_dot",
    "elementwise":
        "add mul div.no_rounding_mode pow exp where clamp sigmoid nn.functional.gelu lerp addcmul "
        "floor_divide isnan",
    "reductions": "sum mean amax amin all any std var logsumexp linalg.vector_norm count_nonzero",
    "arg-reductions":
        "argmax argmin max.reduction_with_dim min.reduction_with_dim median nanmedian mode "
        "kthvalue aminmax",
    "softmax": "softmax log_softmax nn.functional.softmin",
    "norms":
        "nn.functional.layer_norm nn.functional.rms_norm nn.functional.normalize "
        "nn.functional.local_response_norm",
    "losses":
        "nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss "
        "nn.functional.l1_loss nn.functional.kl_div nn.functional.smooth_l1_loss "
        "nn.functional.binary_cross_entropy_with_logits nn.functional.huber_loss",
    "gather and scatter":
        "gather scatter scatter_add index_select index_add index_copy index_fill take_along_dim "
        "select_scatter",
    "masks": "masked_fill tril triu",
    "embedding": "nn.functional.embedding nn.functional.embedding_bag",
    "repeat, pad, roll":
        "tile repeat expand unfold nn.functional.pad.constant nn.functional.pad.reflect flip "
        "fliplr constant_pad_nd",
    "cumulative": "cumsum cumprod cummax cummin logcumsumexp cumulative_trapezoid trapezoid",
    "order": "sort topk argsort msort searchsorted bucketize isin",
    "convolution":
        "nn.functional.conv1d nn.functional.conv_transpose1d nn.functional.conv_transpose2d "
        "nn.functional.conv_transpose3d",
    "pooling":
        "nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d "
        "nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d "
        "nn.functional.max_unpool2d",
    "interpolation":
        "nn.functional.interpolate.bilinear nn.functional.interpolate.nearest "
        "nn.functional.upsample_nearest nn.functional.grid_sample",
    "linear algebra":
        "linalg.inv linalg.det linalg.qr linalg.svd linalg.eigh linalg.solve linalg.matrix_power "
        "linalg.cond linalg.cross cdist",
    "Fourier": "fft.fft fft.ifft fft.rfft fft.fft2 fft.fftn fft.fftshift stft",
    "gates, rotary":
        "nn.functional.glu chunk narrow_copy stack unbind transpose permute view_as_complex "
        "unsqueeze",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, kept.Row]:
    """Measured in a process of its own: its world is not this one's."""
    file = tmp_path_factory.mktemp("kept") / "rows.json"
    command = [sys.executable, "-m", "tests.opinfo.kept", "--most", "2", "--json", str(file)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {r["name"]: kept.Row(r["name"], r["dims"]) for r in json.loads(file.read_text())}


@pytest.mark.limit(300)
def test_most_functions_keep_what_is_independent(rows):
    for which in (0, 1):
        good, every = kept.share(list(rows.values()), which)
        assert every > (500, 200)[which]
        lost = [r.name for r in rows.values() if r.kept(which) is False]
        assert good >= SHARE * every, f"{good} of {every}; lost: {' '.join(lost)}"


@pytest.mark.limit(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_shards(rows, family):
    for name in FAMILIES[family].split():
        problems = [p for *_, p in rows[name].dims if p]
        assert rows[name].dims, f"{name}: no independent dim was found"
        assert not problems, f"{name}: {problems[0]}"


def independent(func, *args, dim):
    return [(w.ins, w.outs) for w in kept.independent(func, (args, {}), dim, False, False)]


def test_independent_dims_are_found():
    x, y = torch.randn(4, 5), torch.randn(5, 4)
    assert ((0, None), (0,)) in independent(torch.matmul, x, y, dim=0)
    assert independent(torch.matmul, x, y, dim=1) == []
    assert independent(torch.t, x, dim=1) == [((1,), (0,))]
    assert independent(torch.cumsum, x, 0, dim=0) == []
    assert independent(torch.cumsum, x, 0, dim=1) == [((1,), (1,))]
    assert ((0, 0), (0,)) in independent(torch.add, x, x, dim=0)
    assert independent(torch.flip, x, (0,), dim=0) == []
    pairs = torch.nn.functional.avg_pool1d
    assert independent(pairs, torch.randn(2, 3, 4), 2, dim=2) == []  # one of two cuts would do
    assert independent(pairs, torch.randn(2, 3, 4), 2, dim=1) == [((1,), (1,))]


def test_what_is_lost_is_seen():
    """A rule that makes everything whole, in the table."""
    code = (
        "from tests.opinfo import kept; import torch, ops; from ops.registry import RULES; mesh = "
        "kept.world()\n"
        "for f in (torch.exp, torch.Tensor.exp): RULES.pop(f)\n"
        "row = kept.measure('exp', 3, mesh); print(row.kept(0), row.of(0)[-1])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.startswith("False gathers"), done.stdout + done.stderr
