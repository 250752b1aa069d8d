"""A proposed plan, the result of the functions of ``dt.plans``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from disttensor.core.placement import Placement


class Proposal(dict[str, Sequence[Placement]]):
    """A plan for ``shard_module``: name of each parameter -> placements. ``why[name]`` says the
    reason.

    It can be changed like a dict. When printed, equal entries of several layers share one line.

    >>> plan = dt.plans.megatron(torch.nn.TransformerEncoderLayer(4, 2, 8))
    >>> isinstance(plan, dt.plans.Proposal), plan.why["linear1.weight"]
    (True, 'mlp, first: its output is split')
    >>> plan["linear2.weight"] = [dt.Replicate(), dt.Replicate()]
    """

    def __init__(self) -> None:
        super().__init__()
        self.why: dict[str, str] = {}

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], int] = {}
        for name, placements in self.items():
            shown = "[" + ", ".join(map(str, placements)) + "]"
            key = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), shown, self.why.get(name, "")
            rows[key] = rows.get(key, 0) + 1
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        return "\n".join(
            f"{name.ljust(widths[0])}  {shown.ljust(widths[1])}  {why}".rstrip()
            for name, shown, why in rows
        )
