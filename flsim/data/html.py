"""Conversion of a post's HTML to sentences of words.

The steps follow TensorFlow Federated's description of its Stack Overflow data (docstring of
`tff.simulation.datasets.stackoverflow.load_data`): "the bodies were parsed into sentences", then "1. Lowercase the
text, 2. Unescape HTML symbols, 3. Remove non-ascii symbols, 4. Separate punctuation as individual tokens (except
apostrophes and hyphens), 5. Removing extraneous whitespace, 6. Replacing URLS with a special token". Where that
description leaves a choice, `plain_text` and `sentences` document the choice made here.
"""

import re

from selectolax.lexbor import LexborHTMLParser

URL = "<URL>"

# What ends a sentence in a rendered page, `pre` included although its text is dropped.
_BLOCKS = (
    "address, article, aside, blockquote, br, caption, center, dd, details, div, dl, dt, fieldset, figcaption, figure, "
    "footer, form, h1, h2, h3, h4, h5, h6, header, hr, li, main, nav, ol, p, pre, section, summary, table, tbody, td, "
    "tfoot, th, thead, tr, ul"
)
_DROPPED = ["pre", "script", "style"]

# Never the end of a sentence, although white space follows the full stop.
_ABBREVIATIONS = (
    "a.k.a", "al", "approx", "cf", "dr", "e.g", "eg", "eq", "eqs", "esp", "etc", "fig", "figs", "i.e", "ie", "incl",
    "mr", "mrs", "pp", "prof", "resp", "viz", "vol", "vs", "w.r.t",
)  # fmt: skip

_WHITE_SPACE = re.compile(r"\s+")
_WHITE_SPACE_IN_LINE = re.compile(r"[^\S\n]+")
_OUTSIDE_ASCII = re.compile(r"[^\x00-\x7f]+")
# Ends before punctuation that belongs to the sentence around it.
_URL = re.compile(r"""(?<![a-z0-9])(?:https?://|ftp://|www\.)[^\s<>"]*[^\s<>".,:;!?'()\[\]{}*]""")
_SENTENCE_END = re.compile(
    r"([.!?])" + "".join(rf"(?<!\b{re.escape(word)}\.)" for word in _ABBREVIATIONS) + _WHITE_SPACE.pattern
)
_TOKEN = re.compile(rf"{URL}|[a-z0-9]+(?:['-][a-z0-9]+)*|[!-/:-@\[-`{{-~]")


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


def sentences(text: str) -> list[list[str]]:
    """Return the sentences of plain text, each a list of at least one token.

    The steps, in this order:

    1. The text is lower-cased.
    2. URLs (http, https, ftp, or beginning with www.) become the token ``<URL>``, the only token with capital letters.
       Punctuation after a URL is not part of it.
    3. Runs of white space, Unicode's included, become one space. Line feeds stay.
    4. All other characters outside ASCII are removed, without a space in their place.
    5. Sentences end at line feeds, and after ``.``, ``!`` or ``?`` if white space follows. They do not end after common
       abbreviations (e.g. i.e. etc. vs. and the like), nor inside ``3.14`` or ``os.path``. The mark stays in its
       sentence.
    6. Tokens are words (letters and digits, with single apostrophes and hyphens inside) and single punctuation
       characters. Control characters are dropped.
    7. Sentences without tokens are dropped.

    >>> sentences("Don't use e.g. os.path. Thanks!")
    [["don't", 'use', 'e', '.', 'g', '.', 'os', '.', 'path', '.'], ['thanks', '!']]
    """
    text = _WHITE_SPACE_IN_LINE.sub(" ", _URL.sub(URL, text.lower()))
    text = text.encode("ascii", "ignore").decode("ascii")
    lines = _SENTENCE_END.sub(r"\1\n", text).split("\n")
    return [tokens for tokens in map(_TOKEN.findall, lines) if tokens]


def records(text: str) -> list[str]:
    """Return the sentences of plain text, each as its tokens joined by spaces."""
    return [" ".join(tokens) for tokens in sentences(text)]


def removed_characters(text: str) -> int:
    """Return how many printable characters of plain text `sentences` removes in step 4, as they are outside ASCII.

    >>> removed_characters("naïve"), removed_characters("can’t"), removed_characters("plain")
    (1, 1, 0)
    """
    if text.isascii():
        return 0
    outside = "".join(_OUTSIDE_ASCII.findall(_URL.sub("", text.lower())))
    return sum(map(str.isprintable, outside))  # neither white space nor marks such as a zero-width joiner
