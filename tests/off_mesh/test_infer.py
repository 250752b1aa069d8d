"""What a call gives is the same from tensors on torch's ``meta`` device as from fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from disttensor.pytree import substitute
from disttensor.torch_private import TorchDispatchMode
from ops import answer as infer

X, W, V = torch.randn(4, 6), torch.randn(6, 6), torch.randn(6)
IDS, MASK = torch.tensor([1, 0, 3]), torch.tensor([True, False, True, True])
HEADS = torch.randn(2, 3, 5, 4)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "add": (torch.add, (X, V), {"alpha": 2}),
    "promotion": (torch.mul, (X, IDS[:, None, None]), {}),
    "linear": (F.linear, (X, W, V), {}),
    "layer_norm": (F.layer_norm, (X, (6,), V, V), {}),
    "attention": (F.scaled_dot_product_attention, (HEADS,) * 3, {"dropout_p": 0.5}),
    "dropout": (F.dropout, (X, 0.5), {}),
    "bernoulli": (torch.bernoulli, (X.sigmoid(),), {}),
    "embedding": (F.embedding, (IDS, X), {}),
    "cross_entropy": (F.cross_entropy, (X, torch.tensor([1, 0, 3, 2])), {}),
    "view": (Tensor.view, (X, 24), {}),
    "view of one row": (Tensor.__getitem__, (X, 1), {}),
    "itself": (Tensor.contiguous, (X,), {}),
    "chunk": (torch.chunk, (X, 3, 1), {}),
    "max": (torch.max, (X, 1), {}),
    "list": (torch.cat, ([X, W],), {}),
    "in place": (Tensor.add_, (X, V), {}),
    "dtype": (Tensor.to, (X, torch.float64), {}),
    "no gradient": (torch.argmax, (X,), {}),
    "nothing": (Tensor.requires_grad_, (X,), {}),
}
BY_FAKES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "several draws, of tensors that it makes": (torch.nn.init.sparse_, (X.clone(), 0.5)),
    "device": (Tensor.to, (X, torch.device("cpu"))),
    "name of a device": (Tensor.to, (X, "cpu")),
    "by a mask": (Tensor.__getitem__, (X, MASK)),
    "of a dynamic name": (torch.nonzero, (X,)),
    "not torch's": (lambda x: x + 1, (X,)),
}


def find(func: Callable[..., Any], args: Any, kwargs: Any) -> infer.CallMetadata:
    """The answer, without the answers that are kept."""
    return infer._find(func, *substitute((args, kwargs), infer.bare))


class Seen(TorchDispatchMode):
    """A mode of somebody else's, as of one who counts kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_tensors_without_a_device_say_what_fakes_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    func, args, kwargs = CALLS[name]
    modes: list[bool] = []
    run = infer._run

    def noted(*args: Any, on_meta: bool = False) -> Any:
        modes.append(on_meta)
        return run(*args, on_meta=on_meta)

    monkeypatch.setattr(infer, "_run", noted)
    with Seen() as seen:
        found = find(func, args, kwargs)
    assert modes == [True] + [False] * found.draws and (found.draws or not seen.calls)
    monkeypatch.setattr(infer, "_on_meta", lambda *_: False)
    assert find(func, args, kwargs) == found
    assert found.draws is (name in ("attention", "dropout", "bernoulli"))


@pytest.mark.parametrize("name", BY_FAKES)
def test_what_depends_on_device_or_data_is_left_to_fakes(name: str) -> None:
    func, args = BY_FAKES[name]
    tensors = [t for t in args if isinstance(t, Tensor)]
    assert not infer._on_meta(func, args, {}, tensors)


def test_autocast_is_that_of_the_device() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert find(F.linear, (X, W), {}).outs[0].dtype == torch.bfloat16
    assert find(F.linear, (X, W), {}).outs[0].dtype == torch.float32


def test_an_answer_about_the_device_is_that_of_the_device() -> None:
    assert find(Tensor.get_device, (X,), {}).result == X.get_device()
    assert find(torch.is_complex, (X,), {}).result is False
