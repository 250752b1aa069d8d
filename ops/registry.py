"""The table of rules: torch function -> Rule. Users register rules by the same call as this
package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from disttensor.cache import clear_decisions
from disttensor.core.layout import Layout
from ops.factors import Arg, Factors, LocalMaker, letters

Function = Callable[..., Any]
Setting = Callable[[], Any]


@dataclass(frozen=True, eq=False, slots=True)
class Rule:
    """``factors(*args, **kwargs)`` receives the arguments of the call with an ``Arg`` for each
    tensor, and returns its Factors.

    Args:
        inplace: the function writes its first argument, which keeps its placement
        integers: the values of integers change the rule (a dim), or the metadata of results; else
            only their type (an operand)
        sizes: "letters": the rule depends only on which sizes are 1, and has a letter for each dim
            of another size. "value": the rule may depend on all sizes
        floats: the values of floats change the rule (the order of a norm); else only their type
        setting: a function of the layouts of the tensors. It returns a function that reads a
            setting of the user around the call whose value changes the rule, or None if there is
            none
    """

    name: str
    factors: Callable[..., Factors]
    inplace: bool = False
    integers: bool = True
    floats: bool = False
    pattern: str = ""
    setting: Callable[[Sequence[Layout]], Setting | None] | None = None
    sizes: str = "value"


RULES: dict[Function, Rule] = {}


def functions_named(name: str, places: Sequence[Any]) -> Iterator[tuple[Function, bool]]:
    """Yields the functions of this name in the places (for an operator: the method) and their
    in-place forms, each as (function, writes its first argument)."""
    operator = name.endswith("__")
    for place in [torch.Tensor] if operator else places:
        for other in (name,) if operator else (name, name + "_"):
            found = getattr(place, other, None)
            if callable(found):
                yield found, _writes(other)


def _writes(name: str) -> bool:
    if name.endswith("__"):
        return name.startswith(("__i", "__setitem")) and name != "__invert__"
    return name.endswith("_")


def variants(func: Function) -> Iterator[tuple[Function, bool]]:
    """Yields the function and its other forms (the method, the in-place forms), each as (function,
    writes its first argument)."""
    name = getattr(func, "__name__", "")
    yield func, _writes(name)
    places: list[Any] = [torch.Tensor]
    for place in (torch, torch.nn.functional, torch.special, torch.linalg):
        if getattr(place, name, None) is func:
            places.append(place)
    yield from (pair for pair in functions_named(name, places) if pair[0] is not func)


def register(rule: Rule, *funcs: Function, exact: bool = False) -> None:
    """Registers ``rule`` for the functions and (unless ``exact``) their other forms. A second rule
    for one of the functions raises ValueError; other forms that have a rule keep it."""
    for func in funcs:
        names = [*variants(func)]
        for found, inplace in names[:1] if exact else names:
            if found in RULES:
                if found is func:
                    raise ValueError(
                        f"{rule.name}: {func!r} has a rule already ({RULES[func].name}); see "
                        "replace_rule"
                    )
                continue
            RULES[found] = replace(rule, inplace=inplace or (found is func and rule.inplace))
    clear_decisions()


def rule(
    *funcs: Any,
    local: LocalMaker | None = None,
    exact: bool = False,
    integers: bool = True,
    floats: bool = False,
    setting: Callable[[Sequence[Layout]], Setting | None] | None = None,
    sizes: str = "value",
    doc: str = "",
    **options: Any,
) -> Any:
    """Registers a rule. Two forms:

    ``rule(torch.mm, "m k, k n -> m n", reduced={"k": "sum"}, linear_terms=({0, 1},))``
    ``@rule(torch.softmax)`` over a function with torch's signature that gets an ``Arg`` for each
    tensor and returns Factors: for everything that depends on dims, sizes or constants. ``doc``, or
    the first line of its docstring, describes the rule in docs/operators.md.

    ``local`` runs in place of the torch function (see ``Factors.local``).
    Raises ValueError if a function already has a rule.
    """
    if funcs and isinstance(funcs[-1], str):
        *functions, pattern = funcs
        terms = options.get("linear_terms", ())
        options["linear_terms"] = tuple(frozenset(t) for t in terms)

        def factors(*args: Any, **kwargs: Any) -> Factors:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Arg)]
            return letters(pattern, *tensors, local=local, **options)

        name = functions[0].__name__
        entry = Rule(name, factors, False, integers, floats, pattern, setting, "letters")
        register(entry, *functions, exact=exact)
        return None

    def decorate(make: Callable[..., Factors]) -> Callable[..., Factors]:
        words = doc or (make.__doc__ or "").split("\n")[0]
        name = funcs[0].__name__ if doc else make.__name__
        entry = Rule(name, make, False, integers, floats, words, setting, sizes)
        register(entry, *funcs, exact=exact)
        return make

    return decorate


def replace_rule(func: Function, new: Rule) -> Rule | None:
    """Replaces the rule of ``func`` by ``new``, and returns the old rule."""
    old = RULES.get(func)
    RULES[func] = new
    clear_decisions()
    return old
