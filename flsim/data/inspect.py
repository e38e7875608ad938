"""The contents of a corpus in numbers, and as text for a terminal; lengths are counted piece by piece."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flsim.base.arrays import Ints
from flsim.data.corpus import Corpus, Split
from flsim.data.manifest import SPLITS, WHOLE, by_in
from flsim.data.records import author_of, largest_authors, windows
from flsim.data.vocabulary import SPECIAL_TOKENS, Layout

LENGTHS = ("words_per_record", "records_per_user", "words_per_user")
UNITS = ("posts", "records", "words", "users", "rows", "tokens")
TOP = (100, 1_000, 10_000)
_MOST_FREQUENT = 10
QUANTILES = {"min": 0.0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1.0}


def distribution(lengths: Iterable[NDArray[Any]]) -> dict[int, int]:
    """Return the number of things by length, ascending, of all lengths in several arrays, one in memory at a time."""
    counts = Counter[int]()
    for piece in lengths:
        values, times = np.unique(piece, return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    return dict(sorted(counts.items()))


def quantiles(counts: dict[int, int]) -> dict[str, int]:
    """Return, by name, the smallest length with at least this share of lengths up to it; empty without things."""
    values, cumulative = list(counts), np.cumsum(list(counts.values()))
    ranks = {name: max(1, int(np.ceil(share * cumulative[-1]))) for name, share in QUANTILES.items() if values}
    return {name: values[np.searchsorted(cumulative, rank)] for name, rank in ranks.items()}


def inspect(corpus: Corpus) -> dict[str, Any]:
    """Return a summary of a corpus as JSON-serialisable values; memory grows only with the number of users.

    Returns:
        A dictionary with these keys:

        - ``users``, ``records`` and ``words`` of the train split, which models are trained on; ``heldout_users`` and
          ``test_users``. ``utility``, the split that utility is measured on.
        - ``by``, whether words are words, single characters or tokens; ``layout``, its name; ``vocabulary``, the number
          of token ids, including the four special tokens; ``pieces``, the number of tokens of a tokenizer that are not
          complete words; ``record_words``.
        - ``dropped``, reason -> count of everything that was read and is not in train, heldout or test. The name of the
          reason contains the unit.
        - ``dropped_shares``, reason -> share of everything of that unit that was read (None if not known).
        - ``splits``, see below; ``membership``, see `_membership`.
        - ``authors``, the largest authors of train, heldout and test, and ``author_warnings`` about authors that may
          not be one person; see `flsim.data.records.largest_authors`.
        - ``sources``, ``parameters``, ``warnings`` and ``notes`` as in the manifest; ``digest`` of the corpus.

        Each split has these keys:

        - ``users``, ``records``, ``words``; ``prompt_words``, those of prompts (None without prompts);
          ``oov_share``, the share of words outside the vocabulary.
        - ``coverage``, the shares of words that the 100, 1,000, 10,000 and all words of the vocabulary cover. The words
          most frequent in the split are taken. Shares are None if there are no words.
        - ``words_occurring``, the number of words of the vocabulary that occur; ``most_frequent``, the ten most
          frequent words with counts.
        - ``words_per_record``, ``records_per_user`` and ``words_per_user``, each as quantile -> number.
    """
    opened = {name: corpus.split(name) for name in corpus.splits}
    words_per_user = {name: _words_per_user(split) for name, split in opened.items()}
    splits = {name: _described(split, words_per_user[name], corpus) for name, split in opened.items()}
    train, manifest = splits["train"], corpus.manifest
    authors, author_warnings = largest_authors(
        (name, user, words)
        for name in SPLITS
        for user, words in zip(opened[name].names, words_per_user[name].tolist(), strict=True)
    )
    dropped = dict(sorted(manifest["dropped"].items()))
    read = manifest["parameters"].get("read", {})
    return {
        "users": train["users"],
        "records": train["records"],
        "words": train["words"],
        "heldout_users": splits["heldout"]["users"],
        "test_users": splits["test"]["users"],
        "utility": corpus.test_users.folder.name,
        "layout": corpus.layout.name,
        "by": by_in(manifest),
        "vocabulary": corpus.layout.vocabulary_size,
        "pieces": corpus.layout.pieces,
        "record_words": corpus.layout.record_words,
        "dropped": dropped,
        "dropped_shares": {reason: _share(count, read.get(unit_of(reason))) for reason, count in dropped.items()},
        "splits": splits,
        "membership": _membership({name: split.names for name, split in opened.items()}),
        "authors": authors,
        "author_warnings": author_warnings,
        "sources": manifest["sources"],
        "parameters": manifest["parameters"],
        "warnings": manifest.get("warnings", []),
        "notes": manifest.get("notes", []),
        "digest": corpus.digest,
    }


def unit_of(reason: str) -> str | None:
    """Return the unit that a reason to drop counts: the first unit in its name."""
    return next((part for part in reason.split("_") if part in UNITS), None)


def _words_per_user(split: Split) -> Ints:
    """Return the number of words of each user, int64 [users]."""
    users = np.asarray(split.user_offsets)
    bounds = (
        (window, start, *np.searchsorted(users, (start, start + len(window))))
        for start, window in windows(split.record_offsets)
    )
    return np.diff(np.concatenate([window[users[first:last] - start] for window, start, first, last in bounds]))


def _described(split: Split, words_per_user: Ints, corpus: Corpus) -> dict[str, Any]:
    layout, lengths = corpus.layout, {"words_per_record": split.record_offsets, "records_per_user": split.user_offsets}
    token_counts = np.zeros(max(2**16, layout.vocabulary_size), np.int64)
    for _, tokens in windows(split.tokens):
        token_counts += np.bincount(tokens, minlength=len(token_counts))
    return {
        "users": len(split),
        "records": split.records,
        "words": split.words,
        "prompt_words": None if split.prompts is None else sum(int(part.sum()) for _, part in windows(split.prompts)),
        "oov_share": _share(int(token_counts[layout.oov]), split.words),
        **_coverage(token_counts, layout, corpus),
        **{
            name: quantiles(distribution(np.diff(window) for _, window in windows(offsets, overlap=1)))
            for name, offsets in lengths.items()
        },
        "words_per_user": quantiles(distribution([words_per_user])),
    }


def _coverage(token_counts: Ints, layout: Layout, corpus: Corpus) -> dict[str, Any]:
    text = layout.text_ids
    counts = token_counts[text.start : text.stop]
    order = np.argsort(-counts, kind="stable")
    covered, total = np.cumsum(counts[order]), int(token_counts.sum())
    tops = {**{str(top): top for top in TOP if top < len(text)}, "all": len(text)}
    frequent = [index for index in order[:_MOST_FREQUENT].tolist() if counts[index]]
    return {
        "coverage": {name: _share(int(covered[top - 1]), total) for name, top in tops.items()},
        "words_occurring": int(np.count_nonzero(counts)),
        "most_frequent": [
            {"word": corpus.vocabulary.text([text.start + index]), "count": int(counts[index])} for index in frequent
        ],
    }


def _membership(names: dict[str, list[str]]) -> dict[str, Any]:
    """Return which authors of heldout and test are members, for attacks on users; an author can be several users.

    ``{split}_authors`` is the number of authors. For all splits except train, ``{split}_also_train`` are the names of
    authors who are in train too, and ``{split}_only`` is the number of those who are not.
    """
    authors = {split: set(map(author_of, users)) for split, users in names.items()}
    membership: dict[str, Any] = {f"{split}_authors": len(members) for split, members in authors.items()}
    for split in authors.keys() - {"train"}:
        membership[f"{split}_also_train"] = sorted(authors[split] & authors["train"])
        membership[f"{split}_only"] = len(authors[split] - authors["train"])
    return membership


def _share(part: int, whole: int | None) -> float | None:
    return part / whole if whole else None


# The summary of a corpus as plain text for a terminal of 80 columns.


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
