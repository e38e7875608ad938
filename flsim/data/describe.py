"""The summary of a corpus as plain text for a terminal of 80 columns."""

import textwrap
from collections.abc import Sequence
from typing import Any

from flsim.data.inspect import LENGTHS, unit_of
from flsim.data.manifest import WHOLE
from flsim.data.vocabulary import SPECIAL_TOKENS

WIDTH = 80
_LABEL = 13  # columns
_FEW = 3  # names
REASONS = {  # of others, the name of the reason is shown
    "posts_of_community_user": "by the Community user, which is not a person",
    "posts_of_dropped_authors": "by authors in --drop-authors",
    "posts_of_other_types": "not a question or an answer",
    "posts_not_utf8": "with half a surrogate pair, which is not UTF-8",
    "posts_too_long": "too long for a text that a person wrote",
    "posts_without_owner": "whose author is not known",
    "posts_without_user": "whose author is not known",
    "posts_without_words": "without words: only formulas, code or pictures",
    "records_duplicated": "that repeat an earlier record",
    "records_near_duplicated": "that are similar to an earlier record",
    "records_sanitized": "that look like secrets: likely in the model of one half only",
    "records_with_long_prompts": "whose prompts leave no room for an answer",
    "remainder_records": "after an author's last complete balanced user",
    "remainder_words": "after an author's last complete balanced user",
    "tokens_truncated": "of answers after the end of a record",
    "users_too_large": "with too much text for one author",
    "users_too_short": "too short for a balanced user",
    "words_truncated": "after the cut of longer records",
}

NOTES = {
    "characters": "characters: each word here is a character of the text",
    "tokens": "tokens: each word here is a token of the tokenizer, except that dropped words are words of the text",
}
WITHOUT_ASCII = "without words: only formulas, code or pictures, or only text that --ascii removed"
CHANGED = "rows_with_forbidden_characters"  # counted with dropped things, although the rows stay in the corpus


def describe(summary: dict[str, Any]) -> str:
    parts = [
        _splits(summary),
        _lengths(summary),
        _words(summary),
        _drops(summary),
        _membership_lines(summary),
        _origin(summary),
    ]
    lines = "\n\n".join("\n".join(part) for part in parts if part).split("\n")
    return "\n".join("".join(sign if sign.isprintable() else "?" for sign in line) for line in lines)


def _splits(summary: dict[str, Any]) -> list[str]:
    lines = [f"{'split':<{_LABEL}}{'authors':>11}{'users':>11}{'records':>15}{'words':>17}{'OOV':>9}"]
    for name, split in summary["splits"].items():
        authors = summary["membership"][f"{name}_authors"]
        counts = f"{authors:>11,}{split['users']:>11,}{split['records']:>15,}{split['words']:>17,}"
        lines.append(f"{name:<{_LABEL}}{counts}{_percent(split['oov_share']):>9}".rstrip())
    return lines


def _lengths(summary: dict[str, Any]) -> list[str]:
    """Return quantiles of lengths in train, which is balanced, and of complete test authors if the corpus has them."""
    lines = list[str]()
    for split_name in ["train", *(name for name in WHOLE.values() if name == summary["utility"])]:
        split = summary["splits"][split_name]
        if not split["words_per_user"]:
            continue
        names = list(split["words_per_user"])
        lines.append(f"{split_name:<20}" + "".join(f"{name:>12}" for name in names))
        for length in LENGTHS:
            # A split may have users without records: quantiles of records are then missing.
            title, numbers = length.replace("_", " "), [split[length].get(name, 0) for name in names]
            lines.append(f"{title:<20}" + "".join(f"{number:>12,}" for number in numbers))
    return [*lines, "OOV: share of words out of vocabulary. Punctuation counts as words."] if lines else []


def _words(summary: dict[str, Any]) -> list[str]:
    train = summary["splits"]["train"]
    words = summary["vocabulary"] - SPECIAL_TOKENS
    tokens = f"{summary['vocabulary']:,} token ids in layout {summary['layout']}"
    note = NOTES.get(summary["by"])
    lines = _entry("tokens", f"{tokens}; records of at most {summary['record_words']} words")
    lines += _entry("by", note) if note else []
    whole = f" ({words - summary['pieces']:,} complete words)" if summary["pieces"] else ""
    lines += _entry("vocabulary", f"{words:,} words{whole}, of which {train['words_occurring']:,} occur in train")
    if train["prompt_words"] is not None:
        share = _percent(train["prompt_words"] / train["words"])
        lines += _entry("prompts", f"{share} of train's words are of prompts, which models are not trained to write")
    covered = [(name, share) for name, share in train["coverage"].items() if share is not None]
    if covered:
        tops = [f"{'all' if name == 'all' else f'top {int(name):,}'} {share:.1%}" for name, share in covered]
        lines += _entry("coverage", f"of train's words: {', '.join(tops)}")
        words = (word["word"] for word in train["most_frequent"])
        visible = (w.translate({ord(" "): "␣", ord("\n"): "⏎"}) if w.isspace() else w.strip() for w in words)
        lines += _entry("frequent", " ".join(visible))
    return lines


def _drops(summary: dict[str, Any]) -> list[str]:
    """Return a line for each reason to drop, by unit, the largest count first, with shares of all that was read."""
    lines = []
    dropped = sorted(summary["dropped"].items(), key=lambda item: (unit_of(item[0]) or "", -item[1]))
    is_ascii = summary["parameters"].get("ascii", False)
    reasons = REASONS | ({"posts_without_words": WITHOUT_ASCII} if is_ascii else {})
    for reason, count in dropped:
        if count and reason != CHANGED:
            unit = unit_of(reason) or ""
            says = reasons.get(reason, reason.removeprefix(f"{unit}_").replace("_", " "))
            things = "authors" if unit == "users" else unit  # they were not cut into users
            begin = f"{count:>14,} {things:<8}{_percent(summary['dropped_shares'][reason]):>6}  "
            lines += textwrap.wrap(says, WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin))
    changed = summary["dropped"].get(CHANGED, 0)
    changed_rows = _entry("kept", f"{changed:,} rows, without the characters that XML forbids") if changed else []
    return [*([f"{'dropped':<{_LABEL}} {'of all read':>15}", *lines] if lines else []), *changed_rows]


def _membership_lines(summary: dict[str, Any]) -> list[str]:
    """Return the lines on authors of held-out and test users, complete test authors, and the largest authors."""
    lines, membership = [], summary["membership"]
    for split, label, warning in (
        ("heldout", "held-out", "none held out: user-level attacks have no safe non-members"),
        ("test", "test", ""),
    ):
        inside, outside = len(membership[f"{split}_also_train"]), membership[f"{split}_only"]
        names, is_heldout = _names(membership[f"{split}_also_train"]), split == "heldout"
        text = f"{inside:,} of {inside + outside:,} {label} authors are train authors too ({names})"
        if inside and is_heldout:
            lines += _entry("WARNING", f"{text}: they are members, and attacks must not use them as non-members")
        elif inside:
            lines += _entry("test", f"{text}, so members")
        elif outside and is_heldout:
            safe = "held-out users are the safe non-members for user-level attacks"
            lines += _entry("non-members", f"no held-out author is in train: {safe}")
        elif outside:
            lines += _entry("test", "no test author is in train")
        elif warning:
            lines += _entry("non-members", warning)
    if summary["utility"] in WHOLE.values():
        whole, balanced = (membership[f"{name}_authors"] for name in (summary["utility"], "test"))
        text = f"measured on {whole:,} complete test authors, of whom {balanced:,} also have balanced users"
        lines += _entry("utility", f"{text}; dropped things are counted for balanced users")
    shares = [f"{_names([author['author']])} {author['share']:.1%}" for author in summary["authors"][:_FEW]]
    return lines + (_entry("largest", f"authors by their share of all words: {', '.join(shares)}") if shares else [])


def _origin(summary: dict[str, Any]) -> list[str]:
    lines = []
    for source in summary["sources"]:
        format = [source["format"]] if "format" in source else []
        lines += _entry("source", ", ".join([source["name"], *format, f"{source['bytes']:,} bytes"]))
    for note in summary["notes"]:
        lines += _entry("note", note)
    for warning in (*summary["warnings"], *summary["author_warnings"]):
        lines += _entry("WARNING", warning)
    return [*lines, f"{'digest':<{_LABEL}}{summary['digest']}"]


def _entry(label: str, text: str) -> list[str]:
    begin, then = f"{label:<{_LABEL}}", " " * _LABEL
    return textwrap.wrap(text, WIDTH, initial_indent=begin, subsequent_indent=then, break_on_hyphens=False)


def _names(names: Sequence[str]) -> str:
    shortened = [name if len(name) <= 24 else f"{name[:21]}..." for name in names[:_FEW]]
    return ", ".join(shortened) + (f" and {len(names) - _FEW:,} more" if len(names) > _FEW else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
