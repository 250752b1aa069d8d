"""The documentation site: ``make docs`` builds it into out/docs."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import disttensor

project = "disttensor"
author = "the authors of disttensor"
version = release = disttensor.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["inventories"]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
add_module_names = False
nitpicky = True
nitpick_ignore_regex = [  # types in signatures that have no entry: numpy's, torch's, internal ones
    (r"py:class", r"numpy\.ndarray|torch\.amp\..*|torch\.distributed\.distributed_c10d\..*"),
    (r"py:class", r"disttensor\.\w+\.\w+\.\w+"),
]

myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
os.environ["DISTTENSOR_PROGRESS"] = "0"  # no bars in the outputs of cells
copybutton_exclude = ".linenos, .gp, .go"  # of a doctest, neither prompts nor results

# Plain text, with the names that the site links to: the build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.txt"),
}

html_theme = "furo"
pygments_dark_style = "github-dark"  # underlines no imports
html_title = f"disttensor {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False

# Public name -> the page and the directive of its entry, and the name of its definition -> public.
ENTRY = re.compile(r"^\.\. (?:auto|py:)(\w+):: ([\w.]+)(?:\(.*\))?$", re.MULTILINE)
ENTRIES = {
    name: page.stem
    for page in (Path(__file__).parent / "reference").glob("*.rst")
    for _, name in ENTRY.findall(page.read_text())
}


def defined_as(name: str) -> str:
    """Returns the name under which autodoc sees the object of a public name in annotations."""
    module, _, rest = name.partition(".")
    thing = importlib.import_module(module)
    for part in rest.split("."):
        thing = getattr(thing, part, None)
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


PUBLIC = {defined_as(name): name for name in ENTRIES} | {
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}
INVENTORIES = "".join(p.read_text() for p in Path(__file__).parent.glob("inventories/*.txt"))
OTHERS = set(re.findall(r"^([\w.]+) \w+ \S+$", INVENTORIES, re.MULTILINE))


def link_pages_of_the_root(app: Sphinx, name: str, source: list[str]) -> None:
    """Replaces links to CONTRIBUTING.md and CHANGELOG.md by the pages of the site that include
    them."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+(CONTRIBUTING|CHANGELOG)\.md",
        lambda found: f"](/{found[1].lower()}.md",
        source[0],
    )


def link_definition(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Leads the name of a definition in a signature to the entry of the public name. A name of
    torch is left to intersphinx."""
    target = node["reftarget"] = PUBLIC.get(node["reftarget"], node["reftarget"])
    python = env.domains.python_domain
    return python.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, content)


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Links inline code that is a public name, as `dt.reshard`, to its entry, and gives links whose
    text is the name of a page, as `[rules.md](rules.md)`, the title of the page."""
    of_others = app.env.docname.startswith("coming_from/")  # where names without dt. are theirs
    for literal in list(doctree.findall(nodes.literal)):
        text = re.sub(r"\(.*\)$", "", literal.astext())
        name = re.sub(r"^dt\.", "disttensor.", text)
        bare = [] if of_others else [f"disttensor.{name}"]
        names = [n for n in (name, *bare) if n in ENTRIES or n in OTHERS]
        parents = (nodes.reference, pending_xref, nodes.title, desc_signature)
        if names and not isinstance(literal.parent, parents):
            to = {"refdomain": "py", "reftype": "obj", "reftarget": names[0], "refexplicit": True}
            xref = pending_xref("", literal.deepcopy(), refdoc=app.env.docname, **to)
            literal.replace_self(xref)
    for xref in doctree.findall(pending_xref):
        if xref.get("refdomain") == "doc" and xref.astext().endswith(".md"):
            xref["refexplicit"] = False
            xref[0].clear()


def show_programs(app: Sphinx, name: str, source: list[str]) -> None:
    """Shows the file in place of a paragraph that is only a link to a recipe."""
    source[0] = re.sub(
        r"^\[.*\]\(((?:\.\./)+examples/recipes/\w+\.(\w+))\)$",
        lambda found: (
            f"```{{literalinclude}} {found[1]}\n"
            f":language: {'python' if found[2] == 'py' else 'bash'}\n```"
        ),
        source[0],
        flags=re.MULTILINE,
    )


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_pages_of_the_root)
    app.connect("source-read", show_programs)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", link_definition, priority=400)
