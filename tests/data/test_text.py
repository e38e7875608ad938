"""Tests of conversions: text of any script to sentences of tokens, and HTML to text."""

import html
import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flsim.data.formats.stackexchange import plain_text
from flsim.data.sentences import sentences, sentences_of_any_script


@given(st.text())
def test_any_text_is_html(text: str) -> None:
    plain_text(text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs"])))
def test_escaped_text_comes_back(text: str) -> None:
    assert plain_text(html.escape(text)).split() == text.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Thanks. Bye", ["thanks .", "bye"]),
        ("Really?! Yes...\nNo", ["really ? !", "yes . . .", "no"]),
        ("Don't split well-known words' ends-", ["don't split well-known words ' ends -"]),
        ("pi is 3.14, see os.path", ["pi is 3 . 14 , see os . path"]),
        ("Use it, e.g. here, vs. there etc. now", ["use it , e . g . here , vs . there etc . now"]),
        ("Smith et al. (2020), cf. fig. 2", ["smith et al . ( 2020 ) , cf . fig . 2"]),
        ("the signal. Next", ["the signal .", "next"]),  # "signal." ends like an abbreviation, but is a word
        ("See https://a.b/c?d=1#e. Then", ["see <URL> .", "then"]),
        ("(http://a.b/c), WWW.A.ORG!", ["( <URL> ) , <URL> !"]),
        ("http:// is no URL", ["http : / / is no <URL>".replace("<URL>", "url")]),
        ("<url> <URL>", ["< url > < url >"]),
        ("a\u00a0b\u2003c", ["a b c"]),
        (" \n\t\n\x00", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert [" ".join(sentence) for sentence in sentences(text)] == expected
    assert [" ".join(sentence) for sentence in sentences(text, ascii=True)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("naïve café\u2014bar", ["nave cafbar"]),
        ("\u212a can’t, Привет.", ["k cant , ."]),  # the Kelvin sign is a small k in lower case
        ("\n\u00e9\n", []),
    ],
)
def test_sentences_without_characters_outside_ascii(text: str, expected: list[str]) -> None:
    """With `ascii`, the result is that of TensorFlow Federated's third step, "Remove non-ascii symbols"."""
    assert [" ".join(sentence) for sentence in sentences(text, ascii=True)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Naïve Café—bar, can’t.", ["naïve café — bar , can’t ."]),
        ("“No.” Ja! Straße", ["“ no . ” ja !", "straße"]),
        ("ÉCOLE E\u0301cole", ["école école"]),
        ("Привет, мир! Ещё раз.", ["привет , мир !", "ещё раз ."]),
        ("Γειά σου. ΚΌΣΜΟΣ", ["γειά σου .", "κόσμος"]),
        ("صباح الخير؟ نعم، شكرا.", ["صباح الخير ؟", "نعم ، شكرا ."]),
        ('צה"ל אמר "כן"', ['צה"ל אמר " כן "']),  # WB7b and WB7c: an acronym holds a quotation mark
        ("हिन्दी है। दूसरा वाक्य।", ["हिन्दी है ।", "दूसरा वाक्य ।"]),
        ("한국어 문장입니다. 다음", ["한국어 문장입니다 .", "다음"]),
        ("日本のテスト。次！「はい。」終", ["日 本 の テスト 。", "次 ！", "「 は い 。 」", "終"]),  # WB13
        ("ไทย ok", ["ไ ท ย ok"]),  # without a dictionary, each cluster of Thai is a word
        ("می\u200cخواهم col·lecció", ["می\u200cخواهم col·lecció"]),  # WB4, WB6
        ("👍🏽 👩\u200d👩\u200d👧 🇫🇷🇩🇪 ❤️!", ["👍🏽 👩\u200d👩\u200d👧 🇫🇷 🇩🇪 ❤️ !"]),
        ("soft\u00adhyphen zero\u200bwidth \u200fמ\u200f", ["softhyphen zero width מ"]),
        ("м2 x² ٣٫٥ well‑known", ["м2 x ² ٣٫٥ well‑known"]),  # the decimal mark has Word_Break Numeric
        ("请看https://example.org/a，然后。 см. http://a.b/ё?", ["请 看 <URL> ， 然 后 。", "см .", "<URL> ?"]),
        ("é\ue000\x00\U000e0001", ["é"]),  # private use, control, and a tag of a language
    ],
)
def test_sentences_of_other_scripts(text: str, expected: list[str]) -> None:
    assert [" ".join(sentence) for sentence in sentences(text)] == expected


ASCII_PIECES = [*map(chr, range(128)), "e.g.", "i.e.", "etc.", "vs.", "don't", "3.14", "www.a", "https://x.y"]


@given(st.lists(st.sampled_from(ASCII_PIECES), max_size=30).map("".join))
def test_ascii_text_has_the_same_sentences_by_all_rules(text: str) -> None:
    """Two implementations agree on ASCII text: regular expressions for ASCII, and the rules of Unicode."""
    assert sentences(text) == sentences(text, ascii=True) == sentences_of_any_script(text)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_letter_or_digit_is_lost(text: str) -> None:
    expected = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).lower())
    assume(not any(start in expected for start in ("www.", "http", "ftp")))
    tokens = "".join(token for sentence in sentences(text) for token in sentence)
    assert [c for c in tokens if c.isalnum()] == [c for c in expected if c.isalnum()]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_of_any_script_are_normal_and_without_white_space(text: str) -> None:
    found = sentences(text)
    for form in ("NFC", "NFD"):
        assert sentences(unicodedata.normalize(form, text)) == found
    for sentence in found:
        assert sentence
        for token in sentence:
            assert token.split() == [token]
            assert token == "<URL>" or token == unicodedata.normalize("NFC", token.lower())


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
