"""The door to torch.distributed: values in mesh order, what is recorded, and errors with names."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from disttensor import errors
from disttensor.comm import collectives, compare_collectives, groups, objects
from disttensor.comm.log import record_comms
from disttensor.core.mesh import ProcessMesh
from disttensor.errors import CommError, MismatchError
from disttensor.torch_private import default_store
from tests.support import pool
from tests.support.pool import on_ranks, run_on_ranks

ORDERS = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64]
TINY = [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.complex128]


def group_of(ranks, name="dp"):
    return ProcessMesh(ranks, (name,)).group((0,))


def equal(a, b):
    """Also for dtypes that torch.equal does not know."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tolist() == b.tolist()


@pytest.mark.parametrize("ranks", ORDERS, ids=str)
@on_ranks(4)
def test_movement_is_in_mesh_order_in_every_dtype(ranks):
    group, n = group_of(ranks), 4
    i = group.index
    for dtype in FLOATS + OTHERS + TINY:
        every = [(torch.arange(6).reshape(2, 3) + 10 * k).to(dtype) for k in range(n)]
        x = every[i]
        assert equal(collectives.all_gather(x, group), torch.stack(every))
        assert equal(collectives.all_gather(x, group, (8, 3)), torch.cat(every))
        assert equal(collectives.all_gather(x.t(), group)[1], every[1].t())
        assert equal(collectives.all_gather(x[0, 0], group), torch.stack([e[0, 0] for e in every]))
        assert equal(collectives.broadcast(x, 2, group), every[2])
        table = torch.stack([x[j % 2] for j in range(n)])
        out = collectives.all_to_all_rows(table, (), (), group)
        assert equal(out, torch.stack([e[i % 2] for e in every]))


@pytest.mark.parametrize("ranks", ORDERS, ids=str)
@on_ranks(4)
def test_all_to_all_of_uneven_pieces(ranks):
    group = group_of(ranks)
    i = group.index
    for dtype in [torch.float32, torch.bool, torch.int16, torch.complex64]:
        pieces = [torch.full((i, j), 10 * i + j).to(dtype) for j in range(4)]  # i * j elements
        got = collectives.all_to_all(pieces, [i * j for j in range(4)], group)
        for j, piece in enumerate(got):
            assert equal(piece, torch.full((i * j,), 10 * j + i).to(dtype))
    pieces = [torch.full((j % 2,), 10 * i + j) for j in range(4)]  # two of them are empty
    got = collectives.all_to_all(pieces, [i % 2] * 4, group)
    assert [p.tolist() for p in got] == [[10 * j + i] * (i % 2) for j in range(4)]


@pytest.mark.parametrize("ranks", ORDERS, ids=str)
@on_ranks(4)
def test_reductions(ranks):
    group = group_of(ranks)
    i = group.index
    values = torch.tensor(
        [[1, 2, 4, 2], [2, 1, 1, 4], [4, 4, 2, 8], [1, 1, 1, 2]]
    )  # [member, slot]
    want = {
        "sum": values.sum(0),
        "max": values.amax(0),
        "min": values.amin(0),
        "prod": values.prod(0),
    }
    for dtype in [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8]:
        for op, whole in want.items():
            x = values[i].to(dtype)
            before = x.clone()
            assert equal(collectives.all_reduce(x, op, group), whole.to(dtype))
            assert equal(collectives.reduce_scatter(x, op, group), whole.to(dtype)[i])
            wide = x.unsqueeze(1).expand(4, 3)  # not contiguous
            assert equal(collectives.reduce_scatter(wide, op, group), whole.to(dtype)[i].expand(3))
            assert equal(x, before)
    for dtype in FLOATS:
        mean = values.double().mean(0).to(dtype)
        assert equal(collectives.all_reduce(values[i].to(dtype), "avg", group), mean)
        assert equal(collectives.reduce_scatter(values[i].to(dtype), "avg", group), mean[i])


@on_ranks(4)
def test_reductions_of_bool_and_of_zeros():
    group = group_of(range(4))
    for dtype in [torch.bool, torch.float32, torch.int16, torch.int64, torch.float64]:
        column = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 1]])
        x = column[:, group.index].to(dtype)
        x = -x if dtype not in (torch.bool,) else x  # below zero is true as well
        assert collectives.all_reduce(x, "any", group).bool().tolist() == [False, True, True, True]
        assert collectives.all_reduce(x, "all", group).bool().tolist() == [False] * 4
        assert collectives.reduce_scatter(x, "any", group).bool().item() == (group.index > 0)
        assert collectives.all_reduce(x, "any", group).dtype == dtype
    some = torch.tensor([group.index == 1, True])
    assert collectives.all_reduce(some, "max", group).tolist() == [True, True]
    assert collectives.all_reduce(some, "min", group).tolist() == [False, True]


@on_ranks(2)
def test_complex_sums_and_lazy_signs():
    group = group_of(range(2))
    z = torch.tensor([1 + 2j, 3j])
    assert collectives.all_reduce(z.conj(), "sum", group).tolist() == [2 - 4j, -6j]
    assert collectives.all_reduce(z, "avg", group).tolist() == z.tolist()
    assert collectives.all_reduce(z.conj().imag, "sum", group).tolist() == [-4, -6]
    assert collectives.all_gather(z.conj(), group)[0].tolist() == [1 - 2j, -3j]
    assert collectives.reduce_scatter(z, "sum", group).item() == (
        2 + 4j if group.index == 0 else 6j
    )
    with pytest.raises(CommError, match="complex numbers with 'max'"):
        collectives.all_reduce(z, "max", group)
    with pytest.raises(CommError, match=r"average of torch\.int64"):
        collectives.all_reduce(torch.ones(2, dtype=torch.int64), "avg", group)


@on_ranks(2)
def test_results_are_plain_and_inputs_stay():
    group = group_of(range(2))
    x = torch.ones(2, 2, requires_grad=True)
    outs = [
        collectives.all_reduce(x, "sum", group), collectives.all_gather(x, group),
        collectives.broadcast(x, 0, group),
        collectives.reduce_scatter(x, "avg", group), collectives.all_to_all_rows(x, (), (), group),
        *collectives.all_to_all(list(x), [2, 2], group),
    ]  # fmt: skip
    for out in outs:
        assert not out.requires_grad and out.data_ptr() != x.data_ptr()
    assert torch.equal(x, torch.ones(2, 2))
    assert objects.gather_objects({"rank": group.index}, group) == [{"rank": 0}, {"rank": 1}]


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all():
    group = ProcessMesh([1, 0], ("dp",)).group((0,))
    rank = dist.get_rank()

    def fail() -> int:
        if rank == 1:
            raise FileNotFoundError("no file")
        return rank

    assert objects.gather_results("f", group, lambda: rank) == [1, 0]
    assert objects.run_on_all_ranks("f", group, lambda: rank) == rank
    with pytest.raises(FileNotFoundError if rank == 1 else RuntimeError, match="no file") as own:
        objects.gather_results("f", group, fail)
    assert rank == 1 or str(own.value) == "f (rank 1): FileNotFoundError: no file"
    for kinds, kind in (((ValueError, OSError), OSError), ((OSError, TypeError), OSError),
                        ((ValueError, TypeError), TypeError)):  # fmt: skip
        words = r"f \(rank 1\): FileNotFoundError: no file"
        with pytest.raises(kind, match=words) as raised:
            objects.run_on_all_ranks("f", group, fail, kinds)
        assert type(raised.value) is kind
        assert isinstance(raised.value.__cause__, FileNotFoundError) == (rank == 1)
    with pytest.raises(MismatchError, match=r"at rank 1: f1, rank 0: f0"):
        objects.gather_results(f"f{rank}", group, fail)


def test_a_group_of_one_needs_no_backend():
    group = ProcessMesh([0], ("dp",)).group((0,))
    x = torch.arange(6.0).reshape(1, 6)
    with record_comms() as log:
        assert torch.equal(collectives.all_reduce(x, "avg", group), x)
        assert torch.equal(collectives.all_gather(x, group), x[None])
        assert torch.equal(collectives.all_gather(x, group, (2, 3)), x.view(2, 3))
        assert torch.equal(collectives.reduce_scatter(x, "sum", group), x[0])
        assert torch.equal(collectives.all_to_all_rows(x, (), (), group), x)
        assert torch.equal(collectives.all_to_all([x], [6], group)[0], x[0])
        assert torch.equal(collectives.broadcast(x, 0, group), x)
        assert objects.gather_objects(7, group) == [7]
    assert len(log) == 0


@pytest.mark.feature("Looking inside")
@on_ranks(4)
def test_what_is_recorded():
    mesh = ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))
    both, tp = mesh.group((0, 1)), mesh.group((1,))
    x = torch.ones(4, 8)  # 128 bytes
    with record_comms() as outer:
        collectives.all_reduce(x, "sum", both)
        with record_comms() as inner:
            collectives.all_gather(x, tp)
        collectives.reduce_scatter(x, "sum", both)
        collectives.all_to_all_rows(x, (), (), both)
        collectives.all_to_all([x[0], x[1:3]], [8, 8] if tp.index == 0 else [16, 16], tp)
        collectives.broadcast(x, 0, tp)
    collectives.all_reduce(x, "sum", tp)  # outside: not recorded
    first = tp.index == 0
    assert [(r.kind, r.axis, r.bytes) for r in outer] == [
        ("all_reduce", "dp+tp", 192),
        ("all_gather", "tp", 128),
        ("reduce_scatter", "dp+tp", 96),
        ("all_to_all", "dp+tp", 96),
        ("all_to_all", "tp", 64 if first else 32),
        ("broadcast", "tp", 128 if first else 0),
    ]
    assert [r.kind for r in inner] == ["all_gather"]
    assert outer.total_bytes == sum(r.bytes for r in outer)
    assert outer.counts() == outer.counts("forward") and outer.counts()["all_to_all"] == 2
    assert outer.counts("backward") == {}
    assert all("test_collectives.py:" in r.where for r in outer), [r.where for r in outer]
    table = str(outer).splitlines()
    assert table[0].split() == ["kind", "axis", "bytes", "phase", "shape", "where"]
    assert table[-1].split()[:2] == ["total", "6"] and len(table) == 8


# In the background -------------------------------------------------------------------------------

GRIDS = [[[0, 1], [2, 3]], [[3, 1], [2, 0]], [[1, 2], [0, 3]]]


@pytest.mark.parametrize("ranks", GRIDS, ids=str)
@on_ranks(4)
def test_background_collectives_give_what_the_others_give(ranks):
    mesh = ProcessMesh(ranks, ("dp", "tp"))
    for axes in ((0,), (1,), (0, 1), (1, 0)):
        group = mesh.group(axes, "background")
        n, i = group.size, group.index
        assert group.ranks == mesh.group(axes).ranks and group.pg is not mesh.group(axes).pg
        assert mesh.group(axes, "background") is group
        # floats are encoded for "max", which needs memory of its own
        for dtype in [*FLOATS, torch.int64]:
            every = [torch.arange(2.0 * n).add(3 * k).to(dtype) for k in range(n)]
            for op in ("sum", "avg") if dtype.is_floating_point else ("sum", "max"):
                whole = collectives.all_reduce(every[i], op, group)
                total, part = every[i].clone(), torch.empty(2, dtype=dtype)
                first = collectives.all_reduce(total, op, group, inplace=True, async_op=True)
                x = every[i].clone().requires_grad_(dtype.is_floating_point)
                second = collectives.reduce_scatter(x, op, group, out=part, async_op=True)
                second.wait()
                first.wait()
                assert equal(total, whole) and equal(part, whole[2 * i : 2 * i + 2])
                assert first.done() and second.done()
                first.wait()  # again: nothing is divided twice
                second.wait()
                assert equal(total, whole) and equal(part, whole[2 * i : 2 * i + 2])
                assert equal(x.detach(), every[i])
        for dtype in [torch.float32, torch.bool, torch.int16, torch.complex64]:
            x = torch.arange(3).add(i).to(dtype)
            flat, rows = torch.empty(3 * n, dtype=dtype), torch.empty(n, 3, dtype=dtype)
            pending = (
                collectives.all_gather(x, group, out=flat, async_op=True),
                collectives.all_gather(x, group, out=rows, async_op=True),
            )
            for p in (*pending, *pending):
                p.wait()
            assert equal(rows, collectives.all_gather(x, group)) and equal(flat, rows.view(-1))
            for op in ("sum",) if dtype.is_complex else ("sum", "max"):
                pending_part = collectives.reduce_scatter(rows, op, group, async_op=True)
                assert equal(pending_part.wait(), collectives.reduce_scatter(rows, op, group))


@on_ranks(2)
def test_a_process_that_has_made_a_group_lingers_at_its_end():
    assert group_of([0, 1]).pg
    assert groups._wait_for_gloo.cache_info().currsize == 1


@on_ranks(2)
def test_a_started_collective_does_not_wait_for_the_others():
    group, ahead = group_of([0, 1]), ProcessMesh([0, 1], ("dp",)).group((0,), "ahead")
    x, out = torch.ones(4), torch.empty(8)
    if group.index == 0:
        pending = (
            collectives.all_reduce(x, "sum", ahead, inplace=True, async_op=True),
            collectives.all_gather(x[:2], ahead, out=out[:4], async_op=True),
        )
        assert not pending[0].done() and not pending[1].done()
    collectives.all_reduce(torch.ones(1), "sum", group)  # rank 1 has started nothing yet
    if group.index == 1:
        pending = (
            collectives.all_reduce(x, "sum", ahead, inplace=True, async_op=True),
            collectives.all_gather(x[:2], ahead, out=out[:4], async_op=True),
        )
    pending[0].wait()
    assert x.tolist() == [2, 2, 2, 2]
    pending[1].wait()


@on_ranks(4)
def test_what_is_recorded_of_background_collectives():
    group = ProcessMesh([[0, 1], [2, 3]], ("dp", "tp")).group((0, 1), "background")
    x, out = torch.ones(32), torch.empty(128)
    with record_comms() as log:
        pending = [
            collectives.all_reduce(x, "sum", group, inplace=True, async_op=True),
            collectives.all_gather(x, group, out=out, async_op=True),
            collectives.reduce_scatter(x, "sum", group, out=out[:8], async_op=True),
        ]
    with record_comms() as none:
        for p in pending:
            p.wait()
    with record_comms() as want:
        collectives.all_reduce(x, "sum", group)
        collectives.all_gather(x, group)
        collectives.reduce_scatter(x.view(4, 8), "sum", group)
    assert len(none) == 0
    assert [(r.kind, r.axis, r.bytes) for r in log] == [(r.kind, r.axis, r.bytes) for r in want]
    assert [r.bytes for r in log] == [192, 384, 96]
    assert all("test_collectives.py:" in r.where for r in log)
    with compare_collectives.compare_ranks(seconds=10):
        collectives.all_reduce(x, "sum", group, inplace=True, async_op=True).wait()
        with pytest.raises(errors.MismatchError, match=r"rank 1: all_reduce\(avg\)"):
            collectives.all_reduce(
                x, "avg" if group.index == 1 else "sum", group, inplace=True, async_op=True
            )


def test_background_collectives_in_a_group_of_one():
    group = ProcessMesh([0], ("dp",)).group((0,), "background")
    x, out = torch.arange(4.0), torch.empty(1, 4)
    for op in ("sum", "avg"):
        pending = collectives.all_reduce(x, op, group, inplace=True, async_op=True)
        assert pending.done() and equal(x, torch.arange(4.0))
        pending.wait()
        collectives.reduce_scatter(x, op, group, out=out, async_op=True).wait()
        assert equal(out[0], x)
    pending = collectives.all_gather(x + 1, group, out=out, async_op=True)
    assert pending.done() and equal(out[0], x + 1)


def test_what_cannot_be_sent_as_it_is_is_refused():
    group = ProcessMesh([0], ("dp",)).group((0,))
    x = torch.ones(4)
    for call, words in [
        (
            lambda: collectives.all_reduce(
                x.expand(2, 4), "sum", group, inplace=True, async_op=True
            ),
            "contiguous",
        ),
        (
            lambda: collectives.all_reduce(x.bool(), "sum", group, inplace=True, async_op=True),
            "bool",
        ),
        (
            lambda: collectives.all_reduce(x.int(), "avg", group, inplace=True, async_op=True),
            "average of",
        ),
        (lambda: collectives.all_gather(x, group, out=x[:2], async_op=True), "not 1 times"),
        (
            lambda: collectives.reduce_scatter(x, "sum", group, out=x.double(), async_op=True),
            "not 1 times",
        ),
    ]:
        with pytest.raises(CommError, match=words):
            call()


# Debug mode --------------------------------------------------------------------------------------


@on_ranks(2)
def test_debug_lets_equal_calls_pass():
    group = group_of(range(2), "checked")
    with compare_collectives.compare_ranks(seconds=10):
        assert compare_collectives.enabled
        for _ in range(3):
            assert collectives.all_reduce(torch.ones(2), "sum", group).tolist() == [2, 2]
        got = collectives.all_to_all([torch.ones(group.index + 1)] * 2, [1, 2], group)
        assert [len(t) for t in got] == [1, 2]
    assert not compare_collectives.enabled


@on_ranks(2)
def test_debug_leaves_no_keys_behind():
    """A long run must not fill the memory of the rank that keeps the store."""
    group, store = group_of(range(2), "counted"), default_store()
    with compare_collectives.compare_ranks(seconds=10):
        for _ in range(3):
            collectives.all_reduce(torch.ones(2), "sum", group)
        dist.barrier()
        before = store.num_keys()
        dist.barrier()
        for _ in range(40):
            collectives.all_reduce(torch.ones(2), "sum", group)
        dist.barrier()
        assert store.num_keys() < before + 20  # the watchers have some, too
        dist.barrier()


def disagree(what):
    group = group_of(range(2), f"disagree-{what}")
    x, rank = torch.ones(4), group.index
    with (
        compare_collectives.compare_ranks(seconds=2),
        pytest.raises(errors.MismatchError) as caught,
    ):
        if what == "kind":
            collectives.all_reduce(x, "sum", group) if rank else collectives.all_gather(x, group)
        elif what == "shape":
            collectives.all_reduce(x[: 3 + rank], "sum", group)
        elif what == "op":
            collectives.all_reduce(x, "max" if rank else "sum", group)
        elif rank == 0:  # rank 1 does not come
            collectives.all_reduce(x, "sum", group)
        else:
            raise errors.MismatchError("rank 1 stays away")
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kind", ["rank 0: all_gather", "rank 1: all_reduce", "test_collectives.py:"]),
        ("shape", ["(3,)", "(4,)"]),
        ("op", ["all_reduce(sum)", "all_reduce(max)"]),
        ("absence", ["rank 1 did not come within 2 s", "rank 0 is at all_reduce(sum)"]),
    ],
)
def test_debug_says_which_rank_differs(what, words):
    first, second = run_on_ranks(2, disagree, what)
    for word in words:
        assert word in first, first
    assert what == "absence" or set(first.splitlines()) == set(second.splitlines())


def lose_a_rank(background):
    group = ProcessMesh([0, 1], ("pair",)).group((0,))
    collectives.all_reduce(torch.ones(1), "sum", group)
    dist.barrier()
    if group.index == 1:
        return "away"
    groups.set_timeout(timedelta(seconds=1), group.pg)
    with pytest.raises(CommError) as caught:
        if background:
            pending = collectives.all_reduce(
                torch.ones(1), "sum", group, inplace=True, async_op=True
            )
            with pytest.raises(CommError):
                pending.wait()
            assert pending.done()
            pending.wait()  # what failed once is no result the second time
        else:
            collectives.all_reduce(torch.ones(1), "sum", group)
    return str(caught.value)


@pytest.mark.parametrize("background", [False, True], ids=["waited for", "background"])
def test_a_rank_that_does_not_come_is_an_error_that_names_the_group(background):
    try:
        message, _ = run_on_ranks(2, lose_a_rank, background)
    finally:
        pool.stop(2)  # its ranks are out of step now
    assert "all_reduce over mesh axes pair (ranks [0, 1]) failed on rank 0" in message


@on_ranks(4)
def test_ranks_of_different_meshes_create_groups_in_different_numbers():
    """Members of two meshes have made more groups than others when they meet in a third."""
    for ranks in ([0, 1], [1, 2], [2, 0, 1], [3, 1]):
        if dist.get_rank() in ranks:
            group = groups.new_group(ranks, ("x",))
            total = collectives.all_reduce(torch.ones(2), "sum", group)
            assert total.tolist() == [len(ranks)] * 2
