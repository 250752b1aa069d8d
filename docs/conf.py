"""The documentation site: ``make docs`` builds it into out/docs."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

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

myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

# Plain text, with the names that the site links to: the build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.txt"),
}

html_theme = "furo"
html_title = f"disttensor {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False


def link_pages_of_the_root(app: Sphinx, name: str, source: list[str]) -> None:
    """Leads links to the pages beside README.md to the pages of the site that include them."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+(CONTRIBUTING|CHANGELOG)\.md",
        lambda found: f"](/{found[1].lower()}.md",
        source[0],
    )


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_pages_of_the_root)
