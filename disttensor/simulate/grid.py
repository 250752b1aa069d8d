"""The places of a mesh, and which ranks are at them."""

from __future__ import annotations

from dataclasses import dataclass

from disttensor.core.mesh import ProcessMesh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """The places of a mesh, without the mesh: it is another one for each rank that is run."""

    ranks: tuple[int, ...]
    shape: Shape

    @classmethod
    def of(cls, mesh: ProcessMesh) -> Grid:
        return cls(mesh.ranks, mesh.shape)

    def places(self) -> dict[int, Shape]:
        out = {}
        for i, rank in enumerate(self.ranks):
            place = []
            for n in reversed(self.shape):
                i, at = divmod(i, n)
                place.append(at)
            out[rank] = tuple(reversed(place))
        return out
