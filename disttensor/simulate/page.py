"""A report as one HTML page that loads nothing else: figures, pictures and warnings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from disttensor.simulate import layer_shares, pictures
from disttensor.simulate.kind import Kind, names_of
from disttensor.simulate.layer_shares import Flops

_STYLE = """
body { font-family: sans-serif; max-width: 1000px; margin: 2em auto; color: #222 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 9px; text-align: right }
th { border-bottom: 1px solid #999 } td:first-child, th:first-child { text-align: left }
li { margin: .5em 0 } #timeline svg.bars { cursor: grab }
.bar div { height: 10px; background: #4c72b0 }
"""

# The bars of the time line are an svg of their own, whose viewBox is moved: the wheel zooms, the
# pointer drags, a double click shows all. ``end``: seconds.
_SCRIPT = """
const figures = JSON.parse(document.getElementById("report").textContent);
document.getElementById("warnings").dataset.count = figures.warnings.length;
const bars = document.querySelector("#timeline svg.bars"), box = bars.viewBox.baseVal;
const full = box.width, shown = document.getElementById("shown");
const ticks = [...document.querySelectorAll("#timeline .tick")];
const places = ticks.map(t => (t.x.baseVal[0].value - bars.x.baseVal.value) / full);
const values = ticks.map(t => +t.textContent);
const unit = values.length > 1 ? values.at(-1) / places.at(-1) : 1;
function show(x, width) {
  box.width = Math.min(full, Math.max(width, full / 1e5));
  box.x = Math.min(Math.max(x, 0), full - box.width);
  ticks.forEach((t, i) => t.textContent =
    +((box.x + places[i] * box.width) / full * unit).toPrecision(5));
  const ms = x => (x / full * figures.step_time * 1e3).toPrecision(5);
  shown.textContent = `${ms(box.x)} to ${ms(box.x + box.width)} ms`;
}
bars.addEventListener("wheel", e => {
  e.preventDefault();
  const r = bars.getBoundingClientRect(), at = (e.clientX - r.left) / r.width;
  const width = Math.min(full, box.width * Math.exp(e.deltaY / 300));
  show(box.x + at * (box.width - width), width);
}, {passive: false});
bars.addEventListener("pointermove", e => {
  const moved = e.movementX / bars.getBoundingClientRect().width;
  if (e.buttons) show(box.x - moved * box.width, box.width);
});
bars.addEventListener("dblclick", () => show(0, full));
show(0, full);
"""


def page(
    title: str, figures: dict[str, Any], rows: Sequence[Sequence[str]], kinds: Sequence[Kind]
) -> str:
    """Returns the page of a report: its title, figures, table of kinds with its head, and kinds."""
    said = "".join(f"<li>{escape(w)}</li>" for w in figures["warnings"]) or "<li>none</li>"
    layers = [("all ranks", figures["flops_by_layer"])]
    if len(kinds) > 1:
        layers += [(f"one of ranks {names_of(k.ranks)}", k.layers) for k in kinds]
    shares = "".join(
        f"<details{'' if i else ' open'}><summary>{name}</summary>{_share_table(one)}</details>"
        for i, (name, one) in enumerate(layers) if one
    )  # fmt: skip
    memory = [pictures.memory(k) for k in sorted(kinds, key=lambda k: -k.peak_memory)]
    data = json.dumps(figures).replace("<", "\\u003c")  # no text ends the element
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<style>{_STYLE}</style></head><body>
<h1>A simulated step</h1><p>{escape(title)}</p>
{_table(rows)}
<h2>Warnings</h2><ul id="warnings">{said}</ul>
<h2>Time line</h2><p>The wheel zooms, dragging moves, a double click shows all:
<span id="shown"></span></p>
<div id="timeline">{pictures.timeline(kinds)}</div>
<h2>Layers</h2><div id="layers">{shares}</div>
<h2>Memory</h2>{"".join(memory)}
<h2>Communication</h2>{pictures.volume(kinds)}
<script type="application/json" id="report">{data}</script>
<script>{_SCRIPT}</script></body></html>
"""


def _share_table(layers: Flops) -> str:
    """Returns the table of the layers that do most, with bars for the shares."""
    head, *body = layer_shares.rows(layers)
    bars = [f'<div style="width: {float(share[:-1]) * 2:g}px"></div>' for *_, share in body]
    return _table([head, *body], ["", *bars])


def _table(rows: Sequence[Sequence[str]], bars: Sequence[str] = ()) -> str:
    lines = []
    for i, row in enumerate(rows):
        cell = "td" if i else "th"
        bar = f'<{cell} class="bar">{bars[i]}</{cell}>' if bars else ""
        lines.append("".join(f"<{cell}>{escape(text)}</{cell}>" for text in row) + bar)
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
