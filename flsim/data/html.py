"""Conversion of a post's HTML to plain text: step 2 and "the bodies were parsed" of `flsim.data.sentences`."""

import re

from selectolax.lexbor import LexborHTMLParser

# What ends a sentence in a rendered page, `pre` included although its text is dropped.
_BLOCKS = (
    "address, article, aside, blockquote, br, caption, center, dd, details, div, dl, dt, fieldset, figcaption, figure, "
    "footer, form, h1, h2, h3, h4, h5, h6, header, hr, li, main, nav, ol, p, pre, section, summary, table, tbody, td, "
    "tfoot, th, thead, tr, ul"
)
_DROPPED = ["pre", "script", "style"]
_WHITE_SPACE = re.compile(r"\s+")


def plain_text(html: str) -> str:
    """Return the text of an HTML fragment, one line for each block element.

    - The text of `pre`, `script` and `style` is dropped.
    - Block elements and `br` begin and end lines.
    - Inline elements, `code` included, leave no trace, so a word may go through them.
    - Character references are unescaped.
    - White space, line feeds included, becomes one space, as in a rendered page.

    Any text is valid HTML, so nothing is refused.
    """
    tree = LexborHTMLParser(_WHITE_SPACE.sub(" ", html))
    for block in tree.css(_BLOCKS):
        block.insert_before("\n")
        block.insert_after("\n")
    tree.strip_tags(_DROPPED)
    return tree.body.text(deep=True, separator="") if tree.body else ""
