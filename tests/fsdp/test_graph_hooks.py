"""What one forward of a segment counts: what lies inside it is neither entered nor left twice."""

from __future__ import annotations

import torch

from disttensor.fsdp.graph_hooks import SegmentForward

Tensor = torch.Tensor


def started() -> tuple[SegmentForward, list[str]]:
    """A forward, and what its hooks were told."""
    told: list[str] = []
    forward = SegmentForward(
        object(), lambda f: told.append("enter"), lambda f: told.append("leave"), []
    )
    return forward, told


def computed() -> Tensor:
    return torch.ones(2, requires_grad=True) * 1


def test_a_result_that_goes_into_the_next_module_of_the_segment_is_no_input() -> None:
    forward, told = started()
    x = computed()
    forward.add_inputs([x])
    inner = x * 2
    forward.add_outputs([inner], False)
    forward.add_inputs([inner])
    out = inner * 3
    forward.add_outputs([out], False)
    assert forward.inputs == 1 and not forward.is_left
    out.sum().backward()
    assert forward.is_left and told == ["enter", "enter", "leave"]


def test_each_input_is_left_and_each_output_entered_once() -> None:
    forward, told = started()
    x, y = computed(), computed()
    forward.add_inputs([x, y])
    out = x + y
    forward.add_outputs([out, out], False)
    assert forward.inputs == 2
    out.sum().backward()
    assert forward.is_left and told == ["enter", "leave", "leave"]


def test_attributes_that_a_forward_of_the_segment_made_before_are_not_outputs_again() -> None:
    first, told = started()
    state = computed()
    first.add_outputs([state], False)
    again = SegmentForward(
        first.segment, lambda f: told.append("again"), lambda f: None, first.siblings
    )
    again.add_attributes([state], False)
    other = SegmentForward(object(), lambda f: told.append("other"), lambda f: None, [])
    other.add_attributes([state, torch.ones(2)], False)
    state.sum().backward()
    assert told == ["enter", "other"] and other.entered and not again.entered
