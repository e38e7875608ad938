import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flsim.data.html import plain_text, sentences

ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.")
PIECES = [
    *ABBREVIATIONS,
    *"abW19éİ.!?'-_$()\\",
    " ",
    " ",
    "\n",
    "\t",
    "\r\n",
    "\u00a0",
    "\u2028",
    "don't",
    "3.14",
    "os.path",
]


def slow_sentences(text: str) -> list[list[str]]:
    """The docstring of `sentences`, one character after another; only the abbreviations above, and no URLs."""
    text = "".join(" " if c.isspace() and c != "\n" else c for c in text.lower())
    text = "".join(c for c in text if ord(c) < 128)
    lines = [""]
    for index, character in enumerate(text):
        if character == "\n":
            lines.append("")
            continue
        lines[-1] += character
        followed = index + 1 < len(text) and text[index + 1].isspace()
        if character in ".!?" and followed and not ends_in_abbreviation(text[: index + 1]):
            lines.append("")
    return [tokens for tokens in map(slow_tokens, lines) if tokens]


def ends_in_abbreviation(text: str) -> bool:
    return any(
        text.endswith(word) and not (text[: -len(word)][-1:].isalnum() or text[: -len(word)].endswith("_"))
        for word in ABBREVIATIONS
    )


def slow_tokens(line: str) -> list[str]:
    tokens: list[str] = []
    inside = False
    for index, character in enumerate(line):
        joins = inside and character in "'-" and line[index + 1 : index + 2].isalnum()
        if character.isalnum() or joins:
            tokens = [*tokens[:-1], tokens[-1] + character] if inside else [*tokens, character]
            inside = True
        else:
            inside = False
            if " " < character < "\x7f":
                tokens.append(character)
    return tokens


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_sentences_do_what_their_docstring_says(text: str) -> None:
    assert sentences(text) == slow_sentences(text)


@given(st.text())
def test_any_text_gives_ascii_tokens_in_lower_case(text: str) -> None:
    for sentence in sentences(text):
        assert sentence
        for token in sentence:
            assert token == "<URL>" or (token.isascii() and token == token.lower() and token.split() == [token])


@given(st.text())
def test_any_text_is_html(text: str) -> None:
    plain_text(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"])))
def test_escaped_text_comes_back(text: str) -> None:
    assert plain_text(html.escape(text)).split() == text.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thanks.", ["thanks ."]),
        ("Thanks. Bye", ["thanks .", "bye"]),
        ("Really?! Yes...\nNo", ["really ? !", "yes . . .", "no"]),
        ("Don't split well-known words' ends-", ["don't split well-known words ' ends -"]),
        ("pi is 3.14, see os.path", ["pi is 3 . 14 , see os . path"]),
        ("Use it, e.g. here, vs. there etc. now", ["use it , e . g . here , vs . there etc . now"]),
        ("Smith et al. (2020), cf. fig. 2", ["smith et al . ( 2020 ) , cf . fig . 2"]),
        ("the signal. Next", ["the signal .", "next"]),  # ends in an abbreviation, but is none
        ("See https://a.b/c?d=1#e. Then", ["see <URL> .", "then"]),
        ("(http://a.b/c), WWW.A.ORG!", ["( <URL> ) , <URL> !"]),
        ("http:// is no URL", ["http : / / is no <URL>".replace("<URL>", "url")]),
        ("<url> <URL>", ["< url > < url >"]),
        ("naïve café\u2014bar", ["nave cafbar"]),
        ("a\u00a0b\u2003c", ["a b c"]),
        ("", []),
        (" \n\t\n\u00e9\n\x00", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [" ".join(sentence) for sentence in sentences(text)] == expected


@pytest.mark.parametrize(
    ("markup", "lines"),
    [
        ("<p>one</p><p>two</p>", ["one", "two"]),
        ("<p>one<br>two<br/>three", ["one", "two", "three"]),
        ("<ul><li>a<li>b</ul>c", ["a", "b", "c"]),
        ("<p>a sen\ntence\r\n in one line</p>", ["a sen tence in one line"]),
        ("un<em>believ</em>able <code>x</code>s <a href='http://x.y'>link</a>.", ["unbelievable xs link."]),
        ("code:<pre><code>int x;\nint y;</code></pre>then", ["code:", "then"]),
        ("a<script>alert(1)</script>b<style>p {}</style>c", ["abc"]),
        ("&lt;b&gt; &amp;amp; &#39;q&#x27; &eacute;", ["<b> &amp; 'q' \u00e9"]),
        ("a<!-- no -->b", ["ab"]),
        ("1 < 2 & 3 > 2", ["1 < 2 & 3 > 2"]),
        ("<table><tr><td>a<td>b<tr><th>c</table>", ["a", "b", "c"]),
        ("<frameset>", []),
        ("", []),
    ],
)
def test_plain_text(markup: str, lines: list[str]) -> None:
    assert [line.strip() for line in plain_text(markup).split("\n") if line.strip()] == lines
