"""benchmarks/calibrate, and the costs of kernels that it measures."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import disttensor as dt
from benchmarks.calibrate.measure import code, measure, measure_network
from benchmarks.calibrate.reference_pipeline import of_collective, of_micro_batch
from benchmarks.calibrate.reference_step import (
    events_of,
    of_gradient,
    of_kernel,
    reference_step,
    world_of_one,
)
from disttensor.observe import Observer, observers
from disttensor.simulate.__main__ import costs_of
from disttensor.simulate.events import Op
from disttensor.simulate.shapes import cost
from tests.support.pool import on_ranks

aten = torch.ops.aten


def test_attention_on_cpu_tensors_has_the_flops_of_its_two_products():
    q = torch.randn(2, 4, 8, 16)
    func = aten._scaled_dot_product_flash_attention_for_cpu
    assert cost(func.default, (q, q, q), {}, func(q, q, q)).flops == 2 * 2 * (2 * 4 * 8 * 8 * 16)


def test_an_attention_says_that_it_is_causal_and_of_what_size():
    q, k = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(1, 2, 9, 8)
    func = aten._scaled_dot_product_flash_attention_for_cpu
    out = func(q, k, k, is_causal=True)
    assert cost(func.default, (q, k, k), {"is_causal": True}, out).causal == (6, 9)
    assert cost(func.default, (q, k, k, 0.0, True), {}, out).causal == (6, 9)
    assert cost(func.default, (q, k, k), {}, out).causal == ()
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    args = (out[0], q, k, k, out[0], out[1], 0.0, True)
    assert cost(back.default, args, {}, back(*args)).causal == (6, 9)
    x = torch.randn(3, 3)
    assert cost(aten.mm.default, (x, x), {}, x @ x).causal == ()


def test_memory_that_is_asked_for_moves_no_bytes_and_what_is_written_by_name_does():
    x = torch.randn(6, 4)
    assert cost(aten.empty_like.default, (x,), {}, torch.empty_like(x)).nbytes == 0
    assert cost(aten.clone.default, (x,), {}, x.clone()).nbytes == 2 * x.nbytes
    parts = [torch.empty(2, 4), torch.empty(4, 4)]
    func = aten.split_with_sizes_copy.out
    assert cost(func, (x, [2, 4]), {"out": parts}, None).nbytes >= 2 * x.nbytes


@pytest.mark.limit(300)
@on_ranks(4, timeout=200)
def test_ranks_of_one_machine_measure_one_network_and_share_its_cores():
    found = measure_network()
    every = [None] * 4
    dist.all_gather_object(every, found)
    assert every == [found] * 4
    assert found.ranks_per_node == 4 and found.within == found.between
    for link in (found.within, found.processor):
        assert link.bandwidth > 0 and link.latency > 0
    here = measure(seconds=0.001, together=True)
    cores = len(os.sched_getaffinity(0))
    assert here.sharing == max(1.0, 4 * torch.get_num_threads() / cores)
    assert here.launch > 0 and not here.asynchronous
    assert here.visit > 0 and here.post > 0
    host = here.launch, here.gradient, here.visit, here.post
    dist.all_gather_object(every, host)
    assert every == [host] * 4
    assert here.kernels["gelu", torch.float32] > 1  # an exponential is no copy
    names = {name for name, dtype in here.kernels if dtype is torch.bfloat16}
    assert {"mm", "_scaled_dot_product_flash_attention_for_cpu"} <= names


# seconds
KERNEL, POST, VISIT, GRADIENT = 1e-5, 3e-4, 1e-3, 2e-4
BARE = dt.simulate.devices.Device(
    name="d", peak={torch.float32: 1e11}, bandwidth=1e10, efficiency=1.0, type="cpu"
)


class Counted(TorchDispatchMode):
    """A clock on which kernels, collectives and messages, visits and gradients of parameters in
    shards take their time."""

    sees_engine = True

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.seconds += POST
        elif func.namespace == "aten":
            spent = cost(func, args, kwargs or {}, out)
            if not spent.views:
                self.seconds += KERNEL + BARE.seconds(spent.flops, spent.nbytes, torch.float32)
        return out


class Visited(Observer):
    def __init__(self, clock):
        self.clock = clock

    def begin_action(self, action):
        self.clock.seconds += VISIT

    def accumulate_grad(self, params):
        self.clock.seconds += GRADIENT * (params[0].axis is not None)


def test_what_the_host_takes_is_found_of_steps_that_take_so_long():
    """By a clock that counts, the times come out that it counts by, and none of them in another
    one."""
    with Counted() as clock, contextlib.ExitStack() as opened:
        visited, found = Visited(clock), {}

        def now():
            """Opens the observer inside: a simulated world hides those around it."""
            if visited not in observers:
                opened.enter_context(visited)
            return clock.seconds

        for name, measured, expected in (
            ("post", lambda _, now, t: of_collective(now, t), POST),
            ("launch", of_kernel, KERNEL),
            ("gradient", of_gradient, GRADIENT),
            ("visit", of_micro_batch, VISIT),
        ):
            device = dataclasses.replace(BARE, **found)
            found[name] = measured(device, now, False)
            assert found[name] == pytest.approx(expected, rel=0.05), name


def test_a_collective_on_data_is_no_kernel():
    with world_of_one(False, ranks=2):
        step = reference_step(32, 16, 1, sharded=True)
        step()
        names = {e.name for e in events_of(step) if isinstance(e, Op)}
        assert "_chunk_cat" in names and not any("all" in n or "reduce_scatter" in n for n in names)


def test_a_network_of_one_rank_is_refused_by_name():
    with pytest.raises(dt.errors.CommError, match=r"measure_network: there are 1 ranks.*torchrun"):
        measure_network()


@pytest.mark.parametrize("seconds", [0, -1.0, "1"])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises((TypeError, ValueError), match="measure: seconds"):
        measure(seconds=seconds)


def test_the_command_reads_the_device_and_network_that_calibration_prints(tmp_path):
    links = {
        "between": dt.simulate.devices.Link(1e9, 1e-5),
        "processor": dt.simulate.devices.Link(2e9, 1e-6),
    }
    network = dt.simulate.devices.Network(ranks_per_node=3, **links)
    device = dataclasses.replace(BARE, kernels={("mm", torch.float32): 1.5})
    file = tmp_path / "cpu.py"
    file.write_text(code(device=device, network=network))
    assert costs_of(str(file), None) == (device, network)
    assert costs_of(str(file), 2) == (device, dataclasses.replace(network, ranks_per_node=2))
    file.write_text(code(device=device))
    assert costs_of(str(file), None) == (device, dt.simulate.devices.Network())
    assert costs_of("a100", None) == (dt.simulate.devices.A100, dt.simulate.devices.Network())
    for name in ("cpu", str(tmp_path)):
        with pytest.raises(ValueError, match=r"--device .*: one of a100, h100, h200 is expected"):
            costs_of(name, None)
