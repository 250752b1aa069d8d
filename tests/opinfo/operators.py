"""Writes docs/operators.md: for each torch function its rule, in words and as factors, and what it
gathers.

    python -m tests.opinfo.operators                  prints the page
    python -m tests.opinfo.operators docs/operators.md

The factors are those of a sample of PyTorch's own op_db: of all that are tried, the call with the
most dims. Functions that no sample calls have a rule in words only. Nothing is communicated: one
rank of two, the other is not there.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import disttensor as dt
from disttensor import errors
from disttensor.dispatch import fallback, resolve, strict
from ops.factors import Factors
from ops.notation import notation
from ops.registry import RULES, Function, Rule
from tests.opinfo import kept
from tests.opinfo.opinfo_call import replace, sample_inputs
from tests.opinfo.opinfo_check import OPS, common_methods_invocations, unseeded
from tests.support import oracle

SAMPLES = 8  # of each OpInfo
HEAD = """# Operators

Written by `make operators`, with the torch of constraints.txt; a test compares this page with the
rules. [rules.md](rules.md) shows how to write a rule, and `dt.debugging.explain(func, *args)`
prints the plan of one call.

Each dim of each tensor has a letter. A mesh axis may split any letter that is in the inputs *and*
the results: these dims **keep** their shards, and no data moves. `k: sum` is a letter that the
result lacks: if it is split, the result is a pending sum (or max, ...); "within the call" means
that the call itself reduces it. Letters after `whole`, and dims shown as `_`, cannot be split: a
split dim is **exchanged** for another dim that may be split, or gathered. `even` letters stay split
if the axis divides them. `halo` letters are dims over which a window slides: a rank fetches the
elements that its windows need from other ranks, if this and the returned gradients take no more
bytes than a gather or an exchange. `(a b)` is a dim that merges two.
"""


class Watch:
    """The factors of every call with a rule, and why the others have none."""

    def __init__(self) -> None:
        self.factors: dict[Any, list[tuple[Function, Factors]]] = defaultdict(
            list
        )  # by what makes them
        self.reasons: dict[str, str] = {}
        self.bodies: set[str] = set()
        self.real = resolve.decide
        self.body_of = fallback.body_of

    def decide(self, func: Function, *rest: Any) -> Any:
        factors, decision = self.real(func, *rest)
        self.factors[RULES[func].factors].append((func, factors))
        return factors, decision

    def fall(self, func: Function) -> Any:
        body = self.body_of(func)
        if body is not None:
            self.bodies.add(errors.name_of(func))
        return body


def observed() -> Watch:
    """Samples of every OpInfo, called on DistTensors."""
    watch, mesh = Watch(), kept.world()
    note = lambda func, specs, why: watch.reasons.setdefault(errors.name_of(func), why)  # noqa: E731
    with (
        mock.patch.object(resolve, "decide", watch.decide),
        mock.patch.object(fallback, "body_of", watch.fall),
        mock.patch.object(strict, "fallback", note),
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for op in OPS.values():
            for given in samples(op):
                placed = [
                    dt.shard_tensor(t, mesh, [dt.Replicate()]) for t in oracle.tensors_in(given)
                ]
                try:
                    args, kwargs = replace(given, iter(placed))
                    op.op(*args, **kwargs)
                except Exception:
                    continue
    return watch


def samples(op: Any) -> Iterator[Any]:
    if torch.float32 not in op.supported_dtypes("cpu"):
        return
    for sample in sample_inputs(op, torch.float32, SAMPLES, 200, False):
        given = ((sample.input, *sample.args), dict(sample.kwargs))
        tensors = oracle.tensors_in(given)
        if tensors and all(t.layout is torch.strided for t in tensors):
            yield given


def shown(rule: Rule, watch: Watch) -> dict[str, str]:
    """name of each function of the rule -> its factors in the call with the most dims."""
    best: dict[str, tuple[int, str]] = {}
    for func, factors in watch.factors[rule.factors]:
        text = notation(factors)
        tensors = (*factors.inputs, *factors.outputs)
        dims = len({d for t in tensors for d in t} - {None}) if len(tensors) < 6 else 0
        best[plain(func)] = max(best.get(plain(func), (-1, "")), (dims, text))
    return {name: text for name, (_, text) in best.items()}


def plain(func: Function) -> str:
    """The name of a function, of its method and of its form in place alike."""
    name = errors.name_of(func)
    return (
        name.removeprefix("torch.Tensor.")
        .removeprefix("torch.nn.functional.")
        .removeprefix("torch.")
        .strip("_")
    )


def family(rule: Rule) -> str:
    return rule.factors.__module__.removeprefix("ops.")


def page(watch: Watch) -> str:
    functions: dict[Any, tuple[Rule, dict[str, str]]] = {}
    for func, rule in RULES.items():
        name = errors.name_of(func)
        if name.startswith("torch") and "__" not in name and not name.endswith("_"):
            _, names = functions.setdefault(rule.factors, (rule, {}))
            names.setdefault(plain(func), name)
    families: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for rule, names in functions.values():
        examples = shown(rule, watch)
        for short, name in names.items():
            words = rule.pattern.replace("|", "or")
            families[family(rule)][words, examples.get(short, "")].append(
                name.removeprefix("torch.")
            )
    lines = [HEAD]
    for title in sorted(families):
        lines += [
            f"\n## {title}\n",
            "| functions of torch | rule | factors of a call |",
            "|---|---|---|",
        ]
        rows = sorted(families[title].items(), key=lambda row: sorted(row[1])[0].lower())
        for (words, example), names in rows:
            code = f"`{example}`" if example else ""
            lines.append(f"| {', '.join(sorted(names))} | {words} | {code} |")
    lines += [
        "\n## Gathered\n",
        "Some calls of these have no rule. They run on full tensors, on every rank:\n",
    ]
    lines += [
        f"- {name}: {why.splitlines()[0][:110]}" for name, why in sorted(watch.reasons.items())
    ]
    lines += [
        "\n## By their Python body\n",
        "These have no rule of their own; the functions that they call have:\n",
    ]
    lines.append(", ".join(sorted(watch.bodies - watch.reasons.keys())))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # some samples come out of sets
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.opinfo.operators", *argv])
    text = page(observed())
    if argv:
        Path(argv[0]).write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
