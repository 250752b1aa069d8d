"""A simulated rank computes on tensors of the CPU, and torch chooses as on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disttensor as dt
from disttensor.simulate import devices, simulate
from ops.answer import answer
from tests.simulate.test_against_real_ranks import CPU


def attention(dropout, dtype=torch.bfloat16, mask=False):
    def step():
        mesh = dt.init_mesh((2,), ("dp",))
        q = dt.shard_tensor(torch.ones(2, 4, 256, 64, dtype=dtype), mesh, [dt.Shard(0)])
        q.requires_grad_()
        seen = torch.ones(256, 256, dtype=torch.bool) if mask else None
        out = F.scaled_dot_product_attention(q, q, q, seen, dropout, is_causal=not mask)
        out.sum().backward()

    return lambda: step


@pytest.mark.parametrize(("dtype", "mask", "kernel"), [
    (torch.bfloat16, False, "flash"), (torch.float32, False, "efficient"),
    (torch.bfloat16, True, "efficient"),
])  # fmt: skip
def test_attention_with_dropout_takes_a_kernel_of_the_gpu(dtype, mask, kernel):
    plain, dropped = (simulate(attention(p, dtype, mask), 2).kinds[0] for p in (0.0, 0.1))
    name = f"_scaled_dot_product_{kernel}_attention"
    assert set(dropped.flops_by("name")) == {name, f"{name}_backward"}
    assert dropped.flops == plain.flops and dropped.peak_memory == plain.peak_memory


def trained(optimizer, **options):
    def build():
        strategy = dt.Strategy(sharding=2, zero_stage=3)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        strategy.apply(model)
        made = optimizer(model.parameters(), **options)

        def step():
            x = dt.shard_tensor(torch.ones(8, 8), strategy.stages()[0], strategy.batch(None))
            model(x).sum().backward()
            made.step()
            made.zero_grad()
            with torch.inference_mode():
                model(x)

        return step

    return build


def updates(report):
    return [e.name for e in report.kinds[0].events if getattr(e, "phase", "") == "optimizer"]


def test_optimizers_take_the_loops_of_the_device():
    of_gpu = updates(simulate(trained(torch.optim.AdamW), 2))
    assert all(name.startswith("_foreach_") for name in of_gpu)
    assert of_gpu == updates(simulate(trained(torch.optim.AdamW, foreach=True), 2, device=CPU))
    on_cpu = updates(simulate(trained(torch.optim.AdamW), 2, device=CPU))
    assert len(on_cpu) > len(of_gpu) and "addcdiv_" in on_cpu


def test_autocast_of_a_gpu_casts_as_on_a_gpu():
    half, full = torch.bfloat16, torch.float32

    def step():
        x = torch.ones(4, 4)
        with torch.autocast("cuda", half):
            y = x @ x
            found = y, y.softmax(-1), F.layer_norm(y, (4,)), y.sum(), y**2, y + y
        assert [t.dtype for t in found] == [half, full, full, full, full, half]

    report = simulate(lambda: step, 1)
    assert report.kinds[0].flops_by("dtype") == {"torch.bfloat16": 128}


def test_a_type_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match=r'Device: type.*"cuda" or "cpu"'):
        dataclasses.replace(devices.H100, type="gpu")


def test_answers_of_torch_on_this_machine_are_no_answers_on_the_device(capsys):
    half, full = torch.bfloat16, torch.float32

    def asked():
        with torch.autocast("cpu", half):
            return answer(F.softmax, [torch.ones(4, 4, dtype=half), -1], {}).outs[0].dtype

    def step():
        print(asked())

    assert asked() == half
    for _ in range(2):
        simulate(lambda: step, 1)
    assert capsys.readouterr().out.split() == 4 * [str(full)]
    assert asked() == half
