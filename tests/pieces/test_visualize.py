"""dt.visualize: the pieces that it shows are those that the ranks hold."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disttensor as dt
from disttensor import Partial, Shard
from disttensor.core.spec import DistSpec, spec_of
from disttensor.pieces.picture import Picture
from tests.support.layouts import S0, S1, P, R, counted, grid
from tests.support.pool import fake_world, on_ranks

DOCS = Path(__file__).parents[2] / "docs"
B0 = dt.attention.Balanced(0)
LAYOUTS = [(R, R), (S0, R), (S1, S0), (S0, S0), (Shard(0, order=1), Shard(0, order=0)), (P, S1),
           (S1, B0), (R, B0), (B0, S0), (S0, B0)]  # fmt: skip


def random_specs(count: int, seed: int) -> list[DistSpec]:
    """Specs on meshes of this world, also on parts of it, with uneven and empty pieces."""
    draw, out = random.Random(seed), []
    ranks = list(range(dist.get_world_size()))
    for _ in range(count):
        shape = draw.choice([(8,), (2, 4), (4, 2), (3, 2), (2, 2, 2), (1, 5)])
        names = ("a", "b", "c")[: len(shape)]
        mesh = dt.ProcessMesh(
            torch.tensor(draw.sample(ranks, torch.Size(shape).numel())).view(shape), names
        )
        sizes = tuple(draw.choice([0, 1, 2, 3, 5, 8, 9]) for _ in range(draw.randint(0, 4)))
        places = [R, Partial("max"), *map(Shard, range(len(sizes)))] * 2
        out.append(spec_of(mesh, sizes, torch.float32, draw.choices(places, k=mesh.ndim)))
    return out


def test_pieces_are_the_boxes_of_all_ranks() -> None:
    with fake_world(8):
        for spec in random_specs(200, seed=1):
            picture = Picture.of(spec)
            held: dict[int, Any] = {rank: torch.zeros(spec.shape) for rank in spec.mesh.ranks}
            for ranges, ranks in picture.pieces:
                assert len(set(ranks)) == len(ranks)
                for rank in ranks:
                    held[rank][tuple(slice(*r) for r in ranges)] += 1
            for rank, place in zip(spec.mesh.ranks, spec.mesh.coordinates(), strict=True):
                expected = torch.zeros(spec.shape)
                expected[spec.box_at(place).slices] = 1
                assert torch.equal(held[rank], expected), (spec, rank)
                assert (rank in picture.empty) == (spec.box_at(place).numel == 0)


def numbers(text: str) -> list[int]:
    """The ranks of a box, which the text lists."""
    runs = re.findall(r"(\d+)(?:-(\d+))?", text.partition("(")[0])
    return [rank for a, b in runs for rank in range(int(a), int(b or a) + 1)]


def test_the_boxes_of_the_text_are_the_pieces() -> None:
    with fake_world(8):
        checked = 0
        for spec in random_specs(200, seed=2):
            picture = Picture.of(spec)
            if len(picture.sheets) != 1 or spec.ndim != 2 or "..." in str(picture):
                continue
            lines = str(picture).splitlines()
            boxes = [line for line in lines if "│" in line]
            columns = re.findall(r"\d+:\d+", lines[2])
            read = {}
            for line in boxes:
                name, *cells, rest = line.split("│")
                assert len(cells) == len(columns) and not rest
                for column, cell in zip(columns, cells, strict=True):
                    at = (name.strip(), column)
                    read[at] = numbers(cell)
            shown = {tuple(f"{a}:{b}" for a, b in p.ranges): [*p.ranks] for p in picture.pieces}
            assert read == shown
            assert len({len(line) for line in lines if line[:1] in " 0123456789" and line}) <= 2
            checked += 1
        assert checked > 30


@on_ranks(4)
@pytest.mark.feature("Pictures")
@pytest.mark.parametrize("shape", [(5, 6), (2, 3), (9, 1)])
def test_each_rank_holds_what_the_picture_shows(shape: tuple[int, ...]) -> None:
    full, me = counted(*shape), dist.get_rank()
    for layout in LAYOUTS:
        x = dt.shard_tensor(full, grid(), layout)
        with dt.debugging.record_comms() as log:
            picture = dt.visualize(x)
        assert not len(log)
        mine = [p.ranges for p in picture.pieces if me in p.ranks]
        rows = [full[tuple(slice(*r) for r in ranges)] for ranges in sorted(mine)]
        assert rows or me in picture.empty
        local = x.to_local()
        if any(isinstance(p, Partial) for p in layout):
            assert sum(row.numel() for row in rows) == local.numel()
        else:
            assert torch.equal(torch.cat(rows), local) if rows else not local.numel(), layout
        told = numbers(picture.notes[-1])
        assert told[0] <= local.nbytes <= told[-1]


@on_ranks(4)
def test_all_ranks_see_one_picture_of_a_stage_and_of_a_sub_mesh() -> None:
    stage = dt.ones(4, 6, mesh=grid()[1], placements=[S1])
    names = [str(dt.visualize(stage))]
    assert "outside the mesh: ranks 0, 1" in names[0]
    assert [p.ranks for p in dt.visualize(stage).pieces] == [(2,), (3,)]
    sub = dt.ones(4, 6, mesh=grid()["tp"], placements=[S0])
    names.append(str(dt.visualize(sub)))
    assert [p.ranks for p in dt.visualize(sub).pieces] == [(0, 2), (1, 3)]
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, names)
    assert told == [names] * 4
    x = dt.ones(4, 6, mesh=grid(), placements=[S0, R])
    assert str(dt.visualize(dt.to_dtensor(x))) == str(dt.visualize(x)) == str(dt.visualize(x.spec))


TEXT = """\
f32[5@dp, 3, 4@tp] {cp: P(sum)} on ProcessMesh(dp=4, cp=2, tp=2)

           0:2              2:4
    ┌────────────────┬────────────────┐
0:2 │  ranks 0, 2    │   ranks 1, 3   │
    ├────────────────┼────────────────┤
2:4 │  ranks 4, 6    │   ranks 5, 7   │
    ├────────────────┼────────────────┤
4:5 │  ranks 8, 10   │   ranks 9, 11  │
    └────────────────┴────────────────┘

rows are dim 0, columns are dim 2; not split: dim 1
cp: P(sum): the value is the sum over cp of what the ranks of a box hold
no element: ranks 12-15
bytes on a rank: 0 to 48"""


def test_the_text_of_a_picture() -> None:
    sizes = {"dp": 4, "cp": 2, "tp": 2}
    picture = dt.visualize((5, 3, 4), mesh=sizes, plan=[S0, P, Shard(2)])
    assert re.sub(r"[ ─]+", " ", str(picture)) == re.sub(r"[ ─]+", " ", TEXT)
    assert not dist.is_initialized()


def test_many_pieces_are_drawn_in_part_and_a_third_split_dim_by_grids() -> None:
    long = str(dt.visualize((4096,), mesh={"dp": 1024}, plan=[S0]))
    assert max(map(len, long.splitlines())) <= 100 and "rank 1023" in long and "..." in long
    assert "dim 0 has 1024 pieces, drawn in part" in long
    tall = str(dt.visualize((64, 2), mesh={"dp": 64, "tp": 2}, plan=[S0, R]))
    assert len(tall.splitlines()) < 44 and "ranks 126, 127" in tall
    sizes = {"a": 2, "b": 2, "c": 8}
    deep = dt.visualize((4, 4, 16), mesh=sizes, plan=[S0, S1, Shard(2)])
    assert [s.title for s in deep.sheets] == [f"dim 2 at {i}:{i + 2}" for i in (0, 2, 4, 6)]
    assert "4 more such grids are left out" in str(deep)
    for plan, told in (([R, S0], "ranks 0, 8, ... 56 (8)"), ([S0, R], "ranks 0-7")):
        assert told in str(dt.visualize((8,), mesh={"a": 8, "b": 8}, plan=plan))
    runs = str(dt.visualize((8,), mesh={"a": 2, "b": 2, "c": 4}, plan=[R, S0, R]))
    assert "ranks 0-3, 8-11 (8)" in runs


class Rows(Shard):
    """A placement of a user's own."""


def test_a_placement_of_the_users_own_is_named() -> None:
    assert "dp: Shard(0): drawn as its base class" in str(
        dt.visualize((4, 2), mesh={"dp": 2}, plan=[Rows(0)])
    )


def test_the_svg_is_well_formed_and_inside_its_frame(tmp_path: Path) -> None:
    with fake_world(8):
        pictures = [Picture.of(spec) for spec in random_specs(60, seed=3)]
    pictures.append(dt.visualize((640, 2), mesh={"dp": 64}, plan=[S0]))
    for picture in pictures:
        root = ElementTree.fromstring(picture._repr_svg_())
        width, height = (float(root.attrib[k]) for k in ("width", "height"))
        boxes = [e.attrib for e in root if e.tag.endswith("rect")][1:]
        assert len(boxes) == sum(len(s.rows) * len(s.columns) for s in picture.sheets)
        for box in boxes:
            assert float(box["x"]) >= 0 and float(box["x"]) + float(box["width"]) < width
            assert float(box["y"]) >= 0 and float(box["y"]) + float(box["height"]) < height
        texts = [e.text for e in root if e.tag.endswith("text")]
        assert texts[0] == picture.title and set(picture.notes) <= set(texts)
    assert pictures[0].save(tmp_path / "a.svg").read_text() == pictures[0]._repr_svg_()
    with pytest.raises(ValueError, match=r"ends in '.png': write .svg"):
        pictures[0].save(tmp_path / "a.png")


def test_the_picture_of_the_docs() -> None:
    picture = dt.visualize((10, 6), plan=[S0, S1], mesh={"dp": 4, "tp": 2})
    assert (DOCS / "visualize.svg").read_text() == picture._repr_svg_()


# Tables -------------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """Three layers, uneven over two and four; a buffer, and a tied weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 7), nn.Linear(7, 7))
    model[3].weight = model[2].weight
    return model


PLAN = {"0.*": [R, S0], "2.weight": [R, S1]}


def check_bytes(module: nn.Module, table: Any) -> None:
    """The bytes of a table are those of the pieces that this rank has."""
    me, total = dist.get_rank(), 0
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    rows = {row.name: row for row in table.rows}
    assert tensors.keys() <= rows.keys()
    for name, x in tensors.items():
        row = rows[name]
        mine = dict(zip(row.ranks, row.nbytes, strict=True)).get(me, 0)
        here = not isinstance(x, dt.DistTensor) or x.is_initialized
        assert mine == ((x.to_local() if isinstance(x, dt.DistTensor) else x).nbytes * here), name
        total += mine
    assert table.nbytes[me] == total
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, str(table))
    assert told == [str(table)] * len(told), "\n".join(sorted(set(told)))


@on_ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_table_has_the_bytes_of_the_pieces(stage: int) -> None:
    model = dt.shard_module(network(), grid(), PLAN)
    if stage:
        dt.shard_data_parallel(model, shard_axis="dp", stage=stage, segments=["0", "2"])
    table = dt.visualize(model)
    check_bytes(model, table)
    x = dt.ones(4, 6, mesh=grid(), placements=[S0, R])
    model(x).sum().backward()
    assert str(dt.visualize(model)) == str(table)  # shards, between two forwards
    rows = {row.name: row for row in table.rows}
    assert rows["3.weight"].note == "= 2.weight" and set(rows["3.weight"].nbytes) == {0}
    assert rows["1.running_mean"].note == "buffer"
    note = {0: "", 1: "kept", 2: "kept", 3: "one segment"}[stage]
    assert table.notes == [] if not stage else note in table.notes[0]
    if stage == 1:
        with dt.fsdp.unshard(model):
            pass
        whole = sum(p.spec.with_placements([R, p.placements[1]]).local_box.numel * 4
                    for p in model.parameters()
                    if p.placements[0] != R)  # fmt: skip
        most: list[Any] = [None] * 4
        dist.all_gather_object(most, whole)
        assert f"{max(most)} B on a rank" in table.notes[0]


@on_ranks(4)
def test_a_table_of_two_stages_counts_what_other_ranks_hold() -> None:
    model = network()
    dt.shard_module(model[0], grid()[0], {"weight": [S0]})
    dt.shard_module(model[2], grid()[1], {"weight": [S1]})
    table = dt.visualize(model)
    check_bytes(model, table)
    held = {row.name: (row.ranks, row.nbytes) for row in table.rows}
    assert held["0.weight"] == ((0, 1), (4 * 6 * 4, 3 * 6 * 4))
    assert held["2.weight"] == ((2, 3), (7 * 4 * 4, 7 * 3 * 4))
    assert held["1.weight"] == ((0, 1, 2, 3), (28,) * 4)  # a regular tensor
    assert str(table).endswith("444 B (rank 1) to 484 B (rank 2)")


@on_ranks(4)
def test_a_plan_shows_what_it_will_place() -> None:
    model = network()
    before = {name: x.data_ptr() for name, x in model.state_dict().items()}
    with dt.debugging.record_comms() as log:
        planned = dt.visualize(model, plan=PLAN, mesh=grid())
        on_part = dt.visualize(model, plan={"0.*": [S0]}, mesh=grid()[1])
        by_function = dt.visualize(
            model,
            plan=lambda name, m, mesh: name == "0" and dt.shard_module(m, mesh, {"*": [R, S0]}),
            mesh=grid(),
        )
    assert not len(log) and {n: x.data_ptr() for n, x in model.state_dict().items()} == before
    assert on_part.rows[0].ranks == (2, 3) and on_part.nbytes[0] == 0
    assert by_function.rows[0] == planned.rows[0]
    assert planned.rows == dt.visualize(dt.shard_module(model, grid(), PLAN)).rows
    assert dt.ones(3, mesh=grid()).sum().item() == 3  # the world is as it was


@on_ranks(4)
@pytest.mark.parametrize("degrees", [{"tp": 2, "sharding": 2}, {"pp": 2, "sharding": 2}])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_strategy_shows_what_it_will_place(degrees: dict[str, int], stage: int) -> None:
    strategy = dt.Strategy(**degrees, zero_stage=stage)
    model, options = network(), {"plan": {"0.*": {"tp": S0}}, "layers": ["0", "1", "2", "3"]}
    planned = dt.visualize(model, strategy=strategy, **options)
    assert not any(isinstance(p, dt.DistTensor) for p in model.parameters())
    strategy.apply(model, **options)
    table = dt.visualize(model)
    check_bytes(model, table)
    assert (planned.rows, planned.nbytes, planned.notes) == (table.rows, table.nbytes, table.notes)


def test_a_strategy_of_many_ranks_is_shown_in_one_process() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    table = dt.visualize(model, strategy=dt.Strategy(pp=2, sharding=8, tp=4), world=128)
    assert "pp=2 x dp=2 x sharding=8 x cp=1 x tp=4 on 128 ranks" in table.title
    assert len(str(table).splitlines()) < 12 and "4 x 128.00 KiB" in str(table)
    assert set(table.nbytes.values()) == {4 * (512 // 8 * 512 + 512 // 8) * 4}
    on_cuda = dt.Strategy(tp=2, sharding=3, device_type="cuda")
    assert len(dt.visualize(model, strategy=on_cuda).nbytes) == 6
    assert all(p.is_meta for p in model.parameters()) and not dist.is_initialized()


def test_a_table_in_html_is_well_formed_and_takes_the_colours_of_the_page() -> None:
    html = dt.visualize(network())._repr_html_()
    root = ElementTree.fromstring(f"<div>{html}</div>")
    rows = root.findall(".//tr")
    assert [cell.text for cell in rows[0]][:2] == ["name", "tensor"]
    assert (
        "color:" not in html
        and "background" not in html
        and len(rows) == len(str(dt.visualize(network())).splitlines()) - 2
    )
    lazy = str(dt.visualize(nn.LazyLinear(3)))
    assert "UninitializedParameter" in lazy


WRONG = {
    "give mesh= or strategy= too": lambda m: dt.visualize(m, plan={}),
    "a strategy makes its own mesh": lambda m: dt.visualize(
        m, mesh={"dp": 2}, strategy=dt.Strategy()
    ),
    "world= and layers= belong to strategy=": lambda m: dt.visualize(m, mesh={"dp": 2}, world=2),
    "strategy= describes a module, and x is tuple": lambda m: dt.visualize(
        (3,), strategy=dt.Strategy()
    ),
    "is on no mesh: give mesh= and plan=": lambda m: dt.visualize(torch.ones(3)),
    "matches no parameter, buffer or module": lambda m: dt.visualize(
        m, plan={"wieght": [S0]}, mesh={"dp": 2}
    ),
    "mesh: dp=0: a number of ranks from 1 up": lambda m: dt.visualize((3,), mesh={"dp": 0}),
    "x has a mesh and placements": lambda m: dt.visualize(
        dt.ones(3, mesh=dt.ProcessMesh([0])), plan=[S0]
    ),
    "'0.weight' is placed already, f32": lambda m: dt.visualize(
        dt.shard_module(m, dt.ProcessMesh([0])), plan={}, mesh={"dp": 2}
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_arguments_that_do_not_go_together(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        WRONG[text](network())


@on_ranks(2)
def test_one_rank_alone_may_look() -> None:
    """The other rank does not notice: same losses, same random numbers, same programs."""
    mesh = dt.init_mesh((2,), ("dp",))
    losses: list[list[float]] = []
    other = network()
    for looks in (False, True):
        torch.manual_seed(0)
        model = dt.shard_module(nn.Linear(4, 4), mesh)
        dt.shard_data_parallel(model, mesh, "dp")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses.append([])
        for _ in range(5):
            if looks and dist.get_rank() == 0:
                dt.visualize(model)
                dt.visualize(model.weight)
                dt.visualize(other, plan={"0.*": [S0]}, mesh=mesh)
                dt.visualize(other, strategy=dt.Strategy(tp=4, sharding=2), world=8)
            x = dt.randn(6, 4, mesh=mesh, placements=[S0])
            loss = nn.functional.dropout(model(x), 0.5).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_rank_that_looks_does_not_forget_what_others_sent_once() -> None:
    on_last = dt.ones(3, mesh=dt.ProcessMesh([1], ("dp",)))
    double = dt.local_map(lambda piece: piece * 2, out_placements=[R], out_shapes=(3,))
    for _ in range(2):
        assert double(on_last).dtype == torch.float32  # rank 1 sends this in the first call
        if dist.get_rank() == 0:
            dt.visualize((4,), plan=[S0], mesh={"dp": 4})
