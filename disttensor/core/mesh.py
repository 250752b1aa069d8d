"""ProcessMesh: an n-d array of ranks with named axes, immutable and interned."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from disttensor.checks import argument_error, check_sequence, check_type
from disttensor.comm.groups import Group, new_group, process_group
from disttensor.comm.process_group import backends, world
from disttensor.core.layout import members
from disttensor.runtime import current_runtime
from disttensor.torch_private import default_group, root_of

_CPU = torch.device("cpu")


class MeshSize(int):
    """The size of a mesh: an int that is callable like ``DeviceMesh.size`` of torch."""

    mesh: ProcessMesh

    def __new__(cls, value: int, mesh: ProcessMesh) -> MeshSize:
        self = super().__new__(cls, value)
        self.mesh = mesh
        return self

    def __call__(self, mesh_dim: str | int | None = None) -> int:
        return int(self) if mesh_dim is None else self.mesh.shape[self.mesh.axis(mesh_dim)]

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class ProcessMesh:
    """``ProcessMesh([[0, 1], [2, 3]], ("dp", "tp"))``: global ranks on named axes.

    Equal meshes are one object, so ``is`` is equality. ``coordinate`` is this rank's place, or None
    off the mesh. Process groups are made when first needed, by the ranks that are in them. Raises
    ValueError for a rank that occurs twice or is not in the world, and for names that do not fit.

    A sub-mesh, ``mesh["tp"]``, has other ranks on each rank. Its ``root`` is the mesh that it was
    taken from. A tensor on it is one global tensor, which every such group of ranks holds: it
    counts as replicated on the other axes of the root.

    >>> small = dt.ProcessMesh([[0]], ("dp", "tp"))
    >>> small, small["tp"], small["tp"].root is small, small.coordinate
    (ProcessMesh(dp=1, tp=1), ProcessMesh(dp=1, tp=1)['tp'], True, (0, 0))
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dim_names: tuple[str, ...]
    device_type: str
    coordinate: tuple[int, ...] | None
    specs: weakref.WeakValueDictionary[Any, Any]  # specs of tensors on it
    root_axes: tuple[int, ...]  # the axis of ``root`` for each axis
    _root: ProcessMesh | None  # None: the mesh itself
    _groups: dict[tuple[Any, ...], Group]  # by axes, or by (axes, purpose)

    def __new__(
        cls, mesh: Any, dim_names: Sequence[str] | None = None, device_type: str | None = None
    ) -> ProcessMesh:
        array = _array(mesh.cpu() if isinstance(mesh, torch.Tensor) else mesh)
        names = axis_names("ProcessMesh", dim_names, array.ndim)
        check_device_type("ProcessMesh", device_type)
        ranks = tuple(int(r) for r in array.reshape(-1))
        size = world()[1]
        if array.size == 0:
            raise ValueError(
                f"ProcessMesh: mesh of shape {array.shape} holds no rank; every axis needs a size "
                "of at least 1"
            )
        if len(set(ranks)) != len(ranks):
            twice = min(r for r in ranks if ranks.count(r) > 1)
            raise ValueError(
                f"ProcessMesh: rank {twice} occurs twice; a rank has one place in a mesh"
            )
        outside = sorted(r for r in ranks if not 0 <= r < size)
        if outside:
            started = default_group() is not None
            hint = "" if started else ", or call init_mesh first, which starts the process group"
            raise ValueError(
                f"ProcessMesh: mesh: ranks {outside} are outside the world, which has ranks 0 to "
                f"{size - 1}: these are ranks of processes, not numbers of devices. Start more "
                f"processes (torchrun --nproc-per-node){hint}"
            )
        return _interned(array, names, device_type or _default_device_type())

    @property
    def root(self) -> ProcessMesh:
        """The mesh that a sub-mesh was taken from; for any other mesh, itself."""
        return self._root or self

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> MeshSize:
        """The number of ranks. ``mesh.size()`` and ``mesh.size(axis)`` work as on a DeviceMesh."""
        return MeshSize(len(self.ranks), self)

    @property
    def mesh(self) -> np.ndarray[Any, Any]:
        """The ranks as an array of ``shape``."""
        return np.array(self.ranks).reshape(self.shape)

    @property
    def process_ids(self) -> list[int]:
        return list(self.ranks)

    @property
    def device(self) -> torch.device:
        """The device of this rank's locals."""
        if self.device_type == "cpu":
            return _CPU
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    def axis(self, name: str | int) -> int:
        """Returns the number of a mesh axis given by name or number. Raises ValueError if there is
        no such axis."""
        if isinstance(name, str) and name in self.dim_names:
            return self.dim_names.index(name)
        if type(name) is not bool and isinstance(name, int) and -self.ndim <= name < self.ndim:
            return name % self.ndim
        raise ValueError(f"{self!r} has no axis {name!r}; its axes are {', '.join(self.dim_names)}")

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Returns the place of a global rank, or None if it is off the mesh."""
        if rank not in self.ranks:
            return None
        return tuple(int(i) for i in np.unravel_index(self.ranks.index(rank), self.shape))

    def coordinates(self) -> list[tuple[int, ...]]:
        """Returns all coordinates, row-major: in the order of ``ranks``."""
        return list(itertools.product(*map(range, self.shape)))

    def members(self, axes: Sequence[int], coordinate: tuple[int, ...]) -> list[tuple[int, ...]]:
        return members(self.shape, axes, coordinate)

    def _ranks_over(self, axes: Sequence[int], problem: str) -> tuple[int, ...]:
        """Returns the ranks that differ from this one on ``axes`` only."""
        if self.coordinate is None:
            raise ValueError(f"rank {world()[0]} is not in {self!r}{problem}")
        array = self.mesh
        return tuple(int(array[c]) for c in self.members(axes, self.coordinate))

    def group(self, axes: Sequence[int], purpose: str = "") -> Group:
        """Returns this rank's communicator over ``axes`` together (major first), a separate one for
        each ``purpose``."""
        axes = tuple(axes)
        key = (axes, purpose) if purpose else axes
        group = self._groups.get(key)
        if group is None:
            ranks = self._ranks_over(axes, " and cannot communicate over it")
            names = [self.dim_names[a] for a in axes]
            group = self._groups[key] = new_group(ranks, names, purpose)
        return group

    def __getitem__(self, index: Any) -> ProcessMesh:
        """Returns a part of the mesh. ``mesh["tp"]``, ``mesh["dp", "tp"]``: the sub-mesh of these
        axes through this rank; ``mesh[0]``, ``mesh[:, 1]``: as in numpy, the same on all ranks."""
        names = (index,) if isinstance(index, str) else index
        if isinstance(names, tuple) and names and all(isinstance(n, str) for n in names):
            axes = [self.axis(n) for n in names]
            problem = f", so mesh[{index!r}] has no meaning here; index by number"
            ranks = np.array(self._ranks_over(axes, problem)).reshape([self.shape[a] for a in axes])
            root, of_root = self.root, tuple(self.root_axes[a] for a in axes)
            if len(of_root) == root.ndim:  # the same on all ranks
                return ProcessMesh(ranks, names, self.device_type)
            names = axis_names("ProcessMesh", names, ranks.ndim)
            return _interned(ranks, names, self.device_type, root, of_root)
        if self.size < self.root.size:
            raise IndexError(
                f"index {index!r} of {self!r}: a part of a sub-mesh would be another mesh on each "
                f"rank. Index the whole by number: mesh[...] of {self.root!r}"
            )
        try:
            picked = self.mesh[index]
        except IndexError as error:
            raise IndexError(f"index {index!r} of {self!r}: {error}; or names of axes") from None
        if picked.ndim > self.ndim:
            raise IndexError(f"index {index!r} of {self!r}: a mesh gets no new axes")
        full = index if isinstance(index, tuple) else (index,)
        if Ellipsis in full:
            at = full.index(Ellipsis)
            full = (*full[:at], *[slice(None)] * (self.ndim - len(full) + 1), *full[at + 1 :])
        kept: Any = [
            n
            for n, i in itertools.zip_longest(self.dim_names, full, fillvalue=slice(None))
            if not isinstance(i, (int, np.integer))
        ]
        return ProcessMesh(picked, kept if picked.ndim else ("d0",), self.device_type)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> ProcessMesh:
        """Returns the ProcessMesh of torch's DeviceMesh, with the same process groups."""
        check_type("ProcessMesh.from_device_mesh: mesh", mesh, DeviceMesh, "a DeviceMesh")
        names = mesh.mesh_dim_names or tuple(f"d{i}" for i in range(mesh.ndim))
        whole = root_of(mesh)
        if whole is mesh:
            self = cls(mesh.mesh, names, mesh.device_type)
        else:
            root = cls.from_device_mesh(whole)
            self = root._part(_array(mesh.mesh.cpu()), names)
        if self.coordinate is not None:
            for a in range(self.ndim):
                ranks = self._ranks_over((a,), "")
                if len(ranks) > 1 and (a,) not in self._groups:
                    self._groups[(a,)] = Group(
                        ranks, self.coordinate[a], (names[a],), mesh.get_group(a)
                    )
            if not hasattr(self, "_device_mesh"):
                self._share(mesh)
        return self

    def to_device_mesh(self) -> DeviceMesh:
        """Returns torch's DeviceMesh of this mesh, with the same process groups (missing groups are
        made now)."""
        if not hasattr(self, "_device_mesh"):
            me = self._ranks_over((), " and has no DeviceMesh of it")
            if default_group() is None:
                raise ValueError(
                    "to_device_mesh: there is no process group yet; call init_mesh first, which "
                    "starts it"
                )
            groups = [
                self.group((a,)).pg or process_group(me, (name,))
                for a, name in enumerate(self.dim_names)
            ]
            ranks = torch.from_numpy(self.mesh)
            self._share(
                DeviceMesh.from_group(
                    groups, self.device_type, ranks, mesh_dim_names=self.dim_names
                )
                if self._root is None
                else self._root.to_device_mesh()[self.dim_names]
            )
        return self._device_mesh

    def _share(self, mesh: DeviceMesh) -> None:
        """Stores the DeviceMesh of this mesh. The runtime keeps it alive: groups are torch's."""
        self._device_mesh = mesh
        current_runtime().shared.append(self)

    # The names of torch's DeviceMesh --------------------------------------------------------------

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self.dim_names

    def get_coordinate(self) -> list[int] | None:
        """Returns this rank's place, or None off the mesh."""
        return None if self.coordinate is None else list(self.coordinate)

    def get_rank(self) -> int:
        return world()[0]

    def get_local_rank(self, mesh_dim: str | int | None = None) -> int:
        """Returns this rank's place on an axis, which a mesh of one axis need not name. Raises
        ValueError off the mesh."""
        axis = self._one_axis("get_local_rank", mesh_dim)
        self._ranks_over((axis,), " and has no place on it")
        return self.coordinate[axis]  # type: ignore[index]

    def get_group(self, mesh_dim: str | int | None = None) -> dist.ProcessGroup:
        """Returns the process group of an axis, which a mesh of one axis need not name."""
        return self.to_device_mesh().get_group(self._one_axis("get_group", mesh_dim))

    def _one_axis(self, who: str, mesh_dim: str | int | None) -> int:
        if mesh_dim is None and self.ndim > 1:
            raise ValueError(
                f"{who}: {self!r} has {self.ndim} axes; name one: mesh.{who}({self.dim_names[0]!r})"
            )
        return self.axis(0 if mesh_dim is None else mesh_dim)

    def _flatten(self, mesh_dim_name: str | None = None) -> ProcessMesh:
        """Returns the mesh of the same ranks with one axis."""
        name = mesh_dim_name or "_".join(self.dim_names)
        return self.root._part(self.mesh.reshape(-1), (name,))

    def _unflatten(
        self, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> ProcessMesh:
        """Returns the mesh of the same ranks with the axes ``mesh_dim_names`` in place of one.
        Raises ValueError if ``mesh_sizes`` do not multiply to its size."""
        axis, who = self.axis(dim), "_unflatten"
        sizes = check_sequence(f"{who}: mesh_sizes", mesh_sizes, "sizes of axes")
        new = axis_names(f"{who}: mesh_dim_names", mesh_dim_names, len(sizes))
        if math.prod(sizes) != self.shape[axis]:
            raise ValueError(
                f"{who}: mesh_sizes={list(sizes)} of axis {self.dim_names[axis]!r}: their product "
                f"has to be {self.shape[axis]}"
            )
        shape = (*self.shape[:axis], *sizes, *self.shape[axis + 1 :])
        names = (*self.dim_names[:axis], *new, *self.dim_names[axis + 1 :])
        return self.root._part(self.mesh.reshape(shape), names)

    def _part(self, ranks: np.ndarray[Any, Any], names: tuple[str, ...]) -> ProcessMesh:
        """Returns the mesh of ``ranks``, a part of this mesh that is cut alike on every rank. The
        parts of all ranks together are its root, so that ranks agree about the others."""
        if ranks.size == self.size:
            return ProcessMesh(ranks, names, self.device_type)
        if set(names) <= set(self.dim_names):
            part = self[names]
            if np.array_equal(part.mesh, ranks):
                return part
        place = {rank: i for i, rank in enumerate(self.ranks)}
        at = np.array([place[int(rank)] for rank in ranks.reshape(-1)])
        offsets, covered, parts = at - at[0], set[int](), []
        for first in range(self.size):
            if first not in covered:
                parts.append(first + offsets)
                covered.update(int(i) for i in parts[-1])
        every = np.concatenate(parts)
        if covered != set(range(self.size)) or len(every) != self.size:
            raise ValueError(
                f"ProcessMesh: ranks {ranks.tolist()} are no part of {self!r} that is cut alike on "
                "every rank; take parts by names of axes, _flatten and _unflatten"
            )
        others = "_".join(["others", *names])
        root = np.array(self.ranks)[every].reshape(len(parts), *ranks.shape)
        return ProcessMesh(root, (others, *names), self.device_type)[names]

    def __repr__(self) -> str:
        if self._root is not None:
            return f"{self._root!r}[{', '.join(map(repr, self.dim_names))}]"
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.dim_names, self.shape, strict=True))
        plain = self.ranks == tuple(range(self.size))
        return f"ProcessMesh({axes}{'' if plain else f', ranks={self.mesh.tolist()}'})"

    def __copy__(self) -> ProcessMesh:
        return self

    def __deepcopy__(self, memo: object) -> ProcessMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.mesh, self.dim_names, self.device_type
        return (ProcessMesh, made) if self._root is None else (sub_mesh, (*made, self._root))


def _interned(
    array: np.ndarray[Any, Any],
    names: tuple[str, ...],
    device_type: str,
    root: ProcessMesh | None = None,
    root_axes: tuple[int, ...] = (),
) -> ProcessMesh:
    """Returns the one mesh of these ranks, a sub-mesh of ``root`` if given."""
    meshes = current_runtime().meshes
    ranks = tuple(int(r) for r in array.reshape(-1))
    key = (array.shape, ranks, names, device_type, root and (root, root_axes))
    known: ProcessMesh | None = meshes.get(key)
    if known is not None:
        return known
    self = object.__new__(ProcessMesh)
    self.ranks, self.shape, self.dim_names = ranks, tuple(array.shape), names
    self.device_type = device_type
    where = np.argwhere(array == world()[0])
    self.coordinate = tuple(int(i) for i in where[0]) if len(where) else None
    self._root, self.root_axes = root, root_axes or tuple(range(array.ndim))
    self.specs, self._groups = weakref.WeakValueDictionary(), {}
    meshes[key] = self
    return self


def sub_mesh(ranks: Any, names: Sequence[str], kind: str, root: ProcessMesh) -> ProcessMesh:
    """Returns a sub-mesh from its pickle: the sub-mesh of the rank that wrote it."""
    axes = tuple(root.axis(name) for name in names)
    return _interned(np.asarray(ranks), tuple(names), kind, root, axes)


def _array(ranks: Any) -> np.ndarray[Any, Any]:
    """Returns the ranks as an array; a single one is a mesh of one. Raises TypeError for others."""
    expected = "an array of ranks, which are whole numbers,"
    try:
        array = np.asarray(ranks)
    except ValueError:  # of different lengths
        raise argument_error("ProcessMesh: mesh", ranks, expected) from None
    if array.size and array.dtype.kind not in "iu":
        raise argument_error("ProcessMesh: mesh", ranks, expected)
    return np.atleast_1d(array).astype(np.int64)


def axis_names(who: str, names: Any, ndim: int) -> tuple[str, ...]:
    """Returns the names of ``ndim`` axes, after checks."""
    if names is None:
        return tuple(f"d{i}" for i in range(ndim))
    expected = f"a sequence of {ndim} different names"
    names = check_sequence(f"{who}: dim_names", names, expected)
    if not all(isinstance(name, str) for name in names):
        raise argument_error(f"{who}: dim_names", names, expected)
    if len(names) != ndim or len(set(names)) != ndim:
        raise ValueError(f"{who}: dim_names: {ndim} axes need as many different names, got {names}")
    return names


def check_device_type(who: str, device_type: Any) -> None:
    expected = 'a type of device that torch has, as "cpu" or "cuda",'
    check_type(f"{who}: device_type", device_type, (str, type(None)), expected)
    try:
        known = device_type is None or torch.device(device_type).type == device_type
    except RuntimeError:
        known = False
    if not known:
        raise argument_error(f"{who}: device_type", device_type, expected, ValueError)


def as_mesh(who: str, value: Any) -> ProcessMesh:
    """Returns a ProcessMesh, or the one of a DeviceMesh. Raises TypeError for anything else."""
    if isinstance(value, DeviceMesh):
        return ProcessMesh.from_device_mesh(value)
    check_type(who, value, ProcessMesh, "a ProcessMesh (of dt.init_mesh), or torch's DeviceMesh")
    return value


def _default_device_type() -> str:
    if default_group() is not None and "nccl" in backends() and torch.cuda.is_available():
        return "cuda"
    return "cpu"
