"""The memory of a DistTensor as seen by code below torch's functions: an identity on every rank,
and data only if this rank's local is the whole tensor.

A writer of files multiplies the global shape by the size of an element and reads as many bytes from
``data_ptr()``: past the end of a piece. A search for tied weights only compares addresses.
"""

from __future__ import annotations

from functools import total_ordering
from typing import Any, NoReturn

from disttensor.core.spec import DistSpec
from disttensor.tensor.base import MeshTensor
from disttensor.torch_private import STORAGE_ID, storage_id


def is_whole(x: MeshTensor) -> bool:
    """Returns True if the local has the elements of the global tensor, with nothing pending."""
    spec = x.spec
    pending = any(spec.mesh.shape[axis] > 1 for axis in spec.layout.partial_axes)
    return (
        x.is_initialized and spec.local_shape == spec.shape and not (pending or spec.layout.custom)
    )


def refusal(spec: DistSpec) -> str:
    return (
        f"the memory of {spec!r} is read as if it were one tensor, but this rank holds "
        f"{list(spec.local_shape)} of it. To save a model: dt.pretrained.save(model, folder), or "
        "torch.distributed.checkpoint.save. Else give x.full_tensor(), a regular tensor (a "
        "collective: every rank calls it), or x.to_local(), where this rank's piece is meant"
    )


@total_ordering
class Address:
    """Stands for the address of a piece: compares, hashes and adds like the number, but cannot be
    used to read memory."""

    __slots__ = ("number", "spec")

    def __init__(self, number: int, spec: DistSpec) -> None:
        self.number, self.spec = number, spec

    def __eq__(self, other: object) -> bool:
        return self.number == (other.number if isinstance(other, Address) else other)

    def __lt__(self, other: Any) -> bool:
        """Orders an Address before every number: a number is an address in other memory (for
        example of ``x[-1]`` of a split x), which cannot be the end of a piece."""
        return not isinstance(other, Address) or self.number < other.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __bool__(self) -> bool:
        return True

    def __add__(self, offset: int) -> Address:
        return Address(self.number + offset, self.spec)

    def __mod__(self, alignment: int) -> int:
        return self.number % alignment

    def __repr__(self) -> str:
        return f"Address({self.number:#x} of a piece of {self.spec!r})"

    def _refuse(self) -> NoReturn:
        raise RuntimeError(refusal(self.spec))

    __int__ = __index__ = _refuse
    _as_parameter_ = property(_refuse)  # read by ctypes


class PieceStorage:
    """Stands for the storage of a piece: has its identity, and the size of the global tensor."""

    def __init__(self, x: MeshTensor) -> None:
        self._local, self._spec = x.local.untyped_storage(), x.spec
        self.device, self._number = x.local.device, storage_id(self._local)

    def data_ptr(self) -> Address:
        return Address(self._local.data_ptr() or self._number, self._spec)

    def nbytes(self) -> int:
        return self._spec.nbytes

    size = __len__ = nbytes

    def __eq__(self, other: object) -> bool:
        return self._number == getattr(other, STORAGE_ID, None)

    def __hash__(self) -> int:
        return hash(self._number)

    def __getattr__(self, name: str) -> Any:
        if name == STORAGE_ID:
            return self._number
        raise AttributeError(f"storage.{name}: {refusal(self._spec)}")

    def _refuse(self, *args: Any) -> NoReturn:
        raise RuntimeError(refusal(self._spec))

    __getitem__ = __iter__ = __bytes__ = __reduce_ex__ = _refuse


def data_ptr(x: MeshTensor) -> Any:
    """Returns the address of the whole tensor, or an ``Address`` of a piece for comparisons."""
    local = x.local
    number = local.data_ptr()
    return number if is_whole(x) else Address(number or storage_id(local.untyped_storage()), x.spec)


def storage(x: Any, name: str) -> Any:
    """Returns the storage (``name``: ``untyped_storage`` or its like), or a ``PieceStorage``."""
    local = x.local
    if is_whole(x) and not local.storage_offset() and local.stride() == x.stride():
        return getattr(local, name)()
    return PieceStorage(x)
