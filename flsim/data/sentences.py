"""Division of plain text into sentences of words, in any script.

The steps follow TensorFlow Federated's description of its Stack Overflow data (docstring of
`tff.simulation.datasets.stackoverflow.load_data`): "the bodies were parsed into sentences", then "1. Lowercase the
text, 2. Unescape HTML symbols, 3. Remove non-ascii symbols, 4. Separate punctuation as individual tokens (except
apostrophes and hyphens), 5. Removing extraneous whitespace, 6. Replacing URLS with a special token". Step 3 deletes
letters, and all text in most scripts. Therefore this module performs step 3 only on request (`ascii`). Otherwise the
text is normalized to NFC (Unicode Standard Annex #15), and the word boundaries of Unicode Standard Annex #29 extend the
rules for words to all scripts. ASCII text has the same sentences with both rules.
"""

import re
import unicodedata

import numpy as np
import regex

from flsim.base.arrays import Ints
from flsim.data.records import Records

URL = "<URL>"

# Abbreviations that do not end a sentence, although white space follows the full stop.
_ABBREVIATIONS = (
    "a.k.a", "al", "approx", "cf", "dr", "e.g", "eg", "eq", "eqs", "esp", "etc", "fig", "figs", "i.e", "ie", "incl",
    "mr", "mrs", "pp", "prof", "resp", "viz", "vol", "vs", "w.r.t",
)  # fmt: skip
_NO_ABBREVIATION = "".join(rf"(?<!\b{re.escape(word)}\.)" for word in _ABBREVIATIONS)

_WHITE_SPACE_IN_LINE = re.compile(r"[^\S\n]+")

# ASCII text, and text without the characters outside ASCII. A URL ends before the punctuation of its sentence.
_URL = re.compile(r"""(?<![a-z0-9])(?:https?://|ftp://|www\.)[^\s<>"]*[^\s<>".,:;!?'()\[\]{}*]""")
_SENTENCE_END = re.compile(rf"([.!?]){_NO_ABBREVIATION}\s+")
_TOKEN = re.compile(rf"{URL}|[a-z0-9]+(?:['-][a-z0-9]+)*|[!-/:-@\[-`{{-~]")

# Text with other characters. WB and SB are the properties Word_Break and Sentence_Break of Annex #29. In `regex`, \s
# lacks the separators \x1c to \x1f, which `re` and `str.split` count as white space.
_LETTER = r"\p{WB=ALetter}\p{WB=Hebrew_Letter}\p{WB=Numeric}"
_MARKS = r"\p{WB=Extend}\p{WB=ZWJ}"
_RUN = rf"[{_LETTER}][{_LETTER}{_MARKS}]*+"
_JOINER = (
    r"""[[\-'\u2010\u2011\p{WB=MidLetter}\p{WB=MidNumLet}]--[.:]]|(?<=\p{WB=Hebrew_Letter})"(?=\p{WB=Hebrew_Letter})"""
)
_SINGLE = r"(?=[\p{L}\p{N}\p{P}\p{S}])\X"
_ANY_TOKEN = regex.compile(
    rf"{URL}|{_RUN}(?:(?:{_JOINER}){_RUN})*+|\p{{WB=Katakana}}[\p{{WB=Katakana}}{_MARKS}]*+|{_SINGLE}", regex.V1
)
_ANY_URL = regex.compile(
    r"""(?<![a-z0-9])(?:https?://|ftp://|www\.)[[^\s\x1c-\x1f<>"]--[\p{P}--\p{ASCII}]]*"""
    r"""[[^\s\x1c-\x1f<>".,:;!?'()\[\]{}*]--[\p{P}--\p{ASCII}]]""",
    regex.V1,
)
_FORMAT = regex.compile(r"\p{WB=Format}+")
_FULL_STOP = "\u3002\uff01\uff1f\uff61"  # of scripts that put no space after a sentence
_ANY_SENTENCE_END = regex.compile(
    rf"([{_FULL_STOP}]++[{_FULL_STOP}\p{{Pe}}\p{{Pf}}]*+)\s*|([\p{{SB=STerm}}\p{{SB=ATerm}}]){_NO_ABBREVIATION}\s+"
)


def sentences(text: str, ascii: bool = False) -> list[list[str]]:
    """Return the sentences of plain text, each a list of at least one token.

    The steps, in this order:

    1. The text is lower-cased and normalized to NFC, so that an accented letter has one spelling.
    2. URLs (http, https, ftp, or beginning with www.) become the token ``<URL>``, the only token with capital letters.
       Punctuation after a URL is not part of the URL.
    3. Runs of white space, Unicode's included, become one space. Line feeds stay. Characters of Unicode's class Format
       (soft hyphens, marks of direction) are removed.
    4. Sentences end at line feeds, and after ``.``, ``!``, ``?`` or a mark of another script, if white space follows.
       Full-width marks, as in Chinese, end a sentence without white space. Sentences do not end after common
       abbreviations (e.g. i.e. etc. vs. and the like), nor inside ``3.14`` or ``os.path``. The mark stays in its
       sentence.
    5. Tokens are words and single punctuation characters or symbols. A word is a run of letters and digits with their
       combining marks, with single apostrophes and hyphens inside. As in Unicode's rules, in scripts without spaces
       (such as Chinese, Hiragana, Thai) each character is a word, and Katakana is not cut. Control characters and
       characters without a meaning in Unicode are dropped.
    6. Sentences without tokens are dropped.

    Args:
        ascii: whether to remove all characters outside ASCII after step 3, without a space in their place, as
            TensorFlow Federated does. Then no text is normalized.

    >>> sentences("Don't use e.g. os.path. Thanks!")
    [["don't", 'use', 'e', '.', 'g', '.', 'os', '.', 'path', '.'], ['thanks', '!']]
    >>> sentences("Naïve? Да."), sentences("Naïve? Да.", ascii=True)
    ([['naïve', '?'], ['да', '.']], [['nave', '?'], ['.']])
    """
    if ascii or text.isascii():
        text = _WHITE_SPACE_IN_LINE.sub(" ", _URL.sub(URL, text.lower()))
        text = text.encode("ascii", "ignore").decode("ascii")
        lines = _SENTENCE_END.sub(r"\1\n", text).split("\n")
        return [tokens for tokens in map(_TOKEN.findall, lines) if tokens]
    return sentences_of_any_script(text)


def sentences_of_any_script(text: str) -> list[list[str]]:
    """Return the sentences of plain text by the rules for all characters: `sentences` without its ASCII shortcut."""
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
    text = _FORMAT.sub("", _WHITE_SPACE_IN_LINE.sub(" ", _ANY_URL.sub(URL, text)))
    lines = _ANY_SENTENCE_END.sub(r"\1\2\n", text).split("\n")
    return [tokens for tokens in map(_ANY_TOKEN.findall, lines) if tokens]


def records(text: str, ascii: bool = False) -> list[str]:
    """Return the sentences of plain text, each as its tokens joined by spaces; see `sentences`."""
    return [" ".join(tokens) for tokens in sentences(text, ascii)]


def word_ends(text: str) -> list[int]:
    """Return the end of each word of a plain text, with the words of `sentences`; punctuation is not a word."""
    return [match.end() for match in _ANY_TOKEN.finditer(text) if any(map(str.isalnum, match[0]))]


# An index that finds all of several strings in text at once.


class NGrams:
    """A trie of strings, whose edges have keys node x `WIDTH` + next word; equal strings are one `group`, int64 [N]."""

    WIDTH = 2**24  # the largest vocabulary (`flsim.data.records.MOST_TOKENS`)

    def __init__(self, strings: Records) -> None:
        edges, ends = dict[int, int](), dict[int, int]()
        self.group = np.empty(len(strings), np.int64)
        for index, string in enumerate(strings):
            node = 0
            for word in string.tolist():
                node = edges.setdefault(node * self.WIDTH + word, len(edges) + 1)
            self.group[index] = ends.setdefault(node, len(ends))
        self.groups = len(ends)
        self._keys = np.array(sorted(edges), np.int64)
        self._nodes = np.array([edges[key] for key in self._keys.tolist()], np.int64)
        self._ends = np.full(len(edges) + 1, -1)
        self._ends[list(ends)] = list(ends.values())
        self._is_first = np.zeros(self.WIDTH, np.bool_)  # most words quickly turn out to begin no string
        self._is_first[self._keys[self._keys < self.WIDTH]] = True

    def find(self, records: Records) -> tuple[Ints, Ints]:
        """Return the group of strings and the record of each occurrence within a record, int64 [n] each."""
        place = np.flatnonzero(self._is_first[records.tokens])
        record = records.offsets.searchsorted(place, side="right") - 1
        node = np.zeros(len(place), np.int64)
        groups, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while len(place):
            is_inside = place < records.offsets[record + 1]
            place, record, node = place[is_inside], record[is_inside], node[is_inside]
            keys = node * self.WIDTH + records.tokens[place]
            at = self._keys.searchsorted(keys).clip(max=len(self._keys) - 1)
            is_known = self._keys[at] == keys
            place, record, node = place[is_known] + 1, record[is_known], self._nodes[at[is_known]]
            is_end = self._ends[node] >= 0
            groups.append(self._ends[node[is_end]])
            ends.append(record[is_end])
        return np.concatenate(groups), np.concatenate(ends)
