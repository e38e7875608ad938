"""Settings of the documentation site, which `make docs` builds: Sphinx, pages in Markdown, the theme furo."""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any, get_type_hints

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import flsim

sys.path.append(str(Path(__file__).parents[1] / ".ci"))
from notebooks import markdown

project = "flsim"
html_title = f"flsim {flsim.__version__}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# A dead link, a missing anchor, a missing name and a page outside of the navigation are warnings, and `make docs` turns
# warnings into errors. Anchors of headings are those of GitHub. Types of other projects and types that `flsim` does not
# export have no page to link to.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]  # definition lists: the glossary, options and settings
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(collections|pandas|pathlib|torch|flsim\.\w+)\..+|'.+'|Interrupted|Comparison")]

smartquotes = False  # quotes and hyphens are parts of values and options, which readers copy
default_role = "literal"  # docstrings put code between single backticks
napoleon_custom_sections = [("Attributes", "Parameters")]  # of dataclasses, whose attributes are their parameters
autodoc_typehints = "description"
add_module_names = False
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = html_show_copyright = html_show_sphinx = False


def show_public_names() -> None:
    """Give public classes the module and the name that users import, and simplify types.

    Sphinx would otherwise describe `flsim.Model` as an alias of a class that the site does not show, print the marks
    within `Annotated`, and list None as what a function returns.
    """
    for name in flsim.__all__:
        public = getattr(flsim, name)
        if dataclasses.is_dataclass(public):
            public.__annotations__ = get_type_hints(public)
        if inspect.isclass(public):
            public.__module__, public.__name__, public.__qualname__ = "flsim", name, name
        elif public.__annotations__["return"] is None:
            del public.__annotations__["return"]


def shorten_defaults(*event: Any) -> tuple[str, str] | None:
    """Write `...` for a default that the class makes anew for each instance."""
    *_, signature, returned = event
    return (signature.replace("<factory>", "..."), returned) if signature else None


class NotebookParser(MystParser):
    """Reads a notebook, with its stored outputs, as a page in Markdown."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(markdown(inputstring), document)


def setup(app: Sphinx) -> None:
    show_public_names()
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.add_lexer("csv", TextLexer)  # Pygments has none
