"""Recipe: what a runner does, such that the C code (``dispatch/native.c``) can do the same.

A runner is a Python function, and stays what decides: one that has no recipe is called by the C
code as it is. One that has is carried out there, and called after all where an argument is not as
the recipe takes for granted (a view of a copy, two tokens to join).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from disttensor.core.layout import Axes
from disttensor.core.spec import DistSpec
from disttensor.tensor.dist_tensor import DistTensor

Function = Callable[..., Any]
Runner = Callable[[Sequence[Any], Any], Any]  # of calls of one kind: (args, kwargs or None)
F = TypeVar("F", bound=Function)

NESTED = "nested"  # a list or tuple with DistTensors in it
# of an argument: None where it is no DistTensor, else the axes over which its use varies
Use = Axes | str | None


class Recipe(NamedTuple):
    """Read by position in ``native.c``, by the same names.

    local_fn  runs on the locals; None outside the mesh, where nothing does
    uses      of the arguments, in order; the last of them are keywords, with these ``names``
    outputs   (spec, its dtype, arguments of ``make_subclass``) of the results; several come as a
              tuple or as a list
    itself    the local of the first argument as a result stands for that argument
    views     the results are views of the first argument
    targets   the numbers of the tensors that are written to; None: of none
    after     ``after(args, kwargs, result)`` where the result, a single one, is in a graph
    pending   some argument is; what earlier calls have reduced it to is read in Python
    sources   outside the mesh: the numbers of the arguments whose tokens are joined
    nothing, orphan   outside the mesh: tokens that all results may share
    shared    outside the mesh: of each result the number of the argument that it is a view of
    kind      outside the mesh: tuple or list, where several come; else None
    uncounted   autograd does not count what is written to the targets
    no_graph  only where no graph is made: uses of tensors in lists vary
    answer    the result itself, of a question that the key answers; else None
    passes    outside of two meshes: the tensor goes from one to the other, which counts as a
              transfer on all ranks
    wholes    for each tensor the spec that the call reduces it to, or None where it does not. The
              call is made of what was reduced, and this recipe says nothing else
    """

    local_fn: Function | None
    uses: tuple[Use, ...]
    names: tuple[str, ...]
    outputs: tuple[Any, ...]
    itself: bool = False
    views: bool = False
    targets: tuple[int, ...] | None = None
    after: Function | None = None
    pending: bool = False
    sources: tuple[int, ...] | None = None
    nothing: Any = None
    orphan: Any = None
    shared: tuple[int | None, ...] = ()
    kind: type | None = None
    uncounted: bool = False
    no_graph: bool = False
    answer: Any = None
    passes: bool = False
    wholes: tuple[DistSpec | None, ...] | None = None


def outputs_of(specs: Sequence[DistSpec]) -> tuple[Any, ...]:
    return tuple([(s, s.dtype, (DistTensor, s.meta_tensor)) for s in specs])


def reducing(wholes: Sequence[DistSpec | None]) -> Recipe:
    """The recipe of a call that does pending sums of its arguments before it is made."""
    return Recipe(None, (), (), (), wholes=tuple(wholes))


def with_recipe(run: F, recipe: Recipe | None) -> F:
    """``run``, which does what ``recipe`` says."""
    noted: Any = run
    noted.recipe = recipe
    return run


def recipe_of(run: Any) -> Recipe | None:
    return getattr(run, "recipe", None)
