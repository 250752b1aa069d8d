"""Reads and writes parts of safetensors files, the format of Hugging Face.

A file is the length of a header (8 bytes), the header in JSON (name -> dtype, shape, where its
bytes begin and end), and the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from disttensor.comm import objects
from disttensor.core.layout import Box

Tensor = torch.Tensor
BUFFER = 16 * 2**20  # bytes that are read at once where the rows of a piece are not whole

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class Stored(NamedTuple):
    """A tensor in a file; ``begin``: its first byte, counted from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    begin: int

    @property
    def row(self) -> int:
        """Returns the bytes of ``x[0]``; for a 0-d tensor the bytes of the tensor."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def plan_file(path: Path, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Any:
    """Returns (header of the file, its tensors, its size). Wide elements come first, so that
    all are aligned. Raises ValueError for a dtype that the format lacks."""
    begin, header, found = 0, {}, []
    for name, dtype, shape in sorted(tensors, key=lambda t: -t[1].itemsize):
        if dtype not in NAMES:
            raise ValueError(f"{name!r} is {dtype}, which safetensors has no name for")
        one = Stored(name, dtype, tuple(shape), path, begin)
        offsets = [begin, begin + one.nbytes]
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        found.append(one)
        begin += one.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    found = [one._replace(begin=one.begin + len(start)) for one in found]
    return start, found, len(start) + begin


def stored_in(path: Path) -> dict[str, Stored]:
    """Reads name -> tensor of the file at ``path``. Raises ValueError for an invalid file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path}: this is no safetensors file, or the end of it is missing")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(f"{path}: the header is no JSON: {error}") from None
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name!r} is {entry['dtype']}, which torch has no dtype for")
        first, last = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        out[name] = one = Stored(name, dtype, shape, path, 8 + length + first)
        if last - first != one.nbytes or one.begin + one.nbytes > size:
            raise ValueError(f"{path}: {name!r} is not whole: the file was cut off, or changed")
    return out


def _bytes(x: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the CPU."""
    array: Any = x.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def write_rows(file: Any, stored: Stored, first: int, rows: Tensor) -> None:
    """Writes ``rows`` as the rows of the tensor that begin at ``first``."""
    if rows.numel():
        left = _bytes(objects.bytes_of(rows.detach()))
        file.seek(stored.begin + first * stored.row)
        while left:
            left = left[file.write(left) :]


def read_box(stored: Stored, box: Box, out: Tensor) -> None:
    """Fills ``out`` with the elements of ``box``: directly from the file if they are contiguous,
    else by way of a buffer."""
    if not stored.shape:
        stored, box, out = stored._replace(shape=(1,)), Box((0,), (1,)), out.reshape(1)
    if not box.numel:
        return
    count, whole = box.shape[0], box.shape[1:] == stored.shape[1:]
    direct = whole and out.dtype == stored.dtype and out.is_cpu and out.is_contiguous()
    direct = direct and not (out.is_conj() or out.is_neg())
    step = count if direct else max(1, min(count, BUFFER // stored.row))
    buffer = None if direct else torch.empty(step, *stored.shape[1:], dtype=stored.dtype)
    with stored.path.open("rb") as file:
        for at in range(0, count, step):
            rows = out.narrow(0, at, min(step, count - at))
            part = rows if buffer is None else buffer[: len(rows)]
            file.seek(stored.begin + (box.offset[0] + at) * stored.row)
            if file.readinto(_bytes(part)) != part.nbytes:
                raise ValueError(f"{stored.path}: it ends within {stored.name!r}")
            if buffer is not None:
                rows.copy_(part[(slice(None), *box.slices[1:])])
