"""Which nodes a forward made, and when a backward enters and leaves them."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from disttensor import callbacks
from disttensor.autograd import token
from disttensor.autograd.starts import count_of_graphs, node_count
from disttensor.fsdp import graph_hooks
from disttensor.fsdp.graph_hooks import SegmentForward, follow

Tensor = torch.Tensor
MODULE = torch.nn.Identity()


class Told:
    """Segments by name, and in which order a backward plans, enters and leaves them."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.segments: dict[str, SegmentForward] = {}

    def segment(self, name: str) -> SegmentForward:
        def tell(what: str) -> None:
            if what != "plan":
                self.order.append(f"{what} {name}")

        if name not in self.segments:
            self.segments[name] = SegmentForward(
                lambda: tell("plan"), lambda: tell("enter"), lambda: tell("leave")
            )
        return self.segments[name]

    def forward(self, name: str, x: Tensor, inner: str = "") -> Tensor:
        segment = self.segment(name)
        segment.begin(MODULE)
        y = (x * 2).sin()
        if inner:
            y = self.forward(inner, y).cos()
        segment.end(MODULE)
        return y

    def backward(self, *roots: Tensor, **options: object) -> list[str]:
        self.order.clear()
        torch.autograd.backward(roots, [torch.ones_like(r) for r in roots], **options)
        return self.order[:]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(callbacks, "before_start", [lambda n: follow(n, told.segments.values())])
    return told


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def test_a_token_that_all_graphs_share_belongs_to_no_forward(told: Told) -> None:
    """It is made once, in whichever forward needs it first: other backwards must not enter that."""
    segment = told.segment("a")
    segment.begin(MODULE)
    shared = token.no_source_token.__wrapped__(torch.device("cpu"))
    segment.end(MODULE)
    assert told.backward(shared.clone()) == []


def test_segments_are_entered_and_left_in_the_order_of_a_backward(told: Told) -> None:
    x = leaf() * 1
    y = told.forward("b", told.forward("a", x))
    assert told.backward(y.sum()) == ["enter b", "leave b", "enter a", "leave a"]
    assert not graph_hooks._WALKS


def test_a_segment_around_another_is_entered_first_and_left_last(told: Told) -> None:
    y = told.forward("outer", leaf() * 1, inner="inner")
    assert told.backward(y) == ["enter outer", "enter inner", "leave inner", "leave outer"]


def test_a_graph_that_a_forward_made_none_of_enters_nothing(told: Told) -> None:
    told.forward("a", leaf())
    assert told.backward(leaf() * 2) == []


def test_of_several_roots_each_node_is_seen_once(told: Told) -> None:
    x = leaf() * 1
    y = told.forward("a", x)
    z = told.forward("b", y)
    assert told.backward(y, z) == ["enter b", "leave b", "enter a", "leave a"]


def test_only_nodes_that_run_count(told: Told) -> None:
    x, w = leaf() * 1, leaf()
    y = told.forward("a", x)
    z = told.forward("b", y * w)
    assert told.backward(z, inputs=[w], retain_graph=True) == ["enter b", "leave b"]
    assert told.backward(z, inputs=[leaf()], retain_graph=True) == []
    assert told.backward(z) == ["enter b", "leave b", "enter a", "leave a"]


def test_a_backward_that_failed_leaves_no_hook(told: Told) -> None:
    x = leaf() * 1
    y = told.forward("b", told.forward("a", x))

    def fail(grad: Tensor) -> None:
        raise ValueError("once")

    hook = x.register_hook(fail)
    with pytest.raises(ValueError, match="once"):
        told.backward(y, retain_graph=True)
    hook.remove()
    assert told.backward(y) == ["enter b", "leave b", "enter a", "leave a"]


def test_each_paused_micro_batch_may_have_its_own_thread(told: Told) -> None:
    def forward() -> None:
        results.append((node_count(), told.forward("a", leaf() * 1)))

    results: list[tuple[int, Tensor]] = []
    for _ in range(graph_hooks._KEPT + 9):
        thread = Thread(target=forward)
        thread.start()
        thread.join()
    count, y = results[0]
    with count_of_graphs(count):
        assert told.backward(y) == ["enter a", "leave a"]


def test_old_forwards_are_kept_as_one(told: Told) -> None:
    results = [told.forward("a", leaf() * 1) for _ in range(graph_hooks._KEPT + 9)]
    assert len(told.segment("a").numbers[node_count()]) == graph_hooks._KEPT
    for y in (results[0], results[-1]):
        assert told.backward(y) == ["enter a", "leave a"]
