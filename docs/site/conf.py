"""Configuration of Sphinx for the site: guides in Markdown, reference from docstrings and from the C headers."""

import html
import itertools
import pathlib
import re
import sys
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.ext.autodoc import _property_types
from sphinx.util import logging

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from c_headers import INCLUDE, CHeader

import anabranch

# Both front ends export some classes. Their canonical names would be duplicates.
_property_types._ClassDefProperties.canonical_full_name = None
next(field for field in PyObject.doc_field_types if field.name == "variable").label = "Attributes"

ROOT = pathlib.Path(__file__).parents[2]

project = "Anabranch"
author = "the authors of Anabranch"
release = version = anabranch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
highlight_language = "none"
smartquotes_action = "D"  # quotation marks often belong to code
exclude_patterns = ["README.md"]  # index.md includes it

myst_heading_anchors = 4

default_role = "py:obj"  # Docstrings mark code with single backticks. Names of the reference become links.
autodoc_typehints = "none"  # Docstrings state dtypes and shapes.
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"Anabranch {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

#: Modules whose public names must be in the reference, each once.
DOCUMENTED = (
    "anabranch",
    "anabranch.jax",
    "anabranch.jax.exchange",
    "anabranch.jax.linen",
    "anabranch.jax.nnx",
    "anabranch.torch",
    "anabranch.torch.transformers",
    "anabranch.checkpoints",
)


def list_table(rows: list[str]) -> list[str]:
    """A Markdown table as reStructuredText."""
    cells = [[cell.strip() for cell in row.strip().removeprefix("|").removesuffix("|").split("|")] for row in rows]
    lines = [f"   {'  -' if i else '* -'} {cell}" for row in (cells[0], *cells[2:]) for i, cell in enumerate(row)]
    return ["", ".. list-table::", "   :header-rows: 1", "", *lines]


def escaped(line: str) -> str:
    """A line of prose without accidental markup outside backticks."""
    parts = re.split(r"(`[^`]+`)", line)
    parts[::2] = [re.sub(r"\*|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    text = re.sub(r"(?<=: )([A-Z])\.$", r"\1\.", "".join(parts))  # "num_experts: E." is no numbered list
    return re.sub(r"(?:^|(?<=\. ))(Gradients?|Source|Sizes): ", r"**\1:** ", text)


def from_markdown(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Converts the Markdown of docstrings that reStructuredText reads differently, before napoleon reads them."""
    found: list[str] = []
    is_prose = False  # whether the previous paragraph was prose without indentation
    for is_blank, group in itertools.groupby(lines, lambda line: not line.strip()):
        block = list(group)
        first = block[0].lstrip()
        if is_blank or first.startswith(">>> "):
            found += block
        elif first.startswith("|"):
            found += list_table(block)
        elif is_prose and block[0].startswith("    "):
            found += ["::", "", *block]
        else:
            found += map(escaped, block)
        is_prose = is_prose if is_blank else not block[0].startswith(" ") and not block[-1].startswith(" ")
    lines[:] = found


def adapt_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to headers and to README.md become links to pages of the site; the page of notes gets its menu."""
    text = re.sub(r"\]\((?:\.\./)+include/anabranch/(\w+)\.h\)", r"](/reference/c/\1.rst)", source[0])
    text = re.sub(r"\]\((?:\.\./)*README\.md(?=[#)])", "](/index.md", text)
    if docname == "docs/notes/README":
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    source[0] = text


def inline_svg(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Puts SVG pictures into the page, where they have its colours."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith(".svg"):
            svg = (pathlib.Path(app.srcdir) / image["uri"]).read_text()
            svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(image["alt"])}" ', 1)
            image.replace_self(nodes.raw("", f'<span class="chart">{svg}</span>', format="html"))


def check_names(app: Sphinx, env: Any) -> None:
    """Warns about public names that the reference lacks."""
    public = {f"{module.__name__}.{name}" for module in map(import_module, DOCUMENTED) for name in module.__all__}
    for header in INCLUDE.glob("*.h"):
        public |= set(re.findall(r"^(?:AB_API[^(]*\b|\} )(ab_\w+)[(;]", header.read_text(), re.MULTILINE))
    found = {name for domain in ("py", "c") for name, *_ in env.get_domain(domain).get_objects()}
    for name in sorted(public - found):
        logging.getLogger(__name__).warning("the reference lacks %s", name)


def setup(app: Sphinx) -> None:
    """Registers the functions of this file."""
    app.add_directive("c-header", CHeader)
    app.connect("autodoc-process-docstring", from_markdown, priority=100)
    app.connect("source-read", adapt_page)
    app.connect("doctree-resolved", inline_svg)
    app.connect("env-check-consistency", check_names)
